"""What is remembered of a run: a pure fold over its records, the same live and from a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nnx_probes.host.alert import Level
from nnx_probes.host.clock import Clock
from nnx_probes.host.constants import Constants
from nnx_probes.host.motion import Motion
from nnx_probes.host.record import Record
from nnx_probes.host.trial import Trial
from nnx_probes.host.windows import Windows

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
      objective: ``"minimize"``, or ``"adversarial"`` where the loss is not meant to fall (GANs, reinforcement learning).
    """

    total_steps: int | None = None
    watched: bool = False
    other_model: bool = False
    has_optimizer: bool = False
    objective: str = "minimize"


@dataclass
class History:
    """The past of a run as rules see it. It includes the record under judgement.

    Attributes:
      facts: what was known at the start.
      clock: effective updates.
      params, optimizer: movement of the leaves.
      last: the newest record, None before the first.
      before: the newest record with parameters before it, None without one or since an announced event.
      records: how many were seen.
      began: step of the first one, None before.
      trial: the newest trial of the optimizer, None if there was none.
      left_out: paths of the leaves that got no update in the newest trial in which others did: left out by design.
      raised: slug of each rule whose episode is going on -> the highest level it has had.
      said: paths of all alerts so far.
      windows: the last values per leaf of gradients, updates and activations.
      constants: leaves that hold NaN or Inf by design.
      marked_at: step of the last announced event, None before the first.
      moving_without_optimizer: probes in a row in which parameters moved, and its step or all of the optimizer did not.
    """

    facts: Facts = field(default_factory=Facts)
    clock: Clock = field(init=False)
    params: Motion = field(default_factory=Motion)
    optimizer: Motion = field(default_factory=Motion)
    last: Record | None = None
    before: Record | None = None
    records: int = 0
    began: int | None = None
    trial: Trial | None = None
    left_out: frozenset[str] = frozenset()
    raised: dict[str, Level] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    moving_without_optimizer: int = 0
    windows: Windows = field(default_factory=Windows)
    constants: Constants = field(default_factory=Constants)
    marked_at: int | None = None
    _updates: int = 0
    _series: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)
    _since: dict[str, int] = field(default_factory=dict)
    _first: dict[str, float] = field(default_factory=dict)
    _first_ever: dict[str, float] = field(default_factory=dict)
    _newest: int | None = None
    _resumed_at: int | None = None
    _ahead: int | None = None

    def __post_init__(self) -> None:
        self.clock = Clock(total_steps=self.facts.total_steps)

    def observe(self, record: Record) -> None:
        """Folds in the next record."""
        self._arrive(record)
        updates = int(record.get("loop.steps", 1))
        if self.last is not None and "params.fingerprint" in self.last:
            self.before = self.last
        if "params.fingerprint" in record:
            updates = self.clock.advance(record)
            _fold(self.params, record, "params", updates, counted=self._counts_each_step(record))
            self.params.replace(record.get("params.replaced", ()))
        if "optimizer.fingerprint" in record:
            _fold(self.optimizer, record, "optimizer", 0)
            self._compare_movement(record)
        own = int(
            record.get("grads.steps", record.get("loop.steps", 1))
        )  # the gradients' probe may have its own interval
        same = "params.fingerprint" in record and int(record.get("loop.steps", 1)) == own
        self._updates = updates if same else own
        self.windows.observe(record, self._updates)
        self.constants.observe(record)
        self._remember(record, record.values)
        self.records += 1
        self.began = record.step if self.began is None else self.began

    def learn(self, record: Record) -> None:
        """Takes in what was added to the newest record after it was observed (the answer of a trial).

        The past is then the same as when the record had been observed with it, as a stored one is.
        """
        known = self.last.values if self.last is not None else {}
        added = {name: value for name, value in record.values.items() if name not in known}
        self.windows.extend(added, self._updates)
        self._remember(record, added)

    def _remember(self, record: Record, values: Mapping[str, Any]) -> None:
        for name, value in (*_scalars(values), *_totals(values)):
            self._series.setdefault(name, deque(maxlen=_KEPT)).append((record.step, value))
            self._since[name] = self._since.get(name, 0) + 1
            if np.isfinite(value):
                self._first.setdefault(name, value)
                self._first_ever.setdefault(name, value)
        self.last = record
        found = Trial.read(record)
        if found is not None:
            self.trial = found
            if not found.zero_now:
                paths = record.leaves["params"].paths
                self.left_out = frozenset(p for p, zero in zip(paths, found.zeros, strict=True) if zero)

    def forget(self, step: int) -> None:
        """Drops what an announced restore or switch explains: states seen before, the optimizer's last steps, baselines."""
        self.marked_at = step
        self.before = self.last = None
        self.windows.forget()
        self.constants.forget()
        self.params.forget()
        self.clock.forget()
        self._series.pop("optimizer.step", None)
        self._first.clear()
        self._since.clear()
        self._resumed_at = None
        self.moving_without_optimizer = 0
        self._ahead = step if self._newest is None or step > self._newest else None

    def _arrive(self, record: Record) -> None:
        """An event that was announced ahead begins at its own step, unless the run has started over before."""
        if any(name.startswith("eval.") for name in record.values):
            return  # evaluations may be counted otherwise, by epochs for example
        step, newest, ahead = record.step, self._newest, self._ahead
        self._newest = step
        if ahead is not None and step >= ahead:
            self.forget(ahead)
        elif newest is not None and step < newest:
            self._ahead = None
        if self._resumed_at is None:
            self._resumed_at = step

    def _counts_each_step(self, record: Record) -> bool:
        now, then = record.get("optimizer.step"), None if self.before is None else self.before.get("optimizer.step")
        return now is not None and then is not None and bool(now - then == record.get("loop.steps", 1))

    def _compare_movement(self, record: Record) -> None:
        if self.params.probes < 2 or self.optimizer.probes < 2:
            return
        count = record.get("optimizer.step")
        same = count is not None and self.before is not None and count == self.before.get("optimizer.step")
        alone = self.params.changed[self.params.trained].any() and (same or not self.optimizer.changed.any())
        self.moving_without_optimizer = self.moving_without_optimizer + 1 if alone else 0

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (steps int64[k], values float64[k]) of a scalar, oldest first, at most the last 1024.

        ``"grads.norm"`` and ``"updates.norm"`` are the norms over all leaves.
        """
        pairs = self._series.get(name, ())
        return np.array([s for s, _ in pairs], np.int64), np.array([v for _, v in pairs], np.float64)

    def dropped(self, name: str) -> bool:
        """Returns whether older values of a scalar are no longer kept."""
        return len(self._series.get(name, ())) == _KEPT

    def since_mark(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the part of `series` that lies after the last announced event."""
        steps, values = self.series(name)
        known = min(self._since.get(name, 0), len(steps))  # by position: after a restart steps are counted from before
        return steps[len(steps) - known :], values[len(values) - known :]

    def first(self, name: str) -> float | None:
        """Returns the first finite value a scalar had since the last announced event, None if there was none."""
        return self._first.get(name)

    def scale(self, name: str) -> float | None:
        """Returns the larger magnitude of the first finite value of all and the first since the last announced event.

        What is small beside it is small for this run, also where the event came when it was already: a change of the learning
        rate after the loss has converged.
        """
        firsts = [abs(values[name]) for values in (self._first, self._first_ever) if name in values]
        return max(firsts, default=None)

    @property
    def origin(self) -> int | None:
        """The step from which a warm-up counts: that of the first record, or the one after the last announced event."""
        if self.marked_at is None:
            return self.began
        return min(self.marked_at + 1, self.marked_at + 1 if self._resumed_at is None else self._resumed_at)


def _fold(motion: Motion, record: Record, group: str, updates: int, *, counted: bool = False) -> None:
    texts = record.values[f"{group}.fingerprint"]
    motion.observe(record.step, record.leaves[group], texts, updates, counted=counted)


def _totals(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The norm of all gradients and of all updates: ``"grads.norm"`` and ``"updates.norm"`` as series."""
    found = []
    for name in ("grads.norm", "updates.norm"):
        norms = values.get(name)
        if isinstance(norms, np.ndarray) and norms.ndim:
            with np.errstate(over="ignore"):
                found.append((name, float(np.sqrt(np.sum(norms.astype(np.float64) ** 2)))))
    return found


def _scalars(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, float(value)) for name, value in values.items() if _is_number(value)]


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):  # without a dimension; a file gives it back as a NumPy number
        return value.ndim == 0 and value.dtype.kind in "fiu"
    return isinstance(value, (int, float, np.integer, np.floating))
