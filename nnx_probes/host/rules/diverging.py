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
_NEARLY_ALL = 0.9
_EQUAL = 1e-3


@dataclass(frozen=True)
class Diverging(Rule):
    """The loss has risen far above its best, and stays there.

    The median of the last 16 probes against the best median of 64 among the last 1024: WARN when it is `times` times
    as large (and 2 sigma), ERROR when the gradient norm has grown so too, or when the loss is `far` times as large. Before
    there are that many probes: `far` times the median of the first 4 (of the first alone, if they left it at once) for
    `early` steps WARN, `very_far` times ERROR. The gradient norm alone is no sign: with Adam it drifts by 10 to 100 in healthy
    runs. A loss below 1 % of its first value is never called diverging. Only positive losses are judged.

    Measured gradients and updates tell sooner: WARN when for `uphill` updates at least 90 % of the matrices went along their
    gradient (cosine above 0.3), or one was changed by its raw gradient, added (cosine and ratio of norms 1 to within a
    thousandth), which is what ``optax.masked`` does to the leaves it leaves out.

    Delay: 9 probes for a jump that stays, `early` steps and 3 probes at the start, from the 6th loss on.

    Args:
      times: rise of the loss, WARN.
      far: rise of the loss, ERROR, or WARN at the start.
      very_far: rise of the loss at the start, ERROR.
      uphill: updates along the gradient.
      early: steps for which the loss must stay that high at the start.
    """

    times: float = 3.0
    far: float = 10.0
    very_far: float = 100.0
    early: int = 8
    uphill: int = 32

    slug = "diverging"
    descends = True
    reads = ("loss",)

    def check(self, record: Record, history: History) -> Alert | None:
        return self._course(record, history) or self._uphill(record, history)

    def _uphill(self, record: Record, history: History) -> Alert | None:
        table, windows = record.leaves.get("updates"), history.windows
        if table is None or "updates.cosine" not in record or "grads.norm" not in record:
            return None
        matrix = np.array([len(shape) >= 2 for shape in table.shapes], bool)
        along = windows.streak("updates.cosine", _along, effective=True) >= self.uphill
        same = windows.streak("updates.cosine", _parallel, effective=True) >= self.uphill
        with np.errstate(all="ignore"):
            ratio = record.values["updates.norm"] / record.values["grads.norm"]
        raw = matrix & same & (np.abs(ratio - 1) < _EQUAL)
        rows = raw if raw.any() else matrix & along
        if not raw.any() and (not matrix.any() or rows.sum() < _NEARLY_ALL * matrix.sum()):
            return None
        paths = tuple(path for path, row in zip(table.paths, rows, strict=True) if row)
        how = "are their raw gradients, added" if raw.any() else "go along their gradient instead of against it"
        message = (
            f"Over the last {self.uphill} updates those of {len(paths)} of {int(matrix.sum())} matrices {how}; "
            f"first {paths[0]}."
        )
        return Alert(record.step, self.slug, Level.WARN, "Updates go uphill", message, paths)

    def _course(self, record: Record, history: History) -> Alert | None:
        steps, losses = history.since_mark("loss")
        good = np.isfinite(losses)
        steps, losses = steps[good], losses[good]
        if len(losses) < _FIRST + 2 or losses.min() <= 0 or not np.isfinite(float(record.values["loss"])):
            return None
        rise = shift(losses)
        if rise is None:
            return self._start(record, steps, losses)
        grown = float(np.exp(rise[0]))
        first = history.scale("loss") or float(losses[0])
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
        if usual > self.times * losses[0]:  # it left at once
            usual = float(losses[0])
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


def _along(cosine: np.ndarray) -> np.ndarray:
    found: np.ndarray = cosine > 0.3
    return found


def _parallel(cosine: np.ndarray) -> np.ndarray:
    found: np.ndarray = cosine > 1 - _EQUAL
    return found
