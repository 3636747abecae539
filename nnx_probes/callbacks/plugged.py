"""The callbacks of one monitor: which are due, and that none of them can hurt the loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from nnx_probes.callbacks.base import Callback, Context
from nnx_probes.host.history import History
from nnx_probes.host.pace import Pace
from nnx_probes.host.record import Record

__all__ = ["Plugged"]

_log = logging.getLogger("nnx_probes")


class Plugged:
    """Calls callbacks when they are due; what they raise is caught, counted and said once.

    Args:
      callbacks: called in this order.
      pace: of those that have no interval of their own.

    Attributes:
      failures: what failed -> how often.
      next_due: the next step at which any callback is due.
    """

    def __init__(self, callbacks: Sequence[Callback], pace: Pace) -> None:
        self._slots = [(c, pace if c.every is None else Pace(c.every)) for c in callbacks]
        self._called_at = [0] * len(self._slots)
        self.failures: dict[str, int] = {}
        self.next_due = -(2**62) if self._slots else 2**62

    def due(self, step: int) -> list[int]:
        """Returns the positions of the callbacks that are due at `step`."""
        return [i for i, (callback, pace) in enumerate(self._slots) if step >= pace.due or callback.again]

    def hurries(self) -> bool:
        """Whether a callback asks for the next step."""
        return any(callback.again for callback, _ in self._slots)

    def restart(self) -> None:
        """Makes every callback due at the next step, whatever its number."""
        for _, pace in self._slots:
            pace.restart()

    def prepare(self, step: int, stride: int, model: Any, optimizer: Any) -> int:
        """Tells the callbacks that will be due soon after `step`, by default at the step after it.

        Args:
          step: the step just completed.
          stride: by how much the loop's steps grow.
          model: what the next step will be about.
          optimizer: likewise.

        Returns:
          The first step after `step` at which there is something to do.
        """
        for callback, pace in self._slots:
            if pace.due <= step + stride * callback.lead:
                until = max(1, -(-(pace.due - step) // stride))
                ctx = Context(step, model=model, optimizer=optimizer, every=pace.every, until=until, stride=stride)
                self._call(callback, "before_due", ctx)
        if self.hurries():
            return step + 1
        quiet = (pace.due - stride * callback.lead for callback, pace in self._slots)
        return min(self.next_due, max(step + stride, min(quiet, default=2**62)))

    def step_end(self, due: list[int], ctx: Context, calls: int) -> None:
        """Hands the step to the callbacks that are due; `calls` counts the monitor's calls so far."""
        for i in due:
            callback, pace = self._slots[i]
            ctx.steps, self._called_at[i] = calls - self._called_at[i], calls
            ctx.every = pace.every
            self._call(callback, "on_step_end", ctx)
            if pace.due <= ctx.step:  # a pace that callbacks share advances once
                pace.advance(ctx.step)
        self.next_due = min((pace.due for _, pace in self._slots), default=2**62)

    def each(self, method: str, argument: Any) -> None:
        """Calls one method of all callbacks."""
        for callback, _ in self._slots:
            self._call(callback, method, argument)

    def explain(self, record: Record, history: History) -> dict[str, Any]:
        """Returns what the callbacks add to a record in which parameters stand still."""
        more: dict[str, Any] = {}
        for callback, _ in self._slots:
            more.update(self._call(callback, "explain", record, history) or {})
        return more

    def note(self, what: str, error: Exception) -> None:
        """Counts a failure; the first of its kind is logged with its traceback."""
        self.failures[what] = self.failures.get(what, 0) + 1
        if self.failures[what] == 1:
            _log.warning("%s failed and was passed over: %s: %s", what, type(error).__name__, error, exc_info=error)

    def _call(self, callback: Callback, method: str, *arguments: Any) -> Any:
        try:
            return getattr(callback, method)(*arguments)
        except Exception as error:  # whatever it is, the user's training is worth more
            self.note(f"{type(callback).__name__}.{method}", error)
            return None
