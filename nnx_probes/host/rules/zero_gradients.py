"""Gradients that are exactly 0."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.rules.nonfinite import poisoned
from nnx_probes.host.trend import converged

__all__ = ["ZeroGradients"]


@dataclass(frozen=True)
class ZeroGradients(Rule):
    """Every element of a trained parameter's gradient is exactly 0.

    The whole tree: ERROR after `whole` effective updates. One leaf, or one layer of a stacked leaf: WARN after `leaf`
    updates, `used_leaf` if it ever had a gradient (an expert or an embedding that is rarely used has pauses). INFO when
    the loss has converged, and for layers of a stack in which others pause and come back: those are experts, and one that is
    not chosen gets nothing.

    Delay: the thresholds, rounded up to the next probe.

    Args:
      whole: updates for the whole tree.
      leaf: updates for one leaf or layer that never had a gradient.
      used_leaf: updates for one that had.
    """

    whole: int = 2
    leaf: int = 8
    used_leaf: int = 64

    slug = "zero_gradients"
    reads = ("grads.max_abs",)
    by_leaf = True

    def check(self, record: Record, history: History) -> Alert | None:
        windows = history.windows
        zero_for = windows.streak("grads.max_abs", _is_zero)
        leaves = record.leaves["grads"]
        sized = np.array([0 not in shape for shape in leaves.shapes], bool)
        if len(zero_for) != len(sized) or not sized.any() or poisoned(record):
            return None
        done = converged(history)
        if (zero_for[sized] >= self.whole).all():
            level = Level.INFO if done else Level.ERROR
            return self._alert(record, level, leaves.paths, len(leaves), int(zero_for[sized].min()), whole=True)
        rows = sized & self._long(zero_for, windows.ever("grads.max_abs"))
        paths = [path for path, row in zip(leaves.paths, rows, strict=True) if row]
        shortest = [int(n) for n in zero_for[rows]]
        if "slices.grads_max_abs" in record:
            own = record.leaves["slices"].paths
            times = windows.streak("slices.grads_max_abs", _is_zero)
            long = self._long(times, windows.ever("slices.grads_max_abs"))
            inside = [not path.startswith(tuple(f"{p}[" for p in paths)) for path in own]
            routed = self._routed(own, windows.came_back("slices.grads_max_abs"))
            picked = [(path, int(n)) for path, n, yes, new in zip(own, times, long, inside, strict=True) if yes and new]
            paths += [path for path, _ in picked]
            shortest += [n for _, n in picked]
            done = done or (bool(paths) and all(_stack(path) in routed for path in paths))
        if not paths:
            return None
        level = Level.INFO if done else Level.WARN
        return self._alert(record, level, tuple(paths), len(leaves), min(shortest), whole=False)

    def _routed(self, paths: tuple[str, ...], back: np.ndarray) -> set[str]:
        """The stacks in which a layer got a gradient again after a pause."""
        return {_stack(path) for path, row in zip(paths, back, strict=True) if row}

    def _long(self, zero_for: np.ndarray, ever: np.ndarray) -> np.ndarray:
        limit = np.where(ever > 0, self.used_leaf, self.leaf)
        long: np.ndarray = zero_for >= limit
        return long

    def _alert(
        self, record: Record, level: Level, paths: tuple[str, ...], of: int, updates: int, *, whole: bool
    ) -> Alert:
        title = "Every gradient is exactly 0" if whole else f"{len(paths)} parameters get a gradient of exactly 0"
        if len(paths) == 1 and not whole:
            title = f"The gradient of {paths[0]} is exactly 0"
        which = f"all {of} trained leaves" if whole else f"{len(paths)} of {of} trained leaves"
        if any(path.endswith("]") for path in paths):
            which = f"{', '.join(paths[:4])}{' and more' * (len(paths) > 4)} ({of} trained leaves in all)"
        message = f"Over the last {updates} updates every element of the gradient was 0 for {which}."
        values = {"leaves": float(len(paths)), "updates": float(updates)}
        return Alert(record.step, self.slug, level, title, message, tuple(paths), values=values)


def _stack(path: str) -> str:
    """The stacked leaf of a layer's path; empty for a leaf of its own."""
    return path.rpartition("[")[0] if path.endswith("]") else ""


def _is_zero(largest: np.ndarray) -> np.ndarray:
    zero: np.ndarray = largest == 0
    return zero
