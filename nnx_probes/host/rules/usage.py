"""The monitor itself is called in a way that cannot work."""

from __future__ import annotations

from dataclasses import dataclass

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["Usage"]


@dataclass(frozen=True)
class Usage(Rule):
    """A call of the monitor that cannot mean what it says: WARN, once for each kind, and the run goes on.

    Kinds: a step that is no number, steps that go backwards, a loss of more than one element, a call from inside a
    compiled function. INFO: a watched optimizer that cannot be measured in this loop. Delay: none.
    """

    slug = "usage"
    reads = ()
    by_leaf = True

    def check(self, record: Record, history: History) -> Alert | None:
        for kind, say in _KINDS.items():
            if kind in record and f"usage.{kind}" not in history.said:
                title, message = say(record, record.get(kind))
                return Alert(record.step, self.slug, Level.WARN, title, message, (f"usage.{kind}",))
        why = record.get("watch.unmeasured", _missed(record, history))
        if why is not None and history.clock.ever_stepped and "usage.watch.unmeasured" not in history.said:
            title, message = _unmeasured(why, str(record.get("watch.remedy", "inside")))
            return Alert(record.step, self.slug, Level.INFO, title, message, ("usage.watch.unmeasured",))
        return None


def _bad_step(record: Record, seen: object) -> tuple[str, str]:
    return "The step is not a number", (
        f"monitor(step) got {seen}: expected a whole number, the index of the step just completed. This call was passed "
        "over; pass for example the counter of enumerate()."
    )


def _backwards(record: Record, before: object) -> tuple[str, str]:
    return "Steps go backwards", (
        f"monitor(step) got step {record.step} after step {before}: expected steps that grow. Curves will fold back on "
        "themselves; count on across epochs, or call monitor.mark(step, 'restart') where a restart is meant."
    )


def _loss_size(record: Record, size: object) -> tuple[str, str]:
    return "The loss has more than one element", (
        f"monitor(loss=...) got {size} elements: expected one number. The loss was not recorded; reduce it first, for "
        "example loss.mean()."
    )


def _traced(record: Record, group: object) -> tuple[str, str]:
    return "The monitor is called inside a compiled function", (
        f"{group} held tracers at step {record.step}: expected concrete arrays. Call the monitor in the Python loop, after "
        "the compiled step has returned; nothing can be measured from inside."
    )


def _missed(record: Record, history: History) -> str | None:
    """Why armed steps leave no measurement, once two in a row did not although the optimizer stepped at every call."""
    _, missed = history.series("watch.missed")
    _, counts = history.series("optimizer.step")
    if len(missed) < 2 or not missed[-2:].all() or len(counts) < 2:
        return None
    if counts[-1] - counts[-2] < int(record.get("loop.steps", 1)):
        return None
    return "the step was compiled, or its objects were split, before watch() was called"


_REMEDIES = {
    "inside": 'Call optimizer = probes.watch(optimizer, model, when="inside") before the state is split or cached, or give',
    "earlier": "Call watch() before that, or give",
    "none": "Give",
}


def _unmeasured(why: object, remedy: str) -> tuple[str, str]:
    return "Gradients and updates cannot be measured in this loop", (
        f"The optimizer is watched and it steps, but no measurement can reach the monitor: {why}. {_REMEDIES[remedy]} "
        "the monitor GradientProbe(loss_fn=...)."
    )


_KINDS = {
    "loop.bad_step": _bad_step,
    "loop.backwards": _backwards,
    "loss.size": _loss_size,
    "loop.traced": _traced,
}
