"""When a probe is due."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LADDER", "Pace"]

LADDER = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Intervals ``every="auto"`` chooses from."""
_START = 10
_SMOOTH = 0.3


@dataclass
class Pace:
    """Due at the first step seen and whenever a multiple of `every` is reached or passed.

    Args:
      every: interval in steps, None for a budgeted one.
      budget: with ``every=None``, the share of loop time that probing may take.

    Attributes:
      due: the next step at which a probe is due.
    """

    every: int
    budget: float | None = None
    due: int = -(2**62)
    _cost_s: float = 0.0
    _step_s: float = field(default=0.0)

    @classmethod
    def auto(cls, budget: float) -> Pace:
        """Returns a pace that keeps probing under `budget`."""
        return cls(every=_START, budget=budget)

    def restart(self) -> None:
        """Makes the next step due, whatever its number."""
        self.due = -(2**62)

    def advance(self, step: int) -> None:
        """Notes that `step` was probed."""
        self.due = (step // self.every + 1) * self.every

    def spent(self, cost_s: float, step_s: float) -> None:
        """Takes a measured probe cost and step time into account; changes `every` only under a budget.

        The interval goes up as soon as the share is over budget, and down only when a shorter one would use less than
        half of it, so it does not flap.
        """
        if self.budget is None or step_s <= 0:
            return
        blend = _SMOOTH if self._cost_s else 1.0
        self._cost_s += blend * (cost_s - self._cost_s)
        self._step_s += blend * (step_s - self._step_s)
        need = self._cost_s / (self.budget * self._step_s)
        shortest = next((n for n in LADDER if n >= need), LADDER[-1])
        if shortest > self.every or next((n for n in LADDER if n >= 2 * need), LADDER[-1]) < self.every:
            self.every = shortest
