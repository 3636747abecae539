"""State beside the parameters that should move and does not, or moves when it should not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.motion import Motion
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule

__all__ = ["StaleState"]


@dataclass(frozen=True)
class StaleState(Rule):
    """Running statistics or dropout's counters stand still while the parameters move, or an evaluation changes the model.

    All ``BatchStat`` leaves bit-equal over `steps` updates: WARN; INFO where BatchNorm alone has been set to evaluation
    since the first probe and its statistics are not those of a fresh layer, which is how a pretrained network is frozen
    on purpose. All ``RngCount`` leaves, while the model has a Dropout with a rate above 0: WARN. After an evaluation: a
    ``BatchStat`` that differs is an ERROR, parameters are a WARN, and so are counters where a Dropout is set to training; INFO
    where all trained parameters are others although the optimizer did not step (averages swapped in).

    Delay: `steps` effective updates; none at an evaluation.

    Args:
      steps: effective updates.
    """

    steps: int = 3

    slug = "stale_state"
    reads = ()

    def check(self, record: Record, history: History) -> Alert | None:
        if record.get("eval.changed"):
            return self._evaluation(record, history)
        if "params.fingerprint" not in record or not history.params.changed[history.params.trained].any():
            return None
        motion, table = history.params, record.leaves["params"]
        statistics = self._standing(motion, np.array([kind == "BatchStat" for kind in table.kinds], bool))
        counts = np.zeros(len(table), bool)
        if record.get("mode.dropout_eval", 0) + record.get("mode.dropout_train", 0):
            counts = self._standing(motion, np.array([kind == "RngCount" for kind in table.kinds], bool))
        paths = tuple(path for path, row in zip(table.paths, statistics | counts, strict=True) if row)
        if not paths:
            return None
        meant = self._frozen_on_purpose(record, motion, statistics, counts)
        what = [
            words for rows, words in ((statistics, "running statistics"), (counts, "dropout counters")) if rows.any()
        ]
        message = (
            f"{len(paths)} {' and '.join(what)} are bit-equal over {int(motion.still[statistics | counts].min())} "
            f"updates in which the parameters moved; first {paths[0]}."
        )
        title = "BatchNorm is frozen" if meant else f"{' and '.join(what).capitalize()} stand still"
        return Alert(record.step, self.slug, Level.INFO if meant else Level.WARN, title, message, paths)

    def _standing(self, motion: Motion, rows: np.ndarray) -> np.ndarray:
        """The same rows if all of them have stood still for long enough, else none."""
        return rows & bool(rows.any() and (motion.still[rows] >= self.steps).all())

    def _frozen_on_purpose(self, record: Record, motion: Motion, statistics: np.ndarray, counts: np.ndarray) -> bool:
        table, norms = record.leaves["params"], record.get("params.norm")
        if counts.any() or record.get("mode.norm_train", 0) or not record.get("mode.norm_eval", 0) or norms is None:
            return False
        means = np.array([path.rpartition(".")[2] == "mean" for path in table.paths], bool) & statistics
        return not motion.moved[statistics].any() and bool(np.any(norms[means] > 0))

    def _evaluation(self, record: Record, history: History) -> Alert | None:
        paths, kinds = record.values["eval.changed"], record.get("eval.kinds", ())
        if set(kinds) == {"RngCount"} and not (history.before and history.before.get("mode.dropout_train")):
            return None  # a recurrent cell draws its first state; that is no dropout
        level = Level.ERROR if "BatchStat" in kinds else Level.WARN
        if self._swapped(record, history):
            level = Level.INFO
        message = (
            f"{len(paths)} arrays of the model ({', '.join(kinds)}) are not what they were after step {record.step}, before "
            f"the evaluation; first {paths[0]}."
        )
        if level == Level.INFO:
            message += (
                " All trained parameters changed and the optimizer did not step: averages that were swapped in for it look like "
                "this. Call monitor.on_eval after they are swapped back."
            )
            return Alert(record.step, self.slug, level, "Other parameters are in place", message, paths)
        return Alert(record.step, self.slug, level, "The evaluation changed the model", message, paths)

    def _swapped(self, record: Record, history: History) -> bool:
        """Whether all trained parameters are others without a step of the optimizer."""
        if record.get("eval.stepped", True) or history.before is None or "params" not in history.before.leaves:
            return False
        table = history.before.leaves["params"]
        trained = {path for path, row in zip(table.paths, table.trained, strict=True) if row}
        return bool(trained) and trained <= set(record.values["eval.changed"])
