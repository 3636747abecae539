"""Training on the same batch again and again."""

from __future__ import annotations

from dataclasses import dataclass

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["RepeatedBatch"]


@dataclass(frozen=True)
class RepeatedBatch(Rule):
    """`steps` steps running were trained on the same batch, to the last bit: WARN.

    The loss falls then too; that is no excuse. Where it is meant, declare it with ``BatchProbe(full_batch=True)``.

    Delay: `steps` steps from a probe on; an interval above 1 adds one interval, after which the following steps are looked
    at one by one. A short cycle of batches is therefore not mistaken for one batch.

    Args:
      steps: how many.
    """

    steps: int = 3

    slug = "repeated_batch"
    reads = ("batch.run",)

    def check(self, record: Record, history: History) -> Alert | None:
        run = int(record.values["batch.run"])
        if run < self.steps:
            return None
        message = f"The batch of step {record.step} is bit-equal to those of the {run - 1} steps before it."
        title = "Every step sees the same batch"
        return Alert(record.step, self.slug, Level.WARN, title, message, values={"run": float(run)})
