"""What plugs into a monitor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nnx_probes.errors import ArgumentError, ArgumentTypeError
from nnx_probes.host.alert import Alert
from nnx_probes.host.history import History
from nnx_probes.host.record import Leaves, Record

__all__ = ["Callback", "Context", "Every", "Later", "check_every"]

Every = int | Literal["auto"] | None
"""An interval in steps; ``"auto"`` for one that keeps to the monitor's budget; None for the monitor's own."""


@dataclass(frozen=True, slots=True)
class Later:
    """A measurement that was queued and is read on a later call.

    Attributes:
      ready: whether `read` would return without waiting.
      read: returns named values and the leaves tables they refer to.
      waited_s: seconds that queueing it waited for the training step: no cost of the measurement.
    """

    ready: Callable[[], bool]
    read: Callable[[], tuple[Mapping[str, Any], Mapping[str, Leaves]]]
    waited_s: float = 0.0

    def now(self) -> Later:
        """Reads at once; waits for the device."""
        found = self.read()
        return Later(lambda: True, lambda: found, self.waited_s)


@dataclass(slots=True)
class Context:
    """What a callback sees of one step.

    Attributes:
      step: index of the step just completed.
      loss, batch, metrics, grads, updates: what the loop handed over, None otherwise. Device arrays: do not keep
        them, the next step may have them donated.
      model, optimizer: the live objects.
      steps: calls of the monitor since this callback was last due.
      every: this callback's interval in steps, None where it is not known.
      until, stride: in `before_due`, how many steps there are to the due one (1: it is the next), and by how much the
        loop's steps grow.
      history: the run so far.
      values: put measurements here, under dotted names.
      later: queued measurements.
    """

    step: int
    loss: Any = None
    batch: Any = None
    metrics: Any = None
    grads: Any = None
    updates: Any = None
    model: Any = None
    optimizer: Any = None
    steps: int = 1
    every: int | None = None
    until: int = 1
    stride: int = 1
    history: History | None = None
    values: dict[str, Any] = field(default_factory=dict)
    later: list[Later] = field(default_factory=list)


class Callback:
    """Base of everything that plugs into a `Monitor`; every method is optional.

    Example: log the share of padding in the batch every 50 steps::

        class PaddingShare(probes.Callback):
            every = 50

            def on_step_end(self, ctx):
                ctx.values["batch.padding"] = float((ctx.batch["tokens"] == 0).mean())

    Attributes:
      every: interval in steps of `on_step_end`; None takes the monitor's, ``"auto"`` one of its own under the monitor's
        budget.
      lead: at how many steps before a due one `before_due` is called (1: at the last one only).
      again: set by a callback that wants to look at the next step too, whatever its interval.
      provides: names (or ``group.*``) of the values it puts into the context, for the check that every rule can be
        served.
    """

    every: Every = None
    lead: int = 1
    again: bool = False
    provides: tuple[str, ...] = ()

    def on_train_begin(self, ctx: Context) -> None:
        """Called once, at the first step the monitor sees."""

    def before_due(self, ctx: Context) -> None:
        """Called after the `lead` steps before the one that will be due (as far as the loop's stride tells).

        Only the step and the objects are known.
        """

    def on_step_end(self, ctx: Context) -> None:
        """Called on due steps."""

    def on_eval_end(self, ctx: Context) -> None:
        """Called by ``monitor.on_eval``; ``ctx.loss`` and ``ctx.metrics`` are those of the evaluation."""

    def explain(self, record: Record, history: History) -> Mapping[str, Any]:
        """Called before the rules when parameters stand still: may do costly work; returns values to add (not to replace)."""
        return {}

    def on_alert(self, alert: Alert) -> None:
        """Called for every alert, after it has been written."""

    def on_train_end(self, ctx: Context) -> None:
        """Called once, by ``close()``."""


def check_every(every: Any, owner: str) -> None:
    """Raises unless `every` is None, ``"auto"`` or a whole number of at least 1."""
    if every is None or (isinstance(every, str) and every == "auto"):
        return
    if isinstance(every, bool) or not isinstance(every, int):
        raise ArgumentTypeError(
            f"{owner}(every={every!r}): expected a whole number of steps or 'auto', got {type(every).__name__}."
        )
    if every < 1:
        raise ArgumentError(f"{owner}(every={every}): expected at least 1, the number of steps from probe to probe.")
