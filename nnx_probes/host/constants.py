"""Leaves that hold NaN or Inf by design: a mask of minus infinity, the best value so far of an optimizer that has none yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nnx_probes.host.record import Leaves, Record

__all__ = ["Constants"]

_STATISTICS = "BatchStat"


@dataclass
class Constants:
    """Which leaves were not finite at the first probe that saw them and have not changed since.

    Only what no step is meant to fill with bad numbers: of the model leaves that are not trained, running statistics apart;
    of the optimizer leaves of one element that are no moment of a parameter. While loss, gradients, updates or trained
    parameters are not finite nothing counts as a first probe: the bad numbers may be what broke them, or come of it.
    """

    _held: dict[str, dict[str, str]] = field(default_factory=dict)
    _known: dict[str, set[str]] = field(default_factory=dict)

    def observe(self, record: Record) -> None:
        """Folds in the next record."""
        healthy = _healthy(record)
        for group in ("params", "optimizer"):
            table, counts = record.leaves.get(group), record.get(f"{group}.nonfinite")
            if table is None or counts is None:
                continue
            held, known = self._held.get(group, {}), self._known.setdefault(group, set())
            bad = [(path, text) for path, text, row in _bad(record, group, counts) if _may_be_meant(record, table, row)]
            self._held[group] = {p: t for p, t in bad if (held.get(p) == t if p in known else healthy)}
            if healthy:
                known.update(table.paths)

    def forget(self) -> None:
        """Starts anew: the next record is a first one."""
        self._held.clear()
        self._known.clear()

    def paths(self, group: str) -> frozenset[str]:
        """Returns the paths of a group's constants as of the last record."""
        return frozenset(self._held.get(group, ()))


def _healthy(record: Record) -> bool:
    counts = record.get("params.nonfinite")
    if counts is not None and np.any(counts[np.array(record.leaves["params"].trained, bool)]):
        return False
    flow = any(np.any(record.get(f"{group}.nonfinite", 0)) for group in ("grads", "updates"))
    return bool(np.isfinite(record.get("loss", 0.0))) and not flow


def _bad(record: Record, group: str, counts: np.ndarray) -> Iterator[tuple[str, str, int]]:
    """(path, what tells its value from another, row) of each leaf that is not finite."""
    paths, texts = record.leaves[group].paths, record.get(f"{group}.fingerprint")
    for row in np.flatnonzero(counts).tolist():
        readable = texts is not None and ":" in texts[row]
        yield paths[row], texts[row] if readable else str(int(counts[row])), row


def _may_be_meant(record: Record, table: Leaves, row: int) -> bool:
    path = table.paths[row]
    if table.group == "params":
        return not table.trained[row] and table.kinds[row] != _STATISTICS
    values, own = record.get("optimizer.value"), record.leaves.get("params")
    single = values is not None and int(np.prod(table.shapes[row])) == 1 and not np.isfinite(values[row])
    return single and not path.endswith(tuple(f".{p}" for p in (own.paths if own is not None else ())))
