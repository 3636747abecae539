"""What is known about layers' modes and about state beside the parameters."""

from __future__ import annotations

from typing import Any

from nnx_probes.host.alert import Alert
from nnx_probes.host.record import Record

__all__ = ["state"]


def state(alert: Alert, record: Record) -> dict[str, Any]:
    """Returns name -> truth or words."""
    evaluating = int(record.get("mode.dropout_eval", 0) + record.get("mode.norm_eval", 0))
    training = int(record.get("mode.dropout_train", 0) + record.get("mode.norm_train", 0))
    table, here = record.leaves.get("params"), set(alert.paths)
    kinds = set() if table is None else {k for p, k in zip(table.paths, table.kinds, strict=True) if p in here}
    return {
        "eval_layers": evaluating,
        "switch_layers": evaluating + training,
        "eval_first": record.get("mode.first", "?"),
        "statistics_here": "BatchStat" in kinds,
        "counters_here": "RngCount" in kinds,
        "after_eval": bool(record.get("eval.changed")),
        "eval_kinds": ", ".join(record.get("eval.kinds", ())),
    }
