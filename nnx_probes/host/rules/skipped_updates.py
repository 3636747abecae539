"""Updates the optimizer refuses because they are not finite."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.clock import counters
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["SkippedUpdates"]


@dataclass(frozen=True)
class SkippedUpdates(Rule):
    """``optax.apply_if_finite`` skips too much: ERROR.

    More than `in_a_row` skipped in a row, or half of its own limit (past the limit it *applies* the NaN), or more than
    `share` of the last `window` updates. A few skips are what it is for.

    Delay: one probe.

    Args:
      in_a_row: skipped updates in a row.
      share: of the updates.
      window: number of updates.
    """

    in_a_row: int = 8
    share: float = 0.05
    window: int = 256

    slug = "skipped_updates"
    reads = ("optimizer.value",)

    def check(self, record: Record, history: History) -> Alert | None:
        found = counters(record.leaves["optimizer"], record.values["optimizer.value"])
        row, total = found.get("notfinite_count"), found.get("total_notfinite")
        if row is None or total is None:
            return None
        limit = record.get("optimizer.skip_limit")
        most = self.in_a_row if limit is None else min(self.in_a_row, max(float(limit) / 2, 1))
        recent, span = self._recent(record, history, total)
        if row <= most and recent <= self.share * max(span, self.window):
            return None
        message = f"apply_if_finite has skipped {int(row)} updates in a row and {int(total)} in all"
        message += f" ({int(recent)} within the last {span} steps)." if recent else "."
        if limit is not None:
            message += f" After {int(limit)} in a row it applies the next one, NaN or not."
        values = {"in_a_row": row, "total": total}
        return Alert(record.step, self.slug, Level.ERROR, "Updates are being skipped", message, values=values)

    def _recent(self, record: Record, history: History, total: float) -> tuple[float, int]:
        """How many were skipped since the newest probe that lies a window back, and how many steps ago that was."""
        steps, counts = history.since_mark("optimizer.total_notfinite")
        if not len(counts):
            return 0.0, self.window
        at = max(int(np.searchsorted(steps, record.step - self.window, side="right")) - 1, 0)
        return total - float(counts[at]), record.step - int(steps[at])
