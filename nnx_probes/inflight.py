"""Probes that were queued and not yet read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nnx_probes.callbacks.base import Context, Later
from nnx_probes.host.record import Leaves, Record

__all__ = ["InFlight"]


@dataclass(slots=True)
class InFlight:
    """One probed step on its way from the device to the host.

    Attributes:
      ctx: what the callbacks put down; its references to the loop's objects are gone.
      time_s: wall time at which it was queued.
      waited_s: seconds that `read` waited for the first measurement, that is for the training step before it.
    """

    ctx: Context
    time_s: float
    waited_s: float = 0.0

    def ready(self) -> bool:
        """Whether `read` would not wait."""
        return all(_ready(later) for later in self.ctx.later)

    def read(self, note: Callable[[str, Exception], None]) -> Record:
        """Returns the record; waits for the device where it has to. A measurement that fails is noted and left out."""
        values: dict[str, Any] = dict(self.ctx.values)
        leaves: dict[str, Leaves] = {}
        for i, later in enumerate(self.ctx.later):
            began, waits = time.perf_counter(), i == 0 and not _ready(later)
            try:
                more, tables = later.read()
                values = {**values, **more}
                leaves = {**leaves, **tables}
            except Exception as error:
                note("a measurement", error)
            if waits:
                self.waited_s = time.perf_counter() - began
        return Record(self.ctx.step, self.time_s, values, leaves)


def _ready(later: Later) -> bool:
    """Whether it can be read without waiting; also where asking fails, since reading will say so."""
    try:
        return later.ready()
    except Exception:
        return True
