"""An optimizer that starts over."""

from __future__ import annotations

from dataclasses import dataclass

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["OptimizerReset"]


@dataclass(frozen=True)
class OptimizerReset(Rule):
    """The optimizer's step goes backwards, or does not advance while the parameters move: ERROR.

    INFO where the step goes backwards at a probe that also finds other leaves of the optimizer or the model, or others that are
    trained: then another optimizer was handed over, as in staged freezing. ``monitor.mark`` announces that.

    Delay: `probes` probes for a step that does not advance, one for a step that goes back.

    Args:
      probes: probes in a row in which parameters moved and the optimizer did not.
    """

    probes: int = 2

    slug = "optimizer_reset"
    reads = ("params.fingerprint", "optimizer.step")

    def check(self, record: Record, history: History) -> Alert | None:
        _, steps = history.series("optimizer.step")
        if len(steps) < 2:
            return None
        now, before = int(steps[-1]), int(steps[-2])
        if now < before and (history.optimizer.renewed or history.params.renewed):
            return self._replaced(record, history, before, now)
        if now < before:
            message = f"optimizer.step went from {before} back to {now}: its moments and schedules start over."
            return Alert(record.step, self.slug, Level.ERROR, "The optimizer was reset", message, values={"step": now})
        if history.moving_without_optimizer < self.probes or now > 1:
            return None
        message = (
            f"Parameters moved at each of the last {history.moving_without_optimizer} probes, but optimizer.step is still "
            f"{now}: moments are thrown away and schedules stay at their start."
        )
        title = "The optimizer starts over at every step"
        return Alert(record.step, self.slug, Level.ERROR, title, message, values={"step": now})

    def _replaced(self, record: Record, history: History, before: int, now: int) -> Alert:
        of = "the optimizer" if history.optimizer.renewed else "the model, or those that are trained,"
        message = (
            f"optimizer.step went from {before} back to {now}, and the leaves of {of} are not those of the probe before: another "
            "optimizer has taken its place, whose moments and schedules begin anew. If that is meant, monitor.mark announces it."
        )
        title = "Another optimizer has taken over"
        return Alert(record.step, self.slug, Level.INFO, title, message, values={"other": 1.0})
