"""What the course of the loss, and the alerts before, say about a plateau."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnx_probes.host.alert import Alert
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rules.stalled_loss import jumped, tiny_updates

__all__ = ["course"]

_BIG = 0.05
_NEAR = 0.01
_CONSTANT = 1e-6
_FEW = 8
_JUMP = 10.0


def course(alert: Alert, record: Record, history: History) -> dict[str, Any]:
    """Returns name -> truth or words."""
    ratio, table = history.windows.last("updates.ratio"), history.windows.leaves.get("updates")
    typical = float("nan")
    if ratio is not None and table is not None and len(ratio) == len(table):
        matrix = np.array([len(shape) >= 2 for shape in table.shapes], bool)
        typical = float(np.median(ratio[matrix])) if matrix.any() else typical
    return {
        "tiny_updates": tiny_updates(history),
        "big_updates": typical > _BIG,
        "ratio_words": f"{typical:.2g}",
        "jumped": bool(jumped(history)),
        "jump_words": f"{jumped(history):.3g}",
        "zero_gradients_raised": "zero_gradients" in history.raised,
        "vanishing_raised": "vanishing_gradients" in history.raised,
        "dead_raised": "dead_units" in history.raised,
        "stale_raised": "stale_state" in history.raised,
        "integer_labels": "labels.classes" in record,
        "run": int(record.get("batch.run", 0)),
        "worse": bool(alert.values.get("worse")),
        "first_probe": history.records == 1,
        **_softmax_twice(record, history),
        **_constant(record),
        **_outlier(record, history),
    }


def _softmax_twice(record: Record, history: History) -> dict[str, Any]:
    """Logits between 0 and 1 give a loss that begins at ln C almost exactly and never falls below ln(1 + (C - 1) / e)."""
    first, classes, (_, losses) = history.first("loss"), record.get("labels.classes"), history.since_mark("loss")
    losses = losses[np.isfinite(losses)]
    if first is None or classes is None or len(classes) != 1 or classes[0] < 2 or not len(losses):
        return {"softmax_twice": False, "floor_words": "?"}
    guess, floor = float(np.log(classes[0])), float(np.log1p((classes[0] - 1) / np.e))
    return {
        "softmax_twice": abs(first / guess - 1) < _NEAR and float(losses.min()) > floor,
        "floor_words": f"{floor:.3g}",
    }


def _constant(record: Record) -> dict[str, Any]:
    spread = record.get("batch.spread")
    table = record.leaves.get("batch")
    if spread is None or table is None or not len(spread):
        return {"input_constant": False, "constant_words": ""}
    sizes = [int(np.prod(shape)) for shape in table.shapes]
    largest = [path for path, size in zip(table.paths, sizes, strict=True) if size == max(sizes)]
    rows = [  # a mask or weights that are all ones are no fault: only what is larger than all else is the input
        path for path, width in zip(table.paths, spread, strict=True) if width < _CONSTANT and largest == [path]
    ]
    words = f"The batch's {rows[0]} hardly differs from example to example." if rows else ""
    return {"input_constant": bool(rows), "constant_words": words}


def _outlier(record: Record, history: History) -> dict[str, Any]:
    """Whether the largest magnitude of one of the batch's arrays of floats has jumped, now or at one of the last 4 probes."""
    table, seen = history.windows.leaves.get("batch"), history.windows.values("batch.max_abs")
    if table is None or len(seen) < _FEW:
        return {"batch_outlier": False, "outlier_words": ""}
    usual, now = np.median(seen[:-4], axis=0), np.max(seen[-4:], axis=0)
    with np.errstate(all="ignore"):
        times = np.where(usual > 0, now / usual, 1.0)
    rows = [
        (path, float(ratio))
        for path, ratio, dtype in zip(table.paths, times, table.dtypes, strict=True)
        if ratio >= _JUMP and not dtype.startswith(("int", "uint", "bool"))
    ]
    words = f"The batch's {rows[0][0]} is {rows[0][1]:.3g} times as large as usual." if rows else ""
    return {"batch_outlier": bool(rows), "outlier_words": words}
