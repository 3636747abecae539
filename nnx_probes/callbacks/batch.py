"""The batch: finite or not, how large its integers are, whether its rows differ, whether it is the one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nnx_probes.callbacks.base import Callback, Context, Every, check_every
from nnx_probes.callbacks.group import Group
from nnx_probes.callbacks.sampled import Rows, queue_rows
from nnx_probes.device.leaves import is_array
from nnx_probes.device.probe import Sample
from nnx_probes.host.record import Leaves

__all__ = ["BatchProbe"]

_ENOUGH = 3
_PATIENCE = 3
"""How often a suspicion may turn out wrong: a short cycle of batches and an interval that is a multiple of it."""


class BatchProbe(Callback):
    """Measures every array of the batch.

    Puts ``batch.norm``, ``batch.max_abs`` (float32[n_leaves]), ``batch.nonfinite`` (int32[n_leaves]),
    ``batch.fingerprint``, ``batch.spread`` (float64[n_leaves]: largest difference between rows over the largest
    magnitude, NaN for integers) and, if the batch holds integers, ``batch.max_int`` (largest magnitude) into the record;
    and ``batch.run``, for how many steps running the batch has been the same. Where two probes that are not neighbours saw
    the same batch, the steps that follow are looked at too.

    Args:
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget.
      full_batch: whether every step is meant to be trained on the same batch; ``batch.run`` is then left out.

    Cost: three passes over the batch on due steps, on the device where it lies there, else on the host, and a copy of at
    most 65,536 elements an array.
    """

    provides = ("batch.*",)

    def __init__(self, *, every: Every = None, full_batch: bool = False) -> None:
        check_every(every, "BatchProbe")
        self.every = every
        self.full_batch = bool(full_batch)
        self._group = Group("batch", fingerprints=None if self.full_batch else "auto")
        self._seen: tuple[str, ...] = ()
        self._run = 0
        self._wrong = 0

    def on_step_end(self, ctx: Context) -> None:
        """Queues the measurement of the batch."""
        if ctx.batch is None or not any(is_array(leaf) for leaf in jax.tree.leaves(ctx.batch)):
            self.again = False
            return
        queued = [_queue(leaf) for leaf in jax.tree.leaves(ctx.batch) if is_array(leaf)]
        steps = ctx.steps

        def more(sample: Sample, table: Leaves) -> Mapping[str, Any]:
            found = _largest_integer(sample)
            if len(queued) == len(table):
                found["batch.spread"] = np.array([_spread(rows) for rows in queued])
            if not self.full_batch:
                found["batch.run"] = self._compare(sample.fingerprints, steps)
            return found

        ctx.later.append(self._group.enqueue(ctx.batch, more))

    def _compare(self, now: tuple[str, ...], steps: int) -> int:
        same = now == self._seen and not set(now) & {"", "deleted", "traced"}
        self._wrong += self.again and not same
        self._run = self._run + 1 if same and steps == 1 else 1
        self.again = same and self._run < _ENOUGH and self._wrong < _PATIENCE
        self._seen = now
        return self._run


def _largest_integer(sample: Sample) -> dict[str, Any]:
    tops = [
        float(top)
        for leaf, top in zip(sample.leaves, sample.max_abs, strict=True)
        if leaf.dtype.startswith(("int", "uint")) and np.isfinite(top)  # NaN: it was donated or deleted
    ]
    return {"batch.max_int": max(tops)} if tops else {}


def _queue(x: Any) -> Rows | None:
    return queue_rows(x) if str(getattr(x, "dtype", "")).startswith(("float", "bfloat")) else None


def _spread(queued: Rows | None) -> float:
    """How much the rows of an array of floats differ, relative to its largest magnitude; NaN where that says nothing."""
    rows = None if queued is None else queued.read()
    if rows is None or len(rows) < 2:
        return float("nan")
    rows = rows.astype(np.float64)
    with np.errstate(all="ignore"):
        largest = float(np.max(np.abs(rows)))
        return float(np.max(np.ptp(rows, axis=0))) / largest if largest != 0 else 0.0
