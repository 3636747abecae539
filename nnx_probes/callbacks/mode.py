"""Training or evaluation: how the model's layers are set, and whether an evaluation left it as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from nnx_probes.callbacks.base import Callback, Context, Every, check_every
from nnx_probes.callbacks.group import Group
from nnx_probes.device.modes import Modes
from nnx_probes.host.record import Leaves

__all__ = ["ModeProbe"]


class ModeProbe(Callback):
    """Looks how Dropout and BatchNorm layers are set, and what an evaluation changed.

    Puts the numbers of layers into the record: ``mode.dropout_eval``, ``mode.dropout_train`` (rate above 0),
    ``mode.norm_eval``, ``mode.norm_train``, and ``mode.first``, the path of the first one set to evaluation. At
    ``monitor.on_eval`` with the number of a probed step: ``eval.changed`` (paths of the arrays that are not what they were
    after that step), ``eval.kinds`` (their Variable types) and, where something changed, ``eval.stepped`` (whether
    ``optimizer.step`` moved on).

    Args:
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget.

    Cost: a few attributes a layer on due steps; at an evaluation one fingerprint of the model, and waiting for it.
    """

    provides = ("mode.*", "eval.changed")

    def __init__(self, *, every: Every = None) -> None:
        check_every(every, "ModeProbe")
        self.every = every
        self._modes = Modes()
        self._group = Group("params", fingerprints="auto")

    def on_step_end(self, ctx: Context) -> None:
        """Reads the layers' attributes."""
        found = self._modes.read(ctx.model)
        if not found:
            return
        for kind, dropout in (("dropout", True), ("norm", False)):
            evaluating = [s.evaluating for s in found if s.dropout == dropout]
            ctx.values[f"mode.{kind}_eval"] = sum(evaluating)
            ctx.values[f"mode.{kind}_train"] = len(evaluating) - sum(evaluating)
        first = next((s.path for s in found if s.evaluating), None)
        if first is not None:
            ctx.values["mode.first"] = first

    def on_eval_end(self, ctx: Context) -> None:
        """Compares the model with what the last probed step left, if that is the step that was evaluated."""
        before = ctx.history.last if ctx.history is not None else None
        if before is None or ctx.model is None or before.step != ctx.step or "params.fingerprint" not in before:
            return
        values, tables = self._group.enqueue(ctx.model).read()
        kinds = dict(zip(tables["params"].paths, tables["params"].kinds, strict=True))
        now, then = _texts(values, tables["params"]), _texts(before.values, before.leaves["params"])
        changed = [p for p in then if p in now and _method(now[p]) == _method(then[p]) and now[p] != then[p]]
        ctx.values["eval.changed"] = tuple(changed)
        ctx.values["eval.kinds"] = tuple(sorted({kinds[p] for p in changed}))
        count = getattr(ctx.optimizer, "step", None)
        if changed and isinstance(count, nnx.Variable) and before.get("optimizer.step") is not None:
            ctx.values["eval.stepped"] = int(count.get_value()) != int(before.values["optimizer.step"])


def _texts(values: Mapping[str, Any], table: Leaves) -> dict[str, str]:
    return dict(zip(table.paths, values["params.fingerprint"], strict=True))


def _method(text: str) -> str:
    return text.partition(":")[0]
