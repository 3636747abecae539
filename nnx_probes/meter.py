"""What a monitor costs, and what a step takes without it."""

from __future__ import annotations

import math
import time
from typing import Any

import jax

from nnx_probes.device.leaves import Tree
from nnx_probes.device.ready import seconds_until_ready

__all__ = ["Meter"]


class Meter:
    """The time of one loop, told apart: the user's steps, and the library.

    A step is timed alone by a *lap*: the device is idle at its beginning (`rest`) and at its end (`lap`). A measured step
    and the plain one before it give what measuring inside the step costs the device.

    Attributes:
      calls: of the monitor.
      spent_s: seconds spent in the library by the calls that have ended; waiting for the user's own step is left out.
      waiting_s: such waiting in the call that is running.
      began_s: time of the first call, 0 before.
      plain_s: the last lap of a step without measuring, NaN before.
      extra_s: by how much the last measured step's lap was longer, at least 0.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.spent_s = self.waiting_s = self.began_s = 0.0
        self.plain_s, self.extra_s = math.nan, 0.0
        self._idle_at = math.nan
        self._window = (0.0, 0, 0.0)

    def begin(self, now: float) -> None:
        """Notes the first call."""
        self.began_s = now
        self._window = (now, self.calls, self.spent_s)

    @property
    def share(self) -> float:
        """Time spent in the library over the time since the first call, 0 before."""
        elapsed = time.perf_counter() - self.began_s if self.began_s else 0.0
        return self.spent_s / elapsed if elapsed > 0 else 0.0

    def rest(self) -> None:
        """Notes that the device is idle from now on, so that the next `lap` times one step."""
        self._idle_at = time.perf_counter()

    def lap(self, loss: Any, model: Any, *, measured: bool) -> None:
        """Waits for the step's results, and notes its time if the device was idle before it.

        Args:
          loss: what the step computed.
          model: likewise.
          measured: whether it also measured itself.
        """
        waited_s = seconds_until_ready(jax.tree.leaves(loss))
        lap_s, self._idle_at = time.perf_counter() - self._idle_at, math.nan
        if model is not None:  # naming a large model takes milliseconds, which are no part of the step
            rest_s = seconds_until_ready(Tree(model, may_be_empty=True).read())
            waited_s, lap_s = waited_s + rest_s, lap_s + rest_s
        self.waiting_s += waited_s
        if not measured:
            self.plain_s = lap_s
        else:
            self.extra_s = max(0.0, lap_s - self.plain_s) if lap_s == lap_s and self.plain_s == self.plain_s else 0.0

    def ended(self, began: float) -> None:
        """Notes the end of a call that began at `began`."""
        self.spent_s += time.perf_counter() - began - self.waiting_s

    def step_s(self, now: float) -> float:
        """Returns seconds a step since the last time this was asked, without the library's own; 0 where there was none."""
        (then, calls, spent), self._window = self._window, (now, self.calls, self.spent_s)
        steps = self.calls - calls
        return (now - then - (self.spent_s - spent)) / steps if steps else 0.0
