"""Training that gets worse and worse."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.baseline import shift
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["Diverging"]

_FIRST = 4
_SMALL = 1e-2


@dataclass(frozen=True)
class Diverging(Rule):
    """The loss has risen far above its best, and stays there.

    The median of the last 16 probes against the best median of 64 among the last 1024: WARN when it is `times` times
    as large (and 2 sigma),
    ERROR when the gradient norm has grown so too, or when the loss is `far` times as large. Before there are that many
    probes: `far` times the median of the first 4 for `early` steps WARN, `very_far` times ERROR. The gradient norm alone
    is no sign: with Adam it drifts by factors of 10 to 100 in healthy runs. A loss below 1 % of its first value is
    never called diverging. Only positive losses are judged.

    Delay: 9 probes for a jump that stays, `early` steps and 3 probes at the start, from the 6th loss on.

    Args:
      times: rise of the loss, WARN.
      far: rise of the loss, ERROR, or WARN at the start.
      very_far: rise of the loss at the start, ERROR.
      early: steps for which the loss must stay that high at the start.
    """

    times: float = 3.0
    far: float = 10.0
    very_far: float = 100.0
    early: int = 8

    slug = "diverging"
    reads = ("loss",)

    def check(self, record: Record, history: History) -> Alert | None:
        steps, losses = history.since_mark("loss")
        good = np.isfinite(losses)
        steps, losses = steps[good], losses[good]
        if len(losses) < _FIRST + 2 or losses.min() <= 0 or not np.isfinite(float(record.values["loss"])):
            return None
        rise = shift(losses)
        if rise is None:
            return self._start(record, steps, losses)
        grown = float(np.exp(rise[0]))
        first = history.first("loss") or float(losses[0])
        if rise[0] < max(np.log(self.times), 2 * rise[1]) or float(np.median(losses[-16:])) < _SMALL * first:
            return None
        _, norms = history.since_mark("grads.norm")
        also = shift(norms)
        both = also is not None and also[0] >= max(np.log(self.times), 2 * also[1])
        level = Level.ERROR if both or grown >= self.far else Level.WARN
        return self._alert(
            record, level, grown, f"its best stretch{'; the gradient norm has grown too' if both else ''}"
        )

    def _start(self, record: Record, steps: np.ndarray, losses: np.ndarray) -> Alert | None:
        usual = float(np.median(losses[:_FIRST]))
        last_fine = np.flatnonzero(losses < self.far * usual)
        began = int(last_fine[-1]) + 1 if len(last_fine) else 0
        if len(losses) - began < 3 or record.step - int(steps[began]) < self.early - 1:
            return None
        grown = float(losses[began:].min()) / usual
        level = Level.ERROR if float(losses[-1]) / usual >= self.very_far else Level.WARN
        return self._alert(record, level, max(grown, float(losses[-1]) / usual), "its first values")

    def _alert(self, record: Record, level: Level, grown: float, against: str) -> Alert:
        message = f"At step {record.step} the loss is {float(record.values['loss']):.4g}: {grown:.3g} times {against}."
        return Alert(record.step, self.slug, level, "Training diverges", message, values={"ratio": grown})
