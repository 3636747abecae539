"""The batch: finite or not, and how large its integers are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from nnx_probes.callbacks.base import Callback, Context, check_every
from nnx_probes.callbacks.group import Group
from nnx_probes.device.leaves import is_array
from nnx_probes.device.probe import Sample
from nnx_probes.host.record import Leaves

__all__ = ["BatchProbe"]


class BatchProbe(Callback):
    """Measures every array of the batch.

    Puts ``batch.norm``, ``batch.max_abs`` (float32[n_leaves]), ``batch.nonfinite`` (int32[n_leaves]) and, if the batch
    holds integers, ``batch.max_int`` (largest magnitude) into the record.

    Args:
      every: interval in steps, None for the monitor's.

    Cost: two passes over the batch on due steps, on the device where it lies there, else on the host.
    """

    provides = ("batch.*",)

    def __init__(self, *, every: int | None = None) -> None:
        check_every(every, "BatchProbe")
        self.every = every
        self._group = Group("batch")

    def on_step_end(self, ctx: Context) -> None:
        """Queues the measurement of the batch."""
        if ctx.batch is not None and any(is_array(leaf) for leaf in jax.tree.leaves(ctx.batch)):
            ctx.later.append(self._group.enqueue(ctx.batch, _largest_integer))


def _largest_integer(sample: Sample, table: Leaves) -> Mapping[str, Any]:
    tops = [
        top for leaf, top in zip(sample.leaves, sample.max_abs, strict=True) if leaf.dtype.startswith(("int", "uint"))
    ]
    return {"batch.max_int": float(max(tops))} if tops else {}
