"""How often each class occurs: what a model that has learnt nothing would score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nnx_probes.callbacks.base import Callback, Context, Every, Later, check_every
from nnx_probes.callbacks.sampled import Rows, queue_rows
from nnx_probes.device.leaves import dotted, key_name
from nnx_probes.host.record import Leaves

__all__ = ["LabelProbe"]

_CLASSES = 1 << 18
"""Integers beyond this are no classes."""


class LabelProbe(Callback):
    """Counts the integers in the batch, all probed batches together.

    Puts ``labels.entropy`` (float64[n_leaves], in nats, of the frequencies so far, with Miller and Madow's correction for
    a small sample) and ``labels.classes`` (int64[n_leaves], largest integer plus 1) into the record, one row for each
    integer array of the batch with values from 0 on.

    Args:
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget.

    Cost: a copy of at most 256 kB an integer array on due steps, and counting it on the host.
    """

    provides = ("labels.*",)

    def __init__(self, *, every: Every = None) -> None:
        check_every(every, "LabelProbe")
        self.every = every
        self._counts: dict[str, np.ndarray] = {}
        self._table: Leaves | None = None

    def on_step_end(self, ctx: Context) -> None:
        """Queues the copy of the batch's integers."""
        if ctx.batch is None:
            return
        queued: list[tuple[str, Rows]] = []
        for keys, x in jax.tree_util.tree_flatten_with_path(ctx.batch)[0]:
            rows = queue_rows(x) if str(getattr(x, "dtype", "")).startswith(("int", "uint")) else None
            if rows is not None:
                queued.append((dotted([key_name(key) for key in keys]) or "value", rows))
        if queued:
            ctx.later.append(Later(lambda: all(rows.ready() for _, rows in queued), lambda: self._read(queued)))

    def _read(self, queued: list[tuple[str, Rows]]) -> tuple[Mapping[str, Any], Mapping[str, Leaves]]:
        found: list[tuple[str, np.ndarray]] = []
        for path, rows in queued:
            counts = _count(rows.read())
            if counts is not None:
                self._counts[path] = counts = _sum(self._counts.get(path), counts)
                found.append((path, counts))
        if not found:
            return {}, {}
        paths = tuple(path for path, _ in found)
        if self._table is None or self._table.paths != paths:
            n = len(paths)
            self._table = Leaves("labels", paths, ("array",) * n, ((),) * n, ("int64",) * n, (False,) * n)
        values = {
            "labels.entropy": np.array([_entropy(counts) for _, counts in found]),
            "labels.classes": np.array([len(counts) for _, counts in found], np.int64),
        }
        return values, {"labels": self._table}


def _count(rows: np.ndarray) -> np.ndarray | None:
    """How often each integer occurs; None for what holds no classes."""
    if rows.min() < 0 or rows.max() >= _CLASSES:
        return None
    return np.bincount(rows.reshape(-1).astype(np.int64))


def _sum(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    if a is None:
        return b
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    longer = longer.copy()
    longer[: len(shorter)] += shorter
    return longer


def _entropy(counts: np.ndarray) -> float:
    n = int(counts.sum())
    shares = counts[counts > 0] / n
    # G. A. Miller, 1955: the entropy of observed frequencies is too small by (classes - 1) / 2n.
    return float(-(shares * np.log(shares)).sum() + (len(shares) - 1) / (2 * n))
