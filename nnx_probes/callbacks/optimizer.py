"""The optimizer's state: whether it moves, its clocks, and what it would do."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from flax import nnx

from nnx_probes.callbacks.base import Callback, Context, Every, check_every
from nnx_probes.callbacks.group import Group
from nnx_probes.device.leaves import Tree
from nnx_probes.device.probe import Sample
from nnx_probes.device.tap import ProbeState, is_watched
from nnx_probes.device.trial import try_update
from nnx_probes.device.whence import LIVE
from nnx_probes.host.clock import counters
from nnx_probes.host.history import History
from nnx_probes.host.record import Leaves, Record

__all__ = ["OptimizerProbe", "optimizer_source"]


class OptimizerProbe(Callback):
    """Measures the optimizer's state as `ParamProbe` measures the model, and reads its clocks.

    Puts ``optimizer.norm``, ``optimizer.max_abs``, ``optimizer.nonfinite``, ``optimizer.fingerprint``,
    ``optimizer.value`` (float64[n_leaves], the element of scalar leaves) and, where found, ``optimizer.step``,
    ``optimizer.learning_rate``, ``optimizer.notfinite_count`` and ``optimizer.total_notfinite`` (bad updates running and in
    all, of ``optax.apply_if_finite``) into the record, and ``loop.traced`` where there were tracers. Of a watched optimizer
    also how often ``update`` ran under a transformation (``watch.traced``), inside a branch of the compiled step
    (``watch.conditional``) and outside one (``watch.eager``), and whether the step gets the live optimizer (``watch.live``).
    When parameters stand still: ``params.trial_update``, ``params.trial_absorbed``, ``trial.later`` and ``trial.earlier``
    (see `try_update`).

    Args:
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget.
      fingerprints: as in `ParamProbe`.

    Cost: as `ParamProbe`, over the optimizer's leaves (twice the parameters with Adam). When parameters stand still it
    asks the optimizer what it would do (`try_update`), which compiles once and waits.
    """

    provides = ("optimizer.*", "watch.*", "params.trial_update", "params.trial_absorbed", "trial.*", "loop.traced")

    def __init__(self, *, every: Every = None, fingerprints: str | None = "auto") -> None:
        check_every(every, "OptimizerProbe")
        self.every = every
        self._group = Group("optimizer", fingerprints=fingerprints)
        self._live: tuple[Any, Any] = (_gone, _gone)

    def on_step_end(self, ctx: Context) -> None:
        """Queues the measurement of the optimizer's state."""
        if ctx.optimizer is None:
            return
        if isinstance(ctx.optimizer, nnx.Optimizer) and isinstance(ctx.model, nnx.Pytree):
            self._live = (weakref.ref(ctx.optimizer), weakref.ref(ctx.model))
        if is_watched(ctx.optimizer):
            ctx.values["watch.traced"] = ctx.optimizer.evidence.traced
            ctx.values["watch.conditional"] = ctx.optimizer.evidence.conditional
            ctx.values["watch.eager"] = ctx.optimizer.evidence.eager
            ctx.values["watch.live"] = ctx.optimizer.evidence.whence == LIVE
        ctx.later.append(self._group.enqueue(optimizer_source(ctx.optimizer), self._clocks))

    def _clocks(self, sample: Sample, table: Leaves) -> Mapping[str, Any]:
        found = counters(table, sample.value)
        values: dict[str, Any] = {"optimizer.value": sample.value}
        for name in ("step", "learning_rate", "notfinite_count", "total_notfinite"):
            if name in found:
                values[f"optimizer.{name}"] = found[name]
        return values

    def explain(self, record: Record, history: History) -> Mapping[str, Any]:
        """Asks the optimizer what a gradient of ones would change."""
        optimizer, model = (reference() for reference in self._live)
        if "params.fingerprint" not in record or optimizer is None or model is None:
            return {}
        tree = Tree(model)
        tree.read()
        if tuple(leaf.path for leaf in tree.leaves) != record.leaves["params"].paths:
            return {}
        known = (
            counters(record.leaves["optimizer"], record.values["optimizer.value"])
            if "optimizer.value" in record
            else {}
        )
        return try_update(optimizer, model, tree.leaves, count=known.get("count")) or {}


def _gone() -> None:
    """A reference to nothing."""


def optimizer_source(optimizer: Any) -> Any:
    """Returns the part of an optimizer that is its own state (never the model it may hold)."""
    if isinstance(optimizer, nnx.State):
        return nnx.filter_state(optimizer, nnx.Not(ProbeState))
    if not isinstance(optimizer, nnx.Optimizer):
        return optimizer
    return {"step": optimizer.step, "opt_state": optimizer.opt_state}
