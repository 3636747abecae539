"""The last values of what is measured per leaf, and for how many updates something has been true of a leaf."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nnx_probes.host.record import Leaves, Record

__all__ = ["GROUPS", "Windows"]

GROUPS = ("grads", "updates", "slices", "activations", "batch")
"""Groups whose values are remembered."""
_KEPT = 128
"""Probes kept: for 600 leaves and 10 statistics 3 MB."""


@dataclass
class Windows:
    """The last 128 values of every statistic per leaf.

    Attributes:
      leaves: group -> its leaves as of the last record.
    """

    leaves: dict[str, Leaves] = field(default_factory=dict)
    _values: dict[str, deque[tuple[int, np.ndarray]]] = field(default_factory=dict)
    _ever: dict[str, np.ndarray] = field(default_factory=dict)
    _back: dict[str, np.ndarray] = field(default_factory=dict)

    def observe(self, record: Record, updates: int) -> None:
        """Folds in one record; `updates` is the number of effective updates since the previous one."""
        for group in GROUPS:
            table = record.leaves.get(group)
            if table is None:
                continue
            if group in self.leaves and table.paths != self.leaves[group].paths:
                self._drop(group)
            self.leaves[group] = table
        self.extend(record.values, updates)

    def extend(self, values: Mapping[str, Any], updates: int) -> None:
        """Appends values, one row a leaf of the tables taken last, that lie `updates` after those before."""
        for name, value in values.items():
            if self._has_a_row_for_each_leaf(name, value):
                kept = self._values.setdefault(name, deque(maxlen=_KEPT))
                back = (kept[-1][1] == 0) & (value != 0) if kept else np.zeros(len(value), bool)
                self._back[name] = self._back.get(name, back) | back
                kept.append((updates, value))
                with np.errstate(invalid="ignore"):
                    largest = np.abs(value.astype(np.float64))
                    self._ever[name] = np.fmax(self._ever[name], largest) if name in self._ever else largest

    def _has_a_row_for_each_leaf(self, name: str, value: Any) -> bool:
        """A callback of the user's may put an array of another length, or of texts, under a group's name."""
        table = self.leaves.get(name.partition(".")[0])
        rows = table is not None and isinstance(value, np.ndarray) and value.shape == (len(table),)
        return rows and value.dtype.kind not in "OSUMm"

    def forget(self) -> None:
        """Starts anew."""
        for group in list(self.leaves):
            self._drop(group)

    def _drop(self, group: str) -> None:
        for kept in (self._values, self._ever, self._back):
            for name in [n for n in kept if n.partition(".")[0] == group]:
                del kept[name]

    def values(self, name: str) -> np.ndarray:
        """Returns the kept values, shape (probes, leaves), oldest first; (0, 0) if there are none."""
        kept = self._values.get(name, ())
        return np.stack([value for _, value in kept]) if kept else np.zeros((0, 0))

    def last(self, name: str) -> np.ndarray | None:
        """Returns the newest value, one row a leaf; None if there is none."""
        kept = self._values.get(name)
        return kept[-1][1] if kept else None

    def last_finite(self, name: str) -> np.ndarray | None:
        """Returns the newest value that is finite for some leaf; None if there is none."""
        kept = self._values.get(name, ())
        return next((value for _, value in reversed(kept) if np.isfinite(value).any()), None)

    def ever(self, name: str) -> np.ndarray:
        """Returns float64[n_leaves], the largest magnitude each leaf ever had."""
        return self._ever.get(name, np.zeros(0))

    def came_back(self, name: str) -> np.ndarray:
        """Returns bool[n_leaves], whether each leaf was ever 0 at one probe and not at the next."""
        return self._back.get(name, np.zeros(0, bool))

    def updates(self, name: str) -> int:
        """Returns the effective updates that the kept values cover."""
        kept = self._values.get(name, ())
        return sum(n for n, _ in kept)

    def streak(self, name: str, holds: Callable[[np.ndarray], np.ndarray], *, effective: bool = False) -> np.ndarray:
        """Returns int64[n_leaves], effective updates for which `holds` has been true of each leaf without interruption.

        The first probe of a streak counts as one update, each further one as all updates since the one before.

        Args:
          name: of a statistic per leaf.
          holds: maps its value at one probe (one row a leaf) to bool[n_leaves].
          effective: leave out probes before which no effective update took place (micro-steps), instead of letting them
            count for nothing.
        """
        kept = self._values.get(name)
        if not kept:
            return np.zeros(0, np.int64)
        n = len(kept[-1][1])
        total, running = np.zeros(n, np.int64), np.ones(n, bool)
        weight = np.zeros(n, np.int64)
        for updates, value in reversed(kept):
            if effective and updates == 0:
                continue
            true = holds(value)
            # A probe's updates count only once an older probe shows that it held before them.
            total += np.where(running & true, weight + min(updates, 1), 0)
            weight = np.where(running & true, max(updates - 1, 0), 0)
            running &= true
            if not running.any():
                break
        return total
