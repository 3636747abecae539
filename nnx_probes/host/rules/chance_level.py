"""A loss that is what guessing would score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.trend import plateau

__all__ = ["ChanceLevel"]

_FAIR = 1.5
_NEAR = 0.2
"""How far from the logarithm of the number of classes a cross-entropy begins at most, relatively, where it then only falls."""
_LEAST = 0.1
"""Nats: below that nearly all labels are of one class, and a loss near their entropy says little."""


@dataclass(frozen=True)
class ChanceLevel(Rule):
    """The loss stays at what a model scores that has learnt how often each class occurs, or only how many there are.

    WARN: the median of the last `steps` steps (16 probes at least) lies `within` of the entropy of one of the batch's integer
    arrays (masks apart), or of the logarithm of its number of classes, each quarter of them within twice that, and the loss
    does not fall (Mann-Kendall at 1 %); or it lies `worse` times above that entropy, where the batch has one integer array only
    and the run began below 1.5 times the logarithm of the number of classes: within 20 % of it, or below where it is now, since
    a squared error on counts or ratings falls from anywhere to anywhere. Not in the warm-up: 10 % of ``total_steps``, else
    256 steps. INFO: the first loss is above `first` times the logarithm of the number of classes, where the batch has one
    integer array only.

    Says nothing while all parameters stand still: `FrozenParams` has said it. Delay: the warm-up and `steps` steps. Needs a
    mean cross-entropy in nats; others never come near.

    Args:
      within: relative distance.
      worse: how far above guessing is worse than guessing.
      steps: length of the stretch.
      first: how high is too high at the start.
    """

    within: float = 0.02
    worse: float = 1.15
    steps: int = 256
    first: float = 3.0

    slug = "chance_level"
    reads = ("loss", "labels.entropy")
    descends = True

    def check(self, record: Record, history: History) -> Alert | None:
        paths, entropies, classes = _labels(record)
        if history.records == 1:
            return self._start(record, paths, classes)
        stretch = plateau(history, steps=self.steps, probes=16, warm_up=0.1)
        if stretch is None or history.params.stands():
            return None
        loss = float(np.median(stretch.losses))
        for path, entropy, count in zip(paths, entropies, classes, strict=True):
            for score, guess in ((entropy, "how often each class occurs"), (np.log(count), f"among {count} classes")):
                if score <= _LEAST or abs(loss / score - 1) > self.within:
                    continue
                if np.abs(stretch.quarters() / score - 1).max() > 2 * self.within:
                    continue
                verb = "knowing" if guess.startswith("how") else "guessing"
                message = (
                    f"Over steps {stretch.began} to {stretch.ended} the median loss is {loss:.4g} and does not fall; "
                    f"{verb} {guess} in the batch's {path} scores {score:.4g}."
                )
                values = {"loss": loss, "chance": float(score)}
                return Alert(record.step, self.slug, Level.WARN, "The loss is that of guessing", message, values=values)
        return self._worse(record, history, loss)

    def _worse(self, record: Record, history: History, loss: float) -> Alert | None:
        paths, entropies, classes = _labels(record)
        first = history.first("loss")
        if len(entropies) != 1 or entropies[0] <= _LEAST or first is None or loss < self.worse * entropies[0]:
            return None
        guess = float(np.log(classes[0]))
        if first > _FAIR * guess or (loss <= first and abs(first - guess) > _NEAR * guess):
            return None
        message = (
            f"The median loss of the last {self.steps} steps is {loss:.4g} and does not fall; knowing only how often each class "
            f"occurs in the batch's {paths[0]} scores {entropies[0]:.4g}. The first loss was {first:.4g}."
        )
        values = {"loss": loss, "chance": float(entropies[0]), "worse": 1.0}
        return Alert(record.step, self.slug, Level.WARN, "The loss is worse than guessing", message, values=values)

    def _start(self, record: Record, paths: tuple[str, ...], classes: np.ndarray) -> Alert | None:
        loss = float(record.values["loss"])
        if len(paths) != 1 or classes[0] < 2 or not loss > self.first * np.log(classes[0]):
            return None
        chance = float(np.log(classes[0]))
        message = (
            f"The first loss is {loss:.4g}; guessing among the {classes[0]} classes seen in the batch's {paths[0]} would "
            f"score {chance:.4g}."
        )
        values = {"loss": loss, "chance": chance}
        return Alert(record.step, self.slug, Level.INFO, "The first loss is far above guessing", message, values=values)


def _labels(record: Record) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """The batch's integer arrays but its masks, which say what counts: (paths, entropies, numbers of classes)."""
    paths = record.leaves["labels"].paths
    rows = [i for i, path in enumerate(paths) if "mask" not in path.lower()]
    return tuple(paths[i] for i in rows), record.values["labels.entropy"][rows], record.values["labels.classes"][rows]
