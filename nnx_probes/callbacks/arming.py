"""At which step a watched optimizer is asked to measure: the due one, or one before it where not every step updates."""

from __future__ import annotations

from nnx_probes.callbacks.base import Context
from nnx_probes.device.chain import accumulation
from nnx_probes.device.same import Same
from nnx_probes.device.tap import Tap

__all__ = ["Arming"]

_PATIENCE = 2
"""For so many due steps a measurement may hang unwritten; then this is a loop in which it cannot be written."""
_UNTIL_WRITTEN = 2**40


class Arming:
    """Hangs the measurement on a watched optimizer and takes it off.

    Under ``optax.MultiSteps`` one update in k moves the parameters: the last such one up to the due step is measured. A
    loop that accumulates by itself calls ``update`` at some steps only: there the measurement hangs until one comes, and
    is read at the due step after it.

    Attributes:
      lead: from how many steps before the due one `before` has to be called.
    """

    def __init__(self) -> None:
        self.lead = 1
        self._tx = Same()
        self._k = 1  # one update in so many moves the parameters,
        self._phase = 0  # namely that whose number leaves this remainder
        self._known: tuple[int, int] | None = None  # a loop step and the number of its update
        self._armed = False
        self._waited = 0
        self._taken = 0

    def before(self, ctx: Context, tap: Tap) -> None:
        """Called before each of the last `lead` steps up to a due one."""
        self._learn_chain(tap)
        if tap.evidence.inside:
            if ctx.every is not None and ctx.until == 1:
                interval = max(1, ctx.every // ctx.stride)
                tap.set_interval(interval, self._remainder(ctx, interval))
            return
        if self._armed and self._done(tap):
            tap.disarm(id(self))  # it is done; the steps up to the due one run as without us
            self.lead = self._k
        elif not self._armed and self._now(ctx):
            self._taken = tap.evidence.taken
            self._armed = tap.arm(id(self))

    def at_due(self, tap: Tap) -> bool | None:
        """Returns whether a new measurement is there, None if none was asked for."""
        armed, self._waited = self._armed, self._waited + 1 if self._armed and not self._done(tap) else 0
        if 0 < self._waited < _PATIENCE:
            self.lead = _UNTIL_WRITTEN
            return False
        self.lead = self._k
        self._armed = False
        tap.disarm(id(self))
        return tap.evidence.taken != self._taken if armed else None

    def leave(self, tap: Tap) -> None:
        """Takes off what hangs on an optimizer that the loop has turned away from."""
        tap.disarm(id(self))
        self.__init__()  # type: ignore[misc]

    @property
    def counts(self) -> bool:
        """Whether the updates' numbers are needed."""
        return self._k > 1

    def count(self, step: int, number: int) -> None:
        """Takes in the number of the update at `step`."""
        self._known = step, number

    def learn(self, measured: int, moved: bool) -> None:
        """Takes in whether the update of number `measured` moved any parameter."""
        if moved:
            self._phase = measured % self._k
        elif measured % self._k == self._phase:
            self._phase = (self._phase + 1) % self._k

    def _learn_chain(self, tap: Tap) -> None:
        if self._tx.turn_to(tap.tx):
            self.lead = self._k = accumulation(tap.tx) or 1
            self._phase = self._k - 1

    def _done(self, tap: Tap) -> bool:
        """Whether the measurement that was asked for is there: in what hangs on the optimizer, or taken already.

        On an eager optimizer nothing hangs, and nothing is taken before it is updated.
        """
        written = "probe_state" in vars(tap) and not tap.hangs()
        return written or tap.evidence.taken != self._taken

    def _now(self, ctx: Context) -> bool:
        """Whether the next update is the one to measure."""
        if self._k == 1 or self._known is None or ctx.until == 1:
            return ctx.until == 1
        return self._next(ctx) % self._k == self._phase

    def _remainder(self, ctx: Context, interval: int) -> int:
        """Which of the updates a branch in the step has to measure so that the last one up to the due step is among them."""
        if self._known is None:
            return 0
        due = self._next(ctx)
        back = (due - self._phase) % self._k if interval % self._k == 0 else 0
        return (due - back) % interval

    def _next(self, ctx: Context) -> int:
        """The number of the next update, if there was one a step."""
        step, number = self._known or (ctx.step, 0)
        return number + (ctx.step - step) // ctx.stride + 1
