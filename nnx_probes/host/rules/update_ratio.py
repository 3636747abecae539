"""Updates out of proportion to their parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.rules.nonfinite import poisoned
from nnx_probes.host.trend import converged

__all__ = ["UpdateRatio"]

_SHRUNK = 1e-2


@dataclass(frozen=True)
class UpdateRatio(Rule):
    """The norm of a matrix's update over the norm of the matrix stays outside [`low`, `high`]: WARN.

    Usual is about 1e-3. Only leaves of at least two axes are judged: biases and scales begin at 0 or have a scale of
    their own. Updates of exactly 0 are other rules' matter; so is a ratio that only shrinks with the schedule.

    Delay: `updates` effective updates, rounded up to the next probe.

    Args:
      low: smallest usual ratio.
      high: largest usual ratio.
      updates: how long.
    """

    low: float = 1e-7
    high: float = 0.3
    updates: int = 32

    slug = "update_ratio"
    reads = ("updates.ratio",)
    by_leaf = True

    def check(self, record: Record, history: History) -> Alert | None:
        leaves, ratio = record.leaves["updates"], record.values["updates.ratio"]
        if poisoned(record):
            return None
        matrix = np.array([len(shape) >= 2 for shape in leaves.shapes], bool)
        high = matrix & (history.windows.streak("updates.ratio", self._above, effective=True) >= self.updates)
        low = matrix & (history.windows.streak("updates.ratio", self._below, effective=True) >= self.updates)
        ever = history.windows.ever("updates.ratio")
        low &= ratio > _SHRUNK * ever  # it was small from the start: not the end of a schedule, not convergence
        if converged(history) or "vanishing_gradients" in history.raised:
            low[:] = False
        rows, word, limit = (high, "large", self.high) if high.any() else (low, "small", self.low)
        if not rows.any():
            return None
        paths = tuple(path for path, row in zip(leaves.paths, rows, strict=True) if row)
        typical = float(np.median(ratio[rows]))
        message = (
            f"Over the last {self.updates} updates the update of {len(paths)} of {int(matrix.sum())} matrices was "
            f"{'above' if word == 'large' else 'below'} {limit:g} of the matrix itself (norm over norm; now {typical:.2g}, "
            "usual is about 1e-3)."
        )
        title = f"Updates are very {word} against their parameters"
        values = {"leaves": float(len(paths)), "ratio": typical, "large": float(word == "large")}
        return Alert(record.step, self.slug, Level.WARN, title, message, paths, values=values)

    def _above(self, ratio: np.ndarray) -> np.ndarray:
        above: np.ndarray = ratio > self.high
        return above

    def _below(self, ratio: np.ndarray) -> np.ndarray:
        below: np.ndarray = (ratio > 0) & (ratio < self.low)
        return below
