"""State that a step computed and nobody kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.trend import falls, undecided

__all__ = ["LostUpdate"]


@dataclass(frozen=True)
class LostUpdate(Rule):
    """The state after a step is not what that step computed.

    Five signs: with ``watch``, ``Optimizer.update`` was traced and yet ``optimizer.step`` never moved (ERROR; WARN
    where the loss falls or may fall, for then the loop keeps its state elsewhere); the parameters keep coming back to a
    state they had left (`returns` times, WARN; to and fro between two states while ``optimizer.step`` goes on does not count,
    for so does a sign optimizer near its optimum); the arrays of the object that is looked at were donated or freed (WARN);
    with the fingerprints of ``watch``, parameters are after the step what they were when they entered it, although they left
    it changed (ERROR; WARN if they did move earlier in the run, for the loop may have taken back a step it did not like);
    with ``watch`` and probes at neighbouring steps, the parameters that enter a step are not those that left the one before
    (WARN: their norms differ by more than `apart`). An announced event (``monitor.mark``) explains that.

    Delay: two probes for the first, `returns` returns for the second, none for the others.

    Args:
      returns: how often an old state has to come back.
      skips: steps that a loop may take back whole at its start, as dynamic loss scaling does, where ``nnx.jit`` is known to
        write back what the step computes; twice the 15 halvings from a scale of 2^15 to 1.
      apart: relative difference of a leaf's norm that no rounding explains.
    """

    returns: int = 2
    skips: int = 32
    apart: float = 1e-3

    slug = "lost_update"
    reads = ("params.fingerprint",)

    def check(self, record: Record, history: History) -> Alert | None:
        return (
            self._counter(record, history)
            or self._unreadable(record)
            or self._not_arrived(record, history)
            or self._returned(record, history)
            or self._entered(record, history)
        )

    def _counter(self, record: Record, history: History) -> Alert | None:
        traced, count = record.get("watch.traced", 0), record.get("optimizer.step")
        motion = history.params
        still = motion.trained.any() and not motion.moved[motion.trained].any()
        if (
            not traced
            or count is None
            or history.clock.ever_stepped
            or history.clock.began_stepped
            or motion.probes < 2
            or not still
            or (record.get("watch.live", False) and motion.still[motion.trained].min() < self.skips)
        ):
            return None
        steps, losses = history.series("loss")
        elsewhere = falls(losses.tolist()) or undecided(losses.tolist(), steps.tolist())
        level = Level.WARN if elsewhere else Level.ERROR
        message = (
            f"Optimizer.update was compiled into the step, but optimizer.step, which it advances, is still {int(count)} after "
            f"step {record.step}, and no parameter has moved: the step's new state never reached these objects."
        )
        return Alert(record.step, self.slug, level, "Every update is thrown away", message, values={"count": count})

    def _unreadable(self, record: Record) -> Alert | None:
        texts, leaves = record.get("params.fingerprint"), record.leaves["params"]
        gone = tuple(p for p, text in zip(leaves.paths, texts, strict=True) if text == "deleted")
        if not gone:
            return None
        message = (
            f"{len(gone)} of {len(leaves)} arrays of the model have been deleted: they were donated to a step whose result "
            "went elsewhere. This object no longer holds the parameters that train."
        )
        return Alert(record.step, self.slug, Level.WARN, "The model's arrays are gone", message, gone)

    def _not_arrived(self, record: Record, history: History) -> Alert | None:
        if "updates.leaving" not in record:
            return None
        now = dict(zip(record.leaves["params"].paths, record.values["params.fingerprint"], strict=True))
        rows = zip(
            record.leaves["updates"].paths,
            record.values["updates.entry"],
            record.values["updates.leaving"],
            strict=True,
        )
        changed = [(path, now.get(path) == entry) for path, entry, leaving in rows if entry != leaving]
        lost = tuple(path for path, back in changed if back)
        if not lost:
            return None
        message = (
            f"The update of step {record.step} changed {len(changed)} parameters inside the step; {len(lost)} of them are "
            "outside it still what they were before, bit for bit."
        )
        moved = dict(zip(record.leaves["params"].paths, history.params.moved.tolist(), strict=True))
        level = Level.WARN if all(moved.get(path) for path in lost) else Level.ERROR
        return Alert(record.step, self.slug, level, "The step's result does not arrive", message, lost)

    def _returned(self, record: Record, history: History) -> Alert | None:
        motion = history.params
        if motion.returned_to is None or motion.returns < self.returns or not np.any(motion.trained):
            return None
        message = (
            f"After step {record.step} all trained parameters are bit-equal to those of step {motion.returned_to}, "
            f"although they were different in between; this has happened {motion.returns} times."
        )
        return Alert(record.step, self.slug, Level.WARN, "Parameters jump back to an earlier state", message)

    def _entered(self, record: Record, history: History) -> Alert | None:
        before, table = history.before, record.leaves.get("updates")
        ratios, norms = record.get("updates.ratio"), record.get("updates.norm")
        near = record.get("watch.missed") is False and not record.get("grads.age") and record.get("loop.steps") == 1
        near = near and before is not None and record.get("optimizer.step", 0) - before.get("optimizer.step", 0) == 1
        moves = history.params.changed[history.params.trained].any()  # else another copy trains: see FrozenParams
        if before is None or table is None or ratios is None or norms is None or not near or not moves:
            return None
        left = dict(zip(before.leaves["params"].paths, before.values["params.norm"].tolist(), strict=True))
        with np.errstate(all="ignore"):
            entered = norms.astype(np.float64) / ratios
        paths = tuple(
            path
            for path, norm in zip(table.paths, entered.tolist(), strict=True)
            if np.isfinite(norm) and abs(norm - left.get(path, norm)) > self.apart * max(norm, left.get(path, norm))
        )
        if not paths:
            return None
        message = (
            f"{len(paths)} of {len(table)} parameters entered step {record.step} with another norm than they had after the "
            f"step before; first {paths[0]}."
        )
        return Alert(
            record.step,
            self.slug,
            Level.WARN,
            "Parameters change between two steps",
            message,
            paths,
            values={"entered": 1.0},
        )
