"""The optimizer's clock: how many updates were *meant* to move the parameters.

A rule that waits for "2 updates without a change" must not count a micro-step of ``optax.MultiSteps``, a
step that ``optax.apply_if_finite`` skipped, or a step in which the loop accumulated gradients by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nnx_probes.host.record import Leaves, Record

__all__ = ["Clock", "counters"]

_ROLES = ("mini_step", "gradient_step", "notfinite_count", "total_notfinite", "last_finite")
_QUIET_FACTOR = 4
"""A loop that updates every k steps is given 4 k steps before standing still counts against it."""
_QUIET_LEAST = 8
_FIRST_TURN = 3
"""Steps an optimizer that has never stepped is given: a loop that accumulates over 4 calls by hand is none that forgot."""
_CONDITIONAL = 32
"""Steps an update that was compiled into a branch (accumulation by ``nnx.cond``) may wait for its first turn."""
_ACCUMULATED = 1000
_WARMUP_STEPS = 100
"""How long a known learning rate of 0 is taken for the start of a schedule when no run length is known."""


def counters(leaves: Leaves, values: np.ndarray) -> dict[str, float]:
    """Returns the scalars of an optimizer state by what they mean.

    Keys: ``step`` (``nnx.Optimizer.step``), ``mini_step`` and ``gradient_step`` (``MultiStepsState``),
    ``notfinite_count``, ``total_notfinite`` and ``last_finite`` (``ApplyIfFiniteState``), ``count`` (the largest
    count of the chain: Adam, schedules) and ``learning_rate`` (``inject_hyperparams``); only those that are there.

    Args:
      leaves: the optimizer's leaves.
      values: float64[n_leaves], the element of one-element leaves, NaN elsewhere.
    """
    found: dict[str, float] = {}
    for path, value in zip(leaves.paths, values.tolist(), strict=True):
        if value != value:
            continue
        name = path.rsplit(".", 1)[-1]
        if path == "step" or name in _ROLES:
            found.setdefault(name, value)
        elif name == "count":
            found["count"] = max(value, found.get("count", 0.0))
        elif name == "learning_rate":
            found.setdefault("learning_rate", value)
    return found


@dataclass
class Clock:
    """Turns the counters of successive records into effective updates.

    Args:
      total_steps: planned length of the run, None if unknown.

    Attributes:
      updates: effective updates seen so far.
      ever_stepped: whether any counter of the optimizer ever moved.
      began_stepped: whether the first record showed an optimizer that had stepped: updates do reach it.
      counters_moved: whether one moved since the previous record, None without an optimizer.
    """

    total_steps: int | None = None
    updates: int = 0
    ever_stepped: bool = False
    began_stepped: bool = False
    counters_moved: bool | None = None
    stood_still_steps: int = 0
    conditional: bool = False
    _last: dict[str, float] | None = None
    _longest_gap: int = 0
    _known_optimizer: bool = False

    def advance(self, record: Record) -> int:
        """Returns the effective updates between the previous record with parameters and this one."""
        calls = int(record.get("loop.steps", 1))
        self.conditional = bool(record.get("watch.conditional", 0) or record.get("watch.live", False))
        now = self._read(record)
        if now is None:
            effective = 0 if self._known_optimizer else calls
        elif self._last is None:
            effective = 0
            self.began_stepped = now.get("step", now.get("count", 0)) > 0
        else:
            effective = self._between(self._last, now, calls, record.step)
        if now is not None:
            self._known_optimizer, self._last = True, now
        self.updates += effective
        return effective

    def forget(self) -> None:
        """Starts comparing counters anew, as after a restore."""
        self._last = None

    def _read(self, record: Record) -> dict[str, float] | None:
        values, leaves = record.get("optimizer.value"), record.leaves.get("optimizer")
        return None if values is None or leaves is None else counters(leaves, values)

    def _between(self, last: Mapping[str, float], now: Mapping[str, float], calls: int, step: int) -> int:
        delta = {name: now[name] - last[name] for name in now if name in last and name != "learning_rate"}
        self.counters_moved = any(delta.values())
        if not self.counters_moved:
            return self._standing_still(calls)
        self.ever_stepped = True
        self._longest_gap = max(self._longest_gap, self.stood_still_steps + calls)
        self.stood_still_steps = 0
        if now.get("learning_rate") == 0 and self._zero_is_planned(step):
            return 0
        if "gradient_step" in now:
            never = now["gradient_step"] == 0 and now.get("mini_step", 0) > self._too_long()
            return calls if never else max(0, int(delta["gradient_step"]))
        moved = delta.get("step", delta.get("count", float(calls)))
        return max(0, int(moved - delta.get("total_notfinite", 0)))

    def _standing_still(self, calls: int) -> int:
        self.stood_still_steps += calls
        known_to_step = self.ever_stepped or self.began_stepped
        patience = max(_QUIET_LEAST, _QUIET_FACTOR * self._longest_gap) if known_to_step else 0
        if self.conditional:
            patience = max(patience, _CONDITIONAL)
        if not patience and self.stood_still_steps - calls < _FIRST_TURN:  # all at once when its turn is over
            return self.stood_still_steps if self.stood_still_steps >= _FIRST_TURN else 0
        return calls if self.stood_still_steps > patience else 0

    def _too_long(self) -> int:
        """How many batches may be accumulated before the first update: half of a planned run."""
        return _ACCUMULATED if self.total_steps is None else self.total_steps // 2

    def _zero_is_planned(self, step: int) -> bool:
        if self.total_steps is None:
            return step < _WARMUP_STEPS
        return step < 0.1 * self.total_steps or self.near_the_end(step)

    def near_the_end(self, step: int) -> bool:
        """Whether `step` lies in the last 5 % of a run of planned length."""
        return self.total_steps is not None and step >= 0.95 * self.total_steps
