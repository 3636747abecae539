"""Which leaves move: a fold over fingerprints."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from nnx_probes.host.record import Leaves

__all__ = ["Motion"]

_REMEMBERED = 4096
"""States remembered for `returned`; 32 bytes each."""


@dataclass
class Motion:
    """What the fingerprints of one group say about movement, leaf by leaf.

    Attributes:
      leaves: the group's leaves as of the last record, None before the first.
      still: int64[n], effective updates since each leaf last changed.
      since: int64[n], step of the first record that showed the value each leaf has now.
      moved: bool[n], whether each leaf ever changed.
      changed: bool[n], whether each leaf changed between the last two records.
      probes: records seen.
      renewed: whether the last record has other leaves than the one before, or other ones of them are trained.
      returned_to: step at which the current state of the trained leaves was seen before, although it was
        another one in between; None if it is new.
      returns: how often that happened; not counted is a cycle of two states in which the optimizer went on, as a sign
        optimizer's near its optimum.
    """

    leaves: Leaves | None = None
    still: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    since: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    moved: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    changed: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    probes: int = 0
    renewed: bool = False
    returned_to: int | None = None
    returns: int = 0
    _last: dict[str, str] = field(default_factory=dict)
    _seen: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _digest: int | None = None
    _cycling: bool = False
    _replaced: set[str] = field(default_factory=set)
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=4))

    def observe(
        self, step: int, leaves: Leaves, fingerprints: tuple[str, ...], updates: int, *, counted: bool = False
    ) -> None:
        """Folds in one record.

        Args:
          step: of the record.
          leaves: the group's leaves.
          fingerprints: one text a leaf.
          updates: effective updates since the previous one.
          counted: whether the optimizer counted each step since the previous one.
        """
        self.renewed = self.leaves is not None and leaves is not self.leaves and leaves != self.leaves
        if leaves is not self.leaves:
            self._adopt(leaves, step)
        now = dict(zip(leaves.paths, fingerprints, strict=True))
        known = [p in self._last and _comparable(self._last[p], f) for p, f in now.items()]
        changed = [k and self._last[p] != f for k, (p, f) in zip(known, now.items(), strict=True)]
        self.changed = np.array(changed, bool)
        fresh = self.changed | ~np.array(known, bool)
        self.still = np.where(fresh, 0, self.still + updates)
        self.since = np.where(fresh, step, self.since)
        self.moved = self.moved | self.changed
        self._last = now
        self.probes += 1
        self._note_return(step, leaves, fingerprints, counted)

    def _adopt(self, leaves: Leaves, step: int) -> None:
        old = {p: i for i, p in enumerate(self.leaves.paths)} if self.leaves is not None else {}
        rows = [old.get(path, -1) for path in leaves.paths]

        def carry(values: np.ndarray, default: int) -> np.ndarray:
            return np.array([values[row] if row >= 0 else default for row in rows], values.dtype)

        self.still, self.since, self.moved = (
            carry(self.still, 0),
            carry(self.since, step),
            carry(self.moved, 0),
        )
        self.leaves = leaves

    def _note_return(self, step: int, leaves: Leaves, fingerprints: tuple[str, ...], counted: bool) -> None:
        digest = hash(tuple(f for f, t in zip(fingerprints, leaves.trained, strict=True) if t))
        self.returned_to = None
        self._recent.append(digest)
        if digest != self._digest and self._digest is not None and digest in self._seen:
            states = tuple(self._recent)
            cycling = counted and len(states) == 4 and states[:2] == states[2:]
            if not cycling:
                self.returned_to = self._seen[digest]
                self.returns += 1
            elif not self._cycling:
                self.returns -= 1  # the return before was the cycle's first
            self._cycling = cycling
        else:
            self._cycling = False
        self._digest = digest
        self._seen.setdefault(digest, step)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def replace(self, paths: tuple[str, ...]) -> None:
        """Treats these leaves as new: another object stands where the first one stood."""
        if self.leaves is not None:
            fresh = np.array([p in paths and p not in self._replaced for p in self.leaves.paths], bool)
            self.moved = self.moved & ~fresh
            self._replaced.update(paths)

    def forget(self) -> None:
        """Drops the states seen so far, so that coming back to one is no finding."""
        self._seen.clear()
        self._recent.clear()
        self._digest, self.returned_to, self.returns, self._cycling = None, None, 0, False

    def stands(self) -> bool:
        """Whether all trained leaves have stood still since the record before the last at least."""
        trained = self.trained
        return bool(trained.any()) and bool((self.still[trained] > 0).all())

    @property
    def trained(self) -> np.ndarray:
        """bool[n], leaves that have elements and that the optimizer is meant to move."""
        if self.leaves is None:
            return np.zeros(0, bool)
        return np.array([t and 0 not in s for t, s in zip(self.leaves.trained, self.leaves.shapes, strict=True)], bool)


def _comparable(a: str, b: str) -> bool:
    return a.split(":", 1)[0] == b.split(":", 1)[0] and ":" in a
