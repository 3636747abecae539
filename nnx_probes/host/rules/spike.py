"""Sudden jumps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.baseline import Baseline, baseline
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["Spike"]

_RECENT = 4
_WORDS = {"grads.norm": "the gradient norm", "updates.norm": "the update norm", "loss": "the loss"}


@dataclass(frozen=True)
class Spike(Rule):
    """The gradient or update norm jumps out of its usual range.

    A jump is (robust z >= `z` and `ratio` times the median) or `jump` times the median, against the logarithms of the
    last 128 accepted values (at least 64). Once: INFO, for one odd batch is no fault and heavy-tailed losses make such
    jumps by themselves; `jump` times, or a second time within 4 probes: WARN; at 3 of 4 probes, or at 2 with the loss
    jumping too: ERROR. The loss alone: INFO; so are updates alone, which jump when a schedule starts over. Both
    conditions are needed: on 14 healthy runs of 536 steps they gave no false alarm on gradient norms, the ratio alone
    43, mean plus 6 sigma 2.

    Delay: one probe, from 64 probes on.

    Args:
      z: robust standard deviations, in logarithms.
      ratio: times the median.
      jump: times the median, whatever the spread.
    """

    z: float = 6.0
    ratio: float = 3.0
    jump: float = 100.0

    slug = "spike"
    reads = ()

    def check(self, record: Record, history: History) -> Alert | None:
        found = {name: self._jumps(history, name, record.step) for name in _WORDS if self._is_new(record, name)}
        norms = [name for name in ("grads.norm", "updates.norm") if (found.get(name) or (0, 0.0))[0]]
        schedule = norms == ["updates.norm"]  # updates alone jump when a schedule starts over
        loss = (found.get("loss") or (0, 0.0))[0] > 0
        if not norms and not loss:
            return None
        name = norms[0] if norms else "loss"
        count, times = found[name] or (0, 0.0)
        level = self._level(count, times, loss=loss) if norms and not (schedule and not loss) else Level.INFO
        message = f"At step {record.step} {_WORDS[name]} was {times:.1f} times its usual value"
        message += f", at {count} of the last {_RECENT} probes." if count > 1 else "."
        if loss and norms:
            message += " The loss jumped too."
        title = f"{_WORDS[name].capitalize()} jumps"
        return Alert(record.step, self.slug, level, title, message, values={"ratio": times, "probes": float(count)})

    def _level(self, count: int, times: float, *, loss: bool) -> Level:
        if count >= 3 or (count == 2 and loss):
            return Level.ERROR
        return Level.WARN if count == 2 or times >= self.jump else Level.INFO

    def _is_new(self, record: Record, name: str) -> bool:
        return name in record

    def _jumps(self, history: History, name: str, step: int) -> tuple[int, float] | None:
        """(how many of the last 4 values jump, ratio of the newest), None unless the newest does."""
        _, values = history.since_mark(name)
        if not len(values) or not np.isfinite(values[-1]):
            return None
        base = baseline(values[:-1], z=self.z, ratio=self.ratio, jump=self.jump)
        if base is None or not self._is_jump(base, float(values[-1])):
            return None
        recent = [float(v) for v in values[-_RECENT:] if np.isfinite(v)]
        return sum(self._is_jump(base, v) for v in recent), base.ratio(float(values[-1]))

    def _is_jump(self, base: Baseline, value: float) -> bool:
        ratio = base.ratio(value)
        return (base.z(value) >= self.z and ratio >= self.ratio) or ratio >= self.jump
