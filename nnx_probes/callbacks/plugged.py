"""The callbacks of one monitor: which are due, and that none of them can hurt the loop."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from nnx_probes.callbacks.base import Callback, Context
from nnx_probes.host.history import History
from nnx_probes.host.pace import Pace
from nnx_probes.host.record import Record

__all__ = ["Plugged"]

_BEFORE = -(2**62)
"""Before any step."""

_log = logging.getLogger("nnx_probes")


class Plugged:
    """Calls callbacks when they are due; what they raise is caught, counted and said once.

    Args:
      callbacks: called in this order.
      paces: when each is due; several may share one.

    Attributes:
      failures: what failed -> how often.
      next_due: the next step at which any callback is due.
      costs_s: what each callback that was due took at the last timed probe, by its position.
      rest_s: what rules and writers took then.
    """

    def __init__(self, callbacks: Sequence[Callback], paces: Sequence[Pace]) -> None:
        self._slots = list(zip(callbacks, paces, strict=True))
        self._called_at = [0] * len(self._slots)
        self.costs_s: dict[int, float] = {}
        self.rest_s = 0.0
        self.failures: dict[str, int] = {}
        self.next_due = _BEFORE if self._slots else 2**62
        self._stride_known = False

    def due(self, step: int) -> list[int]:
        """Returns the positions of the callbacks that are due at `step`."""
        return [i for i, (callback, pace) in enumerate(self._slots) if step >= pace.due or callback.again]

    def timed(self, step: int, stride: int) -> bool:
        """Whether a probe that is to be timed comes within two steps: the one before it is timed too."""
        return any(pace.timed and pace.due <= step + 2 * stride for _, pace in self._slots)

    def prepared(self, due: list[int]) -> bool:
        """Whether one of those at these positions prepares the step it is due at, so that the step measures itself."""
        return any(type(self._slots[i][0]).before_due is not Callback.before_due for i in due)

    def hurries(self) -> bool:
        """Whether a callback asks for the next step."""
        return any(callback.again for callback, _ in self._slots)

    def restart(self) -> None:
        """Makes every callback due at the next step, whatever its number; by how much steps grow is seen anew."""
        self._stride_known = False
        for _, pace in self._slots:
            pace.restart()

    def prepare(self, step: int, stride: int, model: Any, optimizer: Any) -> int:
        """Tells the callbacks that will be due soon after `step`, by default at the step after it.

        Args:
          step: the step just completed.
          stride: by how much the loop's steps grow, 1 where that is not known.
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
        known, self._stride_known = self._stride_known, step > _BEFORE
        if self.hurries() or not known:  # the next step shows by how much they grow
            return step + 1
        quiet = (pace.due - stride * max(callback.lead, 2 * pace.timed) for callback, pace in self._slots)
        return min(self.next_due, max(step + stride, min(quiet, default=2**62)))

    def step_end(self, due: list[int], ctx: Context, calls: int, *, timed: bool = False) -> None:
        """Hands the step to the callbacks that are due.

        Args:
          due: their positions.
          ctx: the step.
          calls: the monitor's calls so far.
          timed: read each measurement at once and note what it took in `costs_s`.
        """
        self.costs_s = {}
        for i in due:
            callback, pace = self._slots[i]
            ctx.steps, self._called_at[i] = calls - self._called_at[i], calls
            ctx.every = pace.every
            began, before = time.perf_counter(), len(ctx.later)
            self._call(callback, "on_step_end", ctx)
            if timed:
                with contextlib.suppress(Exception):  # what cannot be read is noted when it is its turn
                    ctx.later[before:] = [later.now() for later in ctx.later[before:]]
                waited_s = sum(later.waited_s for later in ctx.later[before:])
                self.costs_s[i] = time.perf_counter() - began - waited_s
            if pace.due <= ctx.step:  # a pace that callbacks share advances once
                pace.advance(ctx.step)
        self._plan()

    def charge(self, rest_s: float, extra_s: float, step_s: float) -> None:
        """Tells the paces what the timed probe cost.

        Args:
          rest_s: time of rules and writers, which all callbacks bear.
          extra_s: by how much the step was longer because it measured itself, which those bear that prepare for it.
          step_s: a step's time.
        """
        self.rest_s = rest_s
        ahead = [i for i in self.costs_s if type(self._slots[i][0]).before_due is not Callback.before_due]
        for i in ahead:
            self.costs_s[i] += extra_s / len(ahead)
        bills: dict[int, float] = defaultdict(float)
        for i, cost_s in self.costs_s.items():
            bills[id(self._slots[i][1])] += cost_s + rest_s / len(self.costs_s)
        for pace in {id(pace): pace for _, pace in self._slots}.values():
            if id(pace) in bills:
                pace.spent(bills[id(pace)], step_s)
        self._plan()

    def _plan(self) -> None:
        self.next_due = min((pace.due for _, pace in self._slots), default=2**62)

    def time_all(self, every: int) -> None:
        """Makes every callback due at multiples of `every`, and each probe a timed one."""
        pace = Pace(every, always=True)
        self._slots = [(callback, pace) for callback, _ in self._slots]

    def bill(self) -> dict[str, float]:
        """Returns `costs_s` by the callbacks' names; a second one of a class is numbered."""
        found: dict[str, float] = {}
        for i, cost_s in self.costs_s.items():
            name = type(self._slots[i][0]).__name__
            taken = sum(known.partition(" ")[0] == name for known in found)
            found[f"{name} {taken + 1}" if taken else name] = cost_s
        return found

    def each(self, method: str, argument: Any) -> None:
        """Calls one method of all callbacks."""
        for callback, _ in self._slots:
            self._call(callback, method, argument)

    def explain(self, record: Record, history: History) -> dict[str, Any]:
        """Returns what the callbacks add to a record in which parameters stand still."""
        more: dict[str, Any] = {}
        for callback, _ in self._slots:
            found = self._call(callback, "explain", record, history)
            if isinstance(found, Mapping):
                more.update(found)
            elif found is not None:
                error = TypeError(f"expected a mapping of names to values, got {type(found).__name__}")
                self.note(f"{type(callback).__name__}.explain", error)
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
