"""When a probe is due."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

__all__ = ["LADDER", "Pace"]

LADDER = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Intervals ``every="auto"`` chooses from."""
_START = 10
_KEPT = 5
"""An interval follows from the median of so many measured probes: one that was disturbed does not move it."""
_EARLY = 5
"""The probes after the first up to this one are timed,"""
_SELDOM = 8
"""and then one in so many, since timing a probe lets the device run dry for three steps."""


@dataclass
class Pace:
    """Due at the first step seen and whenever a multiple of `every` is reached or passed.

    Args:
      every: interval in steps; under a budget the one to begin with.
      budget: the share of loop time that probing may take, None for a fixed interval.
      always: time every probe, whatever the budget.

    Attributes:
      due: the next step at which a probe is due.
    """

    every: int
    budget: float | None = None
    always: bool = False
    due: int = -(2**62)
    _at: int = 0
    _probes: int = 0
    _costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @classmethod
    def auto(cls, budget: float) -> Pace:
        """Returns a pace that keeps probing under `budget`."""
        return cls(every=_START, budget=budget)

    @property
    def timed(self) -> bool:
        """Whether the next probe is to be timed; never the first, which compiles."""
        if not self._probes:
            return False
        early = self._probes <= _EARLY or self._probes % _SELDOM == 0
        return self.always or (self.budget is not None and early)

    def restart(self) -> None:
        """Makes the next step due, whatever its number."""
        self.due = -(2**62)

    def advance(self, step: int) -> None:
        """Notes that `step` was probed."""
        self._probes += 1
        self._at = step
        self._plan()

    def spent(self, cost_s: float, step_s: float) -> None:
        """Takes the measured cost of a probe and the time of a step into account; under a budget `every` may change.

        The interval goes up as soon as the share is over budget, and down only when a shorter one would use less than
        half of it, so it does not flap. The first measured probe alone decides nothing: the second variant of the step may
        have been compiled in it.
        """
        if self.budget is None or step_s <= 0:
            return
        self._costs_s.append(cost_s)
        self._steps_s.append(step_s)
        if len(self._costs_s) < 2:
            return
        need = _typical(self._costs_s) / (self.budget * _typical(self._steps_s))
        shortest = _at_least(need)
        if shortest > self.every or _at_least(2 * need) < self.every:
            self.every = shortest
            self._plan()

    def _plan(self) -> None:
        self.due = (self._at // self.every + 1) * self.every


def _typical(seconds: Sequence[float]) -> float:
    return min(seconds) if len(seconds) < 3 else median(seconds)


def _at_least(interval: float) -> int:
    return next((n for n in LADDER if n >= interval), LADDER[-1])
