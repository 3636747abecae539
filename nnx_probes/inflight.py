"""Probes that were queued and not yet read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nnx_probes.callbacks.base import Context
from nnx_probes.host.record import Leaves, Record

__all__ = ["InFlight"]


@dataclass(slots=True)
class InFlight:
    """One probed step on its way from the device to the host.

    Attributes:
      ctx: what the callbacks put down; its references to the loop's objects are gone.
      time_s: wall time at which it was queued.
    """

    ctx: Context
    time_s: float

    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return all(later.ready() for later in self.ctx.later)

    def read(self, note: Callable[[str, Exception], None]) -> Record:
        """Returns the record; waits for the device where it has to. A measurement that fails is noted and left out."""
        values: dict[str, Any] = dict(self.ctx.values)
        leaves: dict[str, Leaves] = {}
        for later in self.ctx.later:
            try:
                more, tables = later.read()
            except Exception as error:
                note("a measurement", error)
                continue
            values.update(more)
            leaves.update(tables)
        return Record(self.ctx.step, self.time_s, values, leaves)
