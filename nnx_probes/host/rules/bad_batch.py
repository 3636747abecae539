"""A batch far from all that were seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["BadBatch"]


@dataclass(frozen=True)
class BadBatch(Rule):
    """The largest magnitude of an array of floats is `times` the largest that was seen before: WARN.

    Judged from the probe after `least` on; integers are not, and NaN is `Nonfinite`'s matter. Delay: none, but a batch
    between two probes is not seen.

    Args:
      times: how far out of range.
      least: batches that have to be known.
    """

    times: float = 100.0
    least: int = 16

    slug = "bad_batch"
    reads = ("batch.max_abs",)
    by_leaf = True

    def check(self, record: Record, history: History) -> Alert | None:
        table, seen = record.leaves["batch"], history.windows.values("batch.max_abs")
        if len(seen) <= self.least or np.any(record.get("batch.nonfinite", np.zeros(0))):
            return None
        usual, now = np.fmax.reduce(seen[:-1], axis=0), seen[-1]  # without a word where an array was never readable
        rows = [
            (path, float(top), float(before))
            for path, top, before, dtype in zip(table.paths, now, usual, table.dtypes, strict=True)
            if not dtype.startswith(("int", "uint", "bool")) and before > 0 and top >= self.times * before
        ]
        if not rows:
            return None
        path, top, before = rows[0]
        message = (
            f"The batch of step {record.step} holds values up to {top:.3g} in {path}; in the {len(seen) - 1} batches looked at "
            f"before, the largest was {before:.3g}."
        )
        paths = tuple(f"batch.{path}" for path, _, _ in rows)
        values = {"times": top / before}
        return Alert(record.step, self.slug, Level.WARN, "The batch is out of range", message, paths, values=values)
