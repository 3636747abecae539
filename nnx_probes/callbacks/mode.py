"""Training or evaluation: how the model's layers are set, and whether an evaluation left it as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from nnx_probes.callbacks.base import Callback, Context, Every, check_every
from nnx_probes.callbacks.group import Group
from nnx_probes.device.fingerprint import METHODS
from nnx_probes.device.modes import Modes
from nnx_probes.host.record import Leaves, Record

__all__ = ["ModeProbe"]


class ModeProbe(Callback):
    """Looks how Dropout and BatchNorm layers are set, and what an evaluation changed.

    Puts the numbers of layers into the record: ``mode.dropout_eval``, ``mode.dropout_train`` (rate above 0),
    ``mode.norm_eval``, ``mode.norm_train``, and ``mode.first``, the path of the first one set to evaluation. At
    ``monitor.on_eval`` with the number of a probed step: ``eval.changed`` (paths of the arrays that are not what they were
    after that step), ``eval.kinds`` (their Variable types) and, where something changed, ``eval.stepped`` (whether
    ``optimizer.step`` moved on). None of these where the loop may have trained between that step and the evaluation:
    ``optimizer.step`` has moved on since (counted in epochs, an evaluation's number can be that of an earlier step) or, where
    there is none, a trained parameter has; only a loop probed at each of its steps has no such gap.

    Args:
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget.

    Cost: a few attributes a layer on due steps; at an evaluation one fingerprint of the model, and waiting for it.
    """

    provides = ("mode.*", "eval.changed", "eval.kinds", "eval.stepped")

    def __init__(self, *, every: Every = None) -> None:
        check_every(every, "ModeProbe")
        self.every = every
        self._modes = Modes()
        self._groups: dict[str, Group] = {}
        self._step: int | None = None
        self._gapless = False

    def on_step_end(self, ctx: Context) -> None:
        """Reads the layers' attributes."""
        self._gapless = ctx.every == 1 and self._step == ctx.step - 1
        self._step = ctx.step
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
        then = _texts(before.values, before.leaves["params"])
        method, stepped = _method_of(then), _stepped(ctx.optimizer, before)
        gapless = self._gapless and self._step == ctx.step
        if method is None or (stepped and not gapless):
            return
        values, tables = self._group(method).enqueue(ctx.model).read()
        now, table = _texts(values, tables["params"]), before.leaves["params"]
        comparable = [p for p in then if p in now and _method(now[p]) == _method(then[p]) in METHODS]
        changed = {p for p in comparable if now[p] != then[p]}
        trained = {path for path, row in zip(table.paths, table.trained, strict=True) if row}
        if not comparable or (stepped is None and not gapless and changed & trained):
            return
        kinds = dict(zip(tables["params"].paths, tables["params"].kinds, strict=True))
        ctx.values["eval.changed"] = tuple(p for p in comparable if p in changed)
        ctx.values["eval.kinds"] = tuple(sorted({kinds[p] for p in changed}))
        if changed and stepped is not None:
            ctx.values["eval.stepped"] = stepped

    def _group(self, method: str) -> Group:
        """The model's arrays under the method of the fingerprints to compare with."""
        if method not in self._groups:
            self._groups[method] = Group("params", fingerprints=method)
        return self._groups[method]


def _texts(values: Mapping[str, Any], table: Leaves) -> dict[str, str]:
    return dict(zip(table.paths, values["params.fingerprint"], strict=True))


def _method(text: str) -> str:
    return text.partition(":")[0]


def _method_of(texts: Mapping[str, str]) -> str | None:
    """The method these fingerprints were taken by (under ``mix64``, arrays of the host have another); None for none."""
    return next((m for m in ("mix64", "xxh3") if m in map(_method, texts.values())), None)


def _stepped(optimizer: Any, before: Record) -> bool | None:
    """Whether ``optimizer.step`` is another one than at `before`; None where it cannot be told."""
    count, then = getattr(optimizer, "step", None), before.get("optimizer.step")
    if then is None or not isinstance(count, nnx.Variable):
        return None
    now = count.get_raw_value()
    if isinstance(now, jax.core.Tracer) or (isinstance(now, jax.Array) and now.is_deleted()):
        return None
    return int(jax.device_get(count.get_value())) != int(then)
