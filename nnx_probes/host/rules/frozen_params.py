"""Parameters that do not move."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.trend import converged, falls, undecided

__all__ = ["FrozenParams"]


@dataclass(frozen=True)
class FrozenParams(Rule):
    """Trained parameters bit-equal over several effective updates (fingerprints, never ``allclose``).

    The whole group: ERROR after `whole` updates (WARN where the loss falls, or may fall, all the same: then the object
    looked at is not the one that trains). A single leaf: WARN after `leaf` updates, `moved_leaf` if it ever moved. INFO
    when the loss has converged or the transformation leaves the leaf out by design. Quiet while a schedule rests at 0
    and will move again, and once a trained leaf holds NaN: bytes that stop changing are then a consequence.

    Delay: `whole` updates after the fault, rounded up to the next probe. An optimizer that has not stepped at all is
    judged by the steps of the loop; a loop that accumulates gradients by hand over more than `whole` steps before its
    first update should raise `whole` (``optax.MultiSteps`` is recognised).

    Args:
      whole: updates for the whole group.
      leaf: updates for one leaf that has never moved.
      moved_leaf: updates for one leaf that moved before.
      tail: updates for the whole group when it moved before and the updates have only become too small.
    """

    whole: int = 2
    leaf: int = 8
    moved_leaf: int = 64
    tail: int = 16

    slug = "frozen_params"
    reads = ("params.fingerprint",)
    by_leaf = True

    def suspects(self, history: History) -> np.ndarray:
        """bool[n_leaves], leaves that stood still long enough to ask why."""
        motion = history.params
        rows = motion.trained
        if not rows.any():
            return rows
        if (motion.still[rows] >= self.whole).all():
            return rows
        found: np.ndarray = rows & (motion.still >= np.where(motion.moved, self.moved_leaf, self.leaf))
        return found

    def check(self, record: Record, history: History) -> Alert | None:
        motion, leaves = history.params, record.leaves["params"]
        if record.get("optimizer.selects_nothing"):
            return self._nothing_selected(record)
        if "lost_update" in history.raised:
            return None  # the same fault, already said with better evidence
        counts = record.get("params.nonfinite")
        if counts is not None and np.any(counts[motion.trained]):
            return None  # NaN stops the bytes and the optimizer's guards stop the rest: a consequence
        rows = self.suspects(history) & _readable(record)
        whole = bool(rows.any()) and bool((rows | ~(motion.trained & _readable(record))).all())
        if not whole and "zero_gradients" in history.raised:
            rows &= ~_without_gradient(record)  # already said, with better evidence
        if not rows.any():
            return None
        meant = rows & np.array([not whole and path in history.left_out for path in leaves.paths], bool)
        if (rows & ~meant).any():
            rows = rows & ~meant  # what is left out by design is no news beside what is not
            level = self._level_whole(record, history) if whole else self._level_leaf(history)
        else:
            level = Level.INFO
        if level is None:
            return None
        paths = tuple(p for p, r in zip(leaves.paths, rows, strict=True) if r)
        n, of, updates = len(paths), int(motion.trained.sum()), int(motion.still[rows].min())
        title = "No parameter moves" if whole else f"{n} of {of} parameters do not move"
        message = (
            f"{'All' if whole else 'Of'} {of} trained parameters {'are' if whole else f'{n} are'} bit-equal over "
            f"{updates} updates (last change at or before step {int(motion.since[rows].max())})."
        )
        if record.get("optimizer.step") is not None:
            message += f" optimizer.step is {int(record.get('optimizer.step'))}."
        values = {"leaves": float(n), "updates": float(updates)}
        return Alert(record.step, self.slug, level, title, message, paths, values=values)

    def _nothing_selected(self, record: Record) -> Alert:
        leaves = record.leaves["params"]
        paths = tuple(p for p, t in zip(leaves.paths, leaves.trained, strict=True) if t)
        message = f"The optimizer's wrt filter selects none of the model's {len(leaves)} leaves; every update is empty."
        return Alert(record.step, self.slug, Level.ERROR, "The optimizer trains nothing", message, paths)

    def _level_whole(self, record: Record, history: History) -> Level | None:
        motion, trial = history.params, history.trial
        steps, losses = history.series("loss")
        moved = bool(motion.moved[motion.trained].any())
        if converged(history):
            return Level.INFO
        if trial is not None:
            if trial.zero_now and (trial.moves_later or history.clock.near_the_end(record.step)):
                return None  # a schedule at rest, or at its planned end
            too_small = not trial.zero_now and trial.absorbed_share >= 0.95
            if moved and too_small and motion.still[motion.trained].min() < self.tail:
                return None  # the last steps of a decay
            if moved and too_small:
                return Level.WARN
        since = steps >= int(motion.since[motion.trained].max())
        recent, when = losses[since].tolist(), steps[since].tolist()
        return Level.WARN if falls(recent) or undecided(recent, when) else Level.ERROR

    def _level_leaf(self, history: History) -> Level | None:
        return Level.INFO if converged(history) else Level.WARN


def _readable(record: Record) -> np.ndarray:
    texts = record.get("params.fingerprint")
    return np.array([":" in text for text in texts], bool)


def _without_gradient(record: Record) -> np.ndarray:
    """bool[n_leaves], leaves whose measured gradient is exactly 0 while others have one."""
    paths, table = record.leaves["params"].paths, record.leaves.get("grads")
    largest = record.get("grads.max_abs")
    if table is None or largest is None or not np.any(largest):
        return np.zeros(len(paths), bool)
    zero = {path for path, value in zip(table.paths, largest, strict=True) if value == 0}
    return np.array([path in zero for path in paths], bool)
