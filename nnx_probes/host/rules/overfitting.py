"""Training that gets better while evaluation gets worse."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["Overfitting"]

_TAIL = 16


@dataclass(frozen=True)
class Overfitting(Rule):
    """The loss given to ``monitor.on_eval`` has risen `evaluations` times in a row while the training loss falls: WARN.

    It must then lie `over` above its best, and `gap` above the training loss (the median of the last 16 probes); the
    training loss must be lower than when the evaluation was at its best. Only positive losses are judged.

    Delay: `evaluations` evaluations after the best one.

    Args:
      evaluations: how many in a row.
      over: relative distance from the best evaluation.
      gap: relative distance between evaluation and training.
    """

    evaluations: int = 3
    over: float = 0.05
    gap: float = 0.1

    slug = "overfitting"
    reads = ("eval.loss",)
    descends = True

    def check(self, record: Record, history: History) -> Alert | None:
        at, scores = history.since_mark("eval.loss")
        steps, losses = history.since_mark("loss")
        known, good = np.isfinite(scores), np.isfinite(losses)
        at, scores, steps, losses = at[known], scores[known], steps[good], losses[good]
        recent = scores[-self.evaluations - 1 :]
        if not np.isfinite(record.values["eval.loss"]):
            return None
        if len(recent) <= self.evaluations or not np.all(np.diff(recent) > 0) or not len(losses):
            return None
        best = int(np.argmin(scores))
        then, now = losses[steps <= at[best]][-_TAIL:], losses[-_TAIL:]
        if not len(then) and history.dropped("loss"):  # so long ago that they are no longer kept: the oldest that are
            then = losses[:_TAIL]
        if scores.min() <= 0 or losses.min() <= 0 or not len(then):
            return None
        train, before, score = float(np.median(now)), float(np.median(then)), float(scores[-1])
        if score < (1 + self.over) * scores[best] or score < (1 + self.gap) * train or train >= before:
            return None
        message = (
            f"The evaluation's loss rises since step {int(at[best])} ({scores[best]:.4g} to {score:.4g}) while the training "
            f"loss falls ({before:.4g} to {train:.4g})."
        )
        values = {"best_step": float(at[best]), "gap": score / train}
        return Alert(record.step, self.slug, Level.WARN, "The model overfits", message, values=values)
