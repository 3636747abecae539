"""Gradients and updates, from wherever they can be had."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_probes.callbacks.arming import Arming
from nnx_probes.callbacks.base import Callback, Context, Every, Later, check_every
from nnx_probes.callbacks.flow_values import FlowTable
from nnx_probes.device.chain import clip_norm, skip_limit
from nnx_probes.device.handed import Handed
from nnx_probes.device.recompute import Recompute
from nnx_probes.device.same import Same
from nnx_probes.device.stats import PREFIX
from nnx_probes.device.tap import Tap, is_watched, unpack
from nnx_probes.device.whence import AHEAD, ELSEWHERE, LIVE
from nnx_probes.errors import ArgumentTypeError
from nnx_probes.host.record import Leaves

__all__ = ["GradientProbe"]


class GradientProbe(Callback):
    """Measures gradients and updates, leaf by leaf.

    It takes the first of these that there is: what a watched optimizer measured inside the step (`watch`); the
    gradients and updates the loop hands over (``monitor(step, grads=..., updates=...)``); what `step_stats` returned, in
    the metrics; with `loss_fn`, gradients computed anew.

    Puts into the record, one row a trained parameter: ``grads.norm``, ``grads.max_abs`` (float32), ``grads.nonfinite``
    (int32), ``grads.zeros`` (share of exact zeros); ``updates.norm``, ``updates.max_abs``, ``updates.nonfinite``,
    ``updates.ratio`` (update norm over parameter norm), ``updates.cosine`` (of its angle to the gradient),
    ``updates.absorbed`` (share of elements that the update does not change although it is not 0), ``updates.entry`` and
    ``updates.leaving`` (fingerprints, see `watch`). For stacked layers the same as ``slices.grads_norm`` and so on, one row
    a layer. Also ``grads.steps`` (calls of the monitor since the last time), ``grads.clip_norm`` and ``optimizer.skip_limit``,
    read off the optimizer's chain, and ``grads.age``, how many updates before that of the due step the measured one was: under
    ``optax.MultiSteps`` it is the last one that moved the parameters. A watched loop that calls ``update`` on some steps only
    (accumulation by hand) is measured at the next such step and read at the due one after it. Of a watched optimizer also
    ``watch.missed`` (whether it was asked to measure and did not) and, where the loop cannot be measured,
    ``watch.unmeasured`` (why) and ``watch.remedy`` (``"inside"``, ``"earlier"`` or ``"none"``: how to call `watch` then).

    Args:
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget.
      loss_fn: ``loss_fn(model, batch)``, returning the loss or a tuple that begins with it. The gradient is that of the
        parameters after the step, on the step's batch; nothing the forward pass changes is kept.

    Cost: of a watched optimizer see `watch`; of handed gradients one launch and 4 passes over each of gradients, updates
    and parameters; with `loss_fn` one forward and backward pass a due step, and its compilation.
    """

    provides = ("grads.*", "updates.*", "slices.*", "watch.*", "optimizer.skip_limit")

    def __init__(self, *, every: Every = None, loss_fn: Callable[..., Any] | None = None) -> None:
        check_every(every, "GradientProbe")
        if loss_fn is not None and not callable(loss_fn):
            raise ArgumentTypeError(
                f"GradientProbe(loss_fn={loss_fn!r}): expected a function of the model and a batch, got "
                f"{type(loss_fn).__name__}."
            )
        self.every = every
        self._recompute = None if loss_fn is None else Recompute(loss_fn)
        self._handed = Handed()
        self._table = FlowTable()
        self._tap: Callable[[], Any] = _gone
        self._arming = Arming()
        self._silent = False
        self._last: int | None = None
        self._tx = Same()
        self._chain: tuple[float | None, float | None] = (None, None)

    @property
    def lead(self) -> int:  # type: ignore[override]
        """One step; more where not every step moves the parameters."""
        return self._arming.lead

    def before_due(self, ctx: Context) -> None:
        """Asks the watched optimizer to measure the next update."""
        self._turn_to(ctx.optimizer)
        if is_watched(ctx.optimizer):
            self._arming.before(ctx, ctx.optimizer)

    def on_step_end(self, ctx: Context) -> None:
        """Queues what was measured."""
        self._read_chain(ctx)
        ctx.values["grads.steps"] = ctx.steps
        self._turn_to(ctx.optimizer)
        if is_watched(ctx.optimizer) and self._watched(ctx, ctx.optimizer):
            return
        if ctx.grads is not None or ctx.updates is not None:
            self._measure_handed(ctx)
        elif (stats := _step_stats(ctx.metrics)) is not None:
            self._table.adopt(ctx.model, ctx.optimizer)
            own = {k: jnp.copy(v) if isinstance(v, jax.Array) else v for k, v in stats.items()}  # theirs may be freed
            ctx.later.append(_later(list(own.values()), lambda: self._table.from_stats(own)))
        elif self._recompute is not None and ctx.batch is not None and isinstance(ctx.model, nnx.Pytree):
            wrt = ctx.optimizer.wrt if isinstance(ctx.optimizer, nnx.Optimizer) else nnx.Param
            layout, words = self._recompute.enqueue(ctx.model, wrt, ctx.batch)
            self._table.adopt(ctx.model, ctx.optimizer)
            ctx.later.append(_later([words], lambda: self._table.values(layout, _fetch(words))))

    def on_train_end(self, ctx: Context) -> None:
        """Leaves the optimizer as it was."""
        self._turn_to(None)

    def _turn_to(self, optimizer: Any) -> None:
        """Takes what still hangs off another optimizer, and remembers this one (weakly)."""
        before = self._tap()
        if before is not None and before is not optimizer:
            self._arming.leave(before)
        self._tap = weakref.ref(optimizer) if is_watched(optimizer) else _gone

    def _measure_handed(self, ctx: Context) -> None:
        layout, words = self._handed.enqueue(ctx.model, ctx.optimizer, ctx.grads, ctx.updates)
        self._table.adopt(ctx.model, ctx.optimizer)
        ctx.later.append(_later([words], lambda: self._table.values(layout, _fetch(words))))

    def _watched(self, ctx: Context, tap: Tap) -> bool:
        """Queues the watched optimizer's measurement; False if there is none."""
        evidence = tap.evidence
        fresh, step = self._arming.at_due(tap), ctx.step
        words = tap.read()
        self._note_unmeasured(ctx, tap)
        if not evidence.inside:
            if fresh is not None:
                ctx.values["watch.missed"] = not fresh
            if not fresh:
                return False  # what there is belongs to an earlier step
        elif self._silent and self._has_another_source(ctx):
            return False
        if words is None or isinstance(words, jax.core.Tracer) or words.is_deleted():
            return False
        self._table.adopt(ctx.model, ctx.optimizer)
        words.copy_to_host_async()
        later = evidence.inside or self._arming.counts  # the measurement may be some updates old
        steps = jnp.copy(tap.step.get_value()) if later else None

        def values() -> tuple[Mapping[str, Any], Mapping[str, Leaves]]:
            found = unpack(evidence.layout, _fetch(words))
            number = None if steps is None else int(_fetch(steps)) - 1
            if number is not None:
                self._arming.count(step, number)
            count, self._silent = found.count, True
            if count is None:
                return {"watch.missed": True}, {}
            if count == self._last:
                return {}, {}
            self._last, self._silent = count, False
            values, tables = self._table.values(evidence.layout, found.words)
            self._arming.learn(count, _moves(values))
            if evidence.inside:
                values = {**values, "watch.missed": False}
            if number is not None:
                values = {**values, "grads.age": number - count}
            if found.entry and "updates" in tables:
                values = {**values, "updates.entry": found.entry, "updates.leaving": found.leaving}
            return values, tables

        ctx.later.append(_later([words], values))
        return True

    def _has_another_source(self, ctx: Context) -> bool:
        handed = ctx.grads is not None or ctx.updates is not None or _step_stats(ctx.metrics) is not None
        return handed or self._recompute is not None

    def _note_unmeasured(self, ctx: Context, tap: Tap) -> None:
        """Says why a watched optimizer cannot be measured in this loop, where that is known."""
        evidence = tap.evidence
        if evidence.blind:
            ctx.values["watch.unmeasured"] = "its own update method cannot be followed"
            ctx.values["watch.remedy"] = "none"
        elif evidence.inside:
            ctx.values["watch.remedy"] = "earlier"
        elif evidence.ahead:
            ctx.values["watch.unmeasured"] = AHEAD
        elif evidence.traced + evidence.conditional and evidence.whence != LIVE:
            ctx.values["watch.unmeasured"] = evidence.whence or ELSEWHERE
        elif not (evidence.traced or evidence.conditional or evidence.eager):
            ctx.values["watch.unmeasured"] = "its update never ran: the step uses an optimizer made before watch()"

    def _read_chain(self, ctx: Context) -> None:
        tx = getattr(ctx.optimizer, "tx", None)
        if tx is None:
            return
        if self._tx.turn_to(tx):
            self._chain = clip_norm(tx), skip_limit(tx)
        clip, limit = self._chain
        if clip is not None:
            ctx.values["grads.clip_norm"] = clip
        if limit is not None:
            ctx.values["optimizer.skip_limit"] = limit


def _later(arrays: list[Any], read: Callable[[], tuple[Mapping[str, Any], Mapping[str, Leaves]]]) -> Later:
    def ready() -> bool:
        return all(bool(x.is_ready()) for x in arrays if hasattr(x, "is_ready"))

    return Later(ready, read)


def _moves(values: Mapping[str, Any]) -> bool:
    return bool(np.nansum(np.abs(values.get("updates.norm", 0))) > 0)


def _fetch(words: Any) -> np.ndarray:
    return np.asarray(jax.device_get(words))


def _step_stats(metrics: Any) -> dict[str, Any] | None:
    """What `step_stats` returned, at the top of the metrics or one level below."""
    if not isinstance(metrics, Mapping):
        return None
    for mapping in (metrics, *(m for m in metrics.values() if isinstance(m, Mapping))):
        own = {k[len(PREFIX) :]: v for k, v in mapping.items() if isinstance(k, str) and k.startswith(PREFIX)}
        if any(k.startswith(("grads_", "updates_")) for k in own):
            return own
    return None


def _gone() -> None:
    """A reference to nothing."""
