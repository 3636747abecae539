"""Gradients that fade on their way to the first layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Leaves, Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.rules.nonfinite import poisoned
from nnx_probes.host.trend import converged

__all__ = ["VanishingGradients"]


@dataclass(frozen=True)
class VanishingGradients(Rule):
    """A matrix gets a far smaller gradient than others, and so small an update that it does not learn: WARN.

    Both must hold over `updates` effective updates: the root mean square of its gradient is at most `share` of the largest
    among the matrices, and its update is below `ratio` of itself. With optimizers that normalise (Adam, Lion, Muon) the
    second does not hold and the rule is quiet, as it should be. Gradients of exactly 0 are `zero_gradients`' matter.
    Layers of stacked leaves are judged one by one.

    Delay: `updates` effective updates, rounded up to the next probe.

    Args:
      share: of the largest root mean square.
      ratio: update norm over parameter norm.
      updates: how long.
    """

    share: float = 1e-4
    ratio: float = 1e-6
    updates: int = 32

    slug = "vanishing_gradients"
    reads = ("grads.norm", "updates.ratio")
    by_leaf = True

    def check(self, record: Record, history: History) -> Alert | None:
        if converged(history) or poisoned(record):
            return None
        leaves = record.leaves["grads"]
        largest = _largest(record)
        if largest <= 0:
            return None
        paths = self._faded(record, history, leaves, "grads.norm", "updates.ratio", largest)
        if "slices" in record.leaves and "slices.updates_ratio" in record:
            table = record.leaves["slices"]
            paths += self._faded(record, history, table, "slices.grads_norm", "slices.updates_ratio", largest)
        if not paths:
            return None
        matrices = sum(len(shape) >= 2 for shape in leaves.shapes)
        message = (
            f"Over the last {self.updates} updates the gradient of {len(paths)} of {matrices} matrices was less than "
            f"{self.share:g} of the largest one (root mean square), and moved each by less than {self.ratio:g} of itself."
        )
        title = "Gradients vanish on their way back"
        return Alert(
            record.step, self.slug, Level.WARN, title, message, tuple(paths), values={"leaves": float(len(paths))}
        )

    def _faded(
        self, record: Record, history: History, leaves: Leaves, norm: str, ratio: str, largest: float
    ) -> list[str]:
        roots = np.sqrt(_sizes(leaves))

        def weak(norms: np.ndarray) -> np.ndarray:
            faded: np.ndarray = (norms > 0) & (norms / roots <= self.share * largest)
            return faded

        def slow(ratios: np.ndarray) -> np.ndarray:
            small: np.ndarray = (ratios < self.ratio) & (ratios > 0)
            return small

        streaks = (history.windows.streak(norm, weak), history.windows.streak(ratio, slow, effective=True))
        if any(len(s) != len(leaves) for s in streaks):
            return []
        rows = _matrices(leaves) & (np.minimum(*streaks) >= self.updates)
        return [path for path, row in zip(leaves.paths, rows, strict=True) if row]


def _largest(record: Record) -> float:
    """The largest root mean square of a gradient among matrices (the newest stands for the whole window)."""
    leaves, norms = record.leaves["grads"], record.values["grads.norm"]
    rows = _matrices(leaves)
    values = norms[rows] / np.sqrt(_sizes(leaves)[rows])
    return float(np.max(values[np.isfinite(values)], initial=0.0))


def _matrices(leaves: Leaves) -> np.ndarray:
    return np.array([len(shape) >= 2 for shape in leaves.shapes], bool)


def _sizes(leaves: Leaves) -> np.ndarray:
    return np.array([max(int(np.prod(shape)), 1) for shape in leaves.shapes], np.float64)
