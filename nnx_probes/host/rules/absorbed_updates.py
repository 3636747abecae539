"""Updates that rounding swallows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Leaves, Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.rules.nonfinite import poisoned
from nnx_probes.host.trend import converged

__all__ = ["AbsorbedUpdates"]

_NARROW = ("bfloat16", "float16", "float8")
_SHRUNK = 1e-2
_SPARSE = 0.5
_MOST = 0.5
"""Share of the leaves."""


@dataclass(frozen=True)
class AbsorbedUpdates(Rule):
    """The optimizer's update is not 0, and p + u == p all the same: it is too small for the parameter's dtype.

    bfloat16 never moves for |u| below |p|/512 and always above |p|/256; float32 is 2^16 times finer. Fires when at least
    `note` of a leaf's elements were absorbed at each of `updates` effective updates: INFO; `warn`: WARN; `error` in most
    leaves: ERROR. Always INFO in float32 (the end of a schedule, convergence or a vanished gradient: nothing that rounding
    is to blame for) and when the updates have shrunk a hundredfold since they were largest.

    Delay: `updates` effective updates, rounded up to the next probe. The limits: a bfloat16 perceptron under Adam for 400
    steps; at rate 3e-3 0.63 of a leaf was absorbed and it learnt as in float32, at 3e-4 0.9 and the loss fell to 1.18
    instead of 0.88, at 3e-5 0.99 and it did not move.

    Args:
      note: share of elements.
      warn: share of elements.
      error: share of elements.
      updates: how long.
    """

    note: float = 0.5
    warn: float = 0.8
    error: float = 0.95
    updates: int = 16

    slug = "absorbed_updates"
    reads = ("updates.absorbed",)

    def check(self, record: Record, history: History) -> Alert | None:
        leaves = record.leaves["updates"]
        some = self._long(history, self.note)
        if len(some) != len(leaves) or not some.any() or poisoned(record):
            return None
        much, most = self._long(history, self.warn), self._long(history, self.error)
        share = record.values["updates.absorbed"]
        level = self._level(history, leaves, much, most)
        some = much if level > Level.INFO else some
        paths = tuple(path for path, row in zip(leaves.paths, some, strict=True) if row)
        dtypes = sorted({d for d, row in zip(leaves.dtypes, some, strict=True) if row})
        message = (
            f"Over the last {self.updates} updates, {float(np.mean(share[some])):.0%} of the elements of {len(paths)} of "
            f"{len(leaves)} trained leaves ({', '.join(dtypes)}) kept their value although their update was not 0."
        )
        title = "Updates are rounded away"
        values = {"leaves": float(len(paths)), "share": float(np.mean(share[some]))}
        return Alert(record.step, self.slug, level, title, message, paths, values=values)

    def _long(self, history: History, least: float) -> np.ndarray:
        long: np.ndarray = history.windows.streak("updates.absorbed", _at_least(least), effective=True) >= self.updates
        return long

    def _level(self, history: History, leaves: Leaves, much: np.ndarray, most: np.ndarray) -> Level:
        narrow = np.array([d.startswith(_NARROW) for d in leaves.dtypes], bool)
        now, ever = history.windows.last("updates.max_abs"), history.windows.ever("updates.max_abs")
        zeros = history.windows.last("grads.zeros")
        if zeros is not None and len(zeros) == len(much):
            much &= ~(
                zeros > _SPARSE
            )  # rows of an embedding that were not in the batch: only momentum's rest moves them
        much &= narrow
        shrunk = now is not None and len(ever) == len(much) and bool((now[much] < _SHRUNK * ever[much]).all())
        if converged(history) or not much.any() or shrunk:
            return Level.INFO
        return Level.ERROR if (most & narrow).mean() >= _MOST else Level.WARN


def _at_least(least: float) -> Callable[[np.ndarray], np.ndarray]:
    def holds(share: np.ndarray) -> np.ndarray:
        enough: np.ndarray = share >= least
        return enough

    return holds
