"""What is remembered of a run: a pure fold over its records, the same live and from a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nnx_probes.host.clock import Clock
from nnx_probes.host.motion import Motion
from nnx_probes.host.record import Record
from nnx_probes.host.trial import Trial

__all__ = ["Facts", "History"]

_KEPT = 1024
"""Values kept for each scalar name."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run before its first step; rules and causes may use it.

    Attributes:
      total_steps: planned number of steps, None if unknown.
      watched: whether the optimizer was wrapped by ``watch``.
      other_model: whether the optimizer is known to hold another model than the one observed.
      has_optimizer: whether an optimizer was given.
    """

    total_steps: int | None = None
    watched: bool = False
    other_model: bool = False
    has_optimizer: bool = False


@dataclass
class History:
    """The past of a run as rules see it. It includes the record under judgement.

    Attributes:
      facts: what was known at the start.
      clock: effective updates.
      params, optimizer: movement of the leaves.
      last: the newest record, None before the first.
      records: how many were seen.
      trial: the newest trial of the optimizer, None if there was none.
      raised: slugs of rules whose episode is going on.
      said: paths of all alerts so far.
      moving_without_optimizer: probes in a row in which parameters moved and nothing in the optimizer did.
    """

    facts: Facts = field(default_factory=Facts)
    clock: Clock = field(init=False)
    params: Motion = field(default_factory=Motion)
    optimizer: Motion = field(default_factory=Motion)
    last: Record | None = None
    records: int = 0
    trial: Trial | None = None
    raised: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    moving_without_optimizer: int = 0
    _series: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)
    _first: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock(total_steps=self.facts.total_steps)

    def observe(self, record: Record) -> None:
        """Folds in the next record."""
        if "params.fingerprint" in record:
            updates = self.clock.advance(record)
            _fold(self.params, record, "params", updates)
            self.params.replace(record.get("params.replaced", ()))
        if "optimizer.fingerprint" in record:
            _fold(self.optimizer, record, "optimizer", 0)
            self._compare_movement()
        for name, value in _scalars(record.values):
            self._series.setdefault(name, deque(maxlen=_KEPT)).append((record.step, value))
            if np.isfinite(value):
                self._first.setdefault(name, value)
        self.learn(record)
        self.records += 1

    def learn(self, record: Record) -> None:
        """Takes in what was added to the newest record after it was observed (the answer of a trial)."""
        self.last = record
        self.trial = Trial.read(record) or self.trial

    def forget(self) -> None:
        """Drops what an announced restore or switch explains: states seen before, the optimizer's last steps."""
        self.params.forget()
        self.clock.forget()
        self._series.pop("optimizer.step", None)
        self.moving_without_optimizer = 0

    def _compare_movement(self) -> None:
        if self.params.probes < 2 or self.optimizer.probes < 2:
            return
        alone = self.params.changed[self.params.trained].any() and not self.optimizer.changed.any()
        self.moving_without_optimizer = self.moving_without_optimizer + 1 if alone else 0

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (steps int64[k], values float64[k]) of a scalar, oldest first, at most the last 1024."""
        pairs = self._series.get(name, ())
        return np.array([s for s, _ in pairs], np.int64), np.array([v for _, v in pairs], np.float64)

    def first(self, name: str) -> float | None:
        """Returns the first finite value a scalar had, None if there was none."""
        return self._first.get(name)


def _fold(motion: Motion, record: Record, group: str, updates: int) -> None:
    motion.observe(record.step, record.leaves[group], record.values[f"{group}.fingerprint"], updates)


def _scalars(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(k, float(v)) for k, v in values.items() if isinstance(v, (int, float, np.number))]
