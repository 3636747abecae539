"""The parameters: norms, finiteness, and whether they move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_probes.callbacks.base import Callback, Context, Every, check_every
from nnx_probes.callbacks.group import Group
from nnx_probes.device.leaves import Leaf
from nnx_probes.device.probe import Sample
from nnx_probes.device.same import Same
from nnx_probes.device.tap import is_watched
from nnx_probes.host.record import Leaves

__all__ = ["ParamProbe"]

_FLOATS = ("float", "bfloat", "complex")


class ParamProbe(Callback):
    """Measures every leaf of the model: norm, largest magnitude, non-finite elements, fingerprint.

    Puts ``params.norm``, ``params.max_abs`` (float32[n_leaves]), ``params.nonfinite`` (int32[n_leaves]),
    ``params.fingerprint`` (n_leaves texts) and ``params.largest`` (largest magnitude among trained leaves) into the
    record. Trained are the leaves that the optimizer's ``wrt`` filter selects; without an optimizer, every
    ``nnx.Param``; in a pytree without Variables, every floating leaf. Also ``loop.steps``, the calls of the monitor since
    this was last measured, and, where it is so, ``params.replaced`` (paths under which another Variable stands than at first),
    ``optimizer.selects_nothing`` with ``optimizer.wrt`` (the filter's name) and ``loop.traced`` (that there were tracers).

    Args:
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget.
      fingerprints: ``"auto"``, ``"mix64"`` or ``"xxh3"`` (see `fingerprint`), None to leave them out (then the rules
        about movement are silent).

    Cost: two passes over the parameters on the device (sum of squares, maximum) and one for the fingerprint; 16 or 24
    bytes a leaf are copied. With ``xxh3`` the call waits for the step to finish, since the bytes are hashed where they lie.
    """

    provides = ("params.*", "loop.steps", "loop.traced", "optimizer.selects_nothing", "optimizer.wrt")

    def __init__(self, *, every: Every = None, fingerprints: str | None = "auto") -> None:
        check_every(every, "ParamProbe")
        self.every = every
        self._group = Group("params", fingerprints=fingerprints, trained=self._trained)
        self._optimizer: Any = None
        self._filter = Same()
        self._selects_nothing = False
        self._wrt = ""

    def on_step_end(self, ctx: Context) -> None:
        """Queues the measurement of the model."""
        if ctx.model is None:
            return
        self._optimizer = ctx.optimizer if isinstance(ctx.optimizer, nnx.Optimizer) else None
        if self._filter.turn_to(None if self._optimizer is None else self._optimizer.wrt):
            self._group.renew()  # another optimizer, as in staged freezing, trains other leaves
        if is_watched(ctx.optimizer) and ctx.optimizer.evidence.hashing:
            self._group.probe.prefer("mix64")  # those that `watch` takes inside the step
        try:
            ctx.later.append(self._group.enqueue(ctx.model, self._extra))
        finally:
            self._optimizer = None  # hold nothing of the user's between steps
        ctx.values["loop.steps"] = ctx.steps

    def _extra(self, sample: Sample, table: Leaves) -> Mapping[str, Any]:
        known = sample.max_abs[np.array(table.trained, bool) & ~np.isnan(sample.max_abs)]
        values: dict[str, Any] = {"params.largest": float(np.max(known, initial=0.0))}
        if sample.replaced:
            values["params.replaced"] = sample.replaced
        if self._selects_nothing:
            values["optimizer.selects_nothing"] = True
            values["optimizer.wrt"] = self._wrt
        return values

    def _trained(self, source: Any, leaves: tuple[Leaf, ...], ids: tuple[int, ...]) -> tuple[bool, ...]:
        self._selects_nothing = False
        fallback = _default_trained(leaves)
        if self._optimizer is None or all(leaf.variable is None for leaf in leaves):
            return fallback
        self._wrt = getattr(self._optimizer.wrt, "__name__", repr(self._optimizer.wrt))
        chosen = selected(self._optimizer, source, ids)
        if chosen is None:
            return fallback
        self._selects_nothing = not any(chosen)
        return chosen if any(chosen) else fallback


def selected(optimizer: Any, source: Any, ids: tuple[int, ...]) -> tuple[bool, ...] | None:
    """Returns for each object id whether ``wrt`` selects that Variable of `source`; None if that cannot be told."""
    if not isinstance(source, nnx.Pytree):
        return None
    state = nnx.state(source, optimizer.wrt)
    wanted = {id(v) for v in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))}
    return tuple(i in wanted for i in ids)


def _default_trained(leaves: tuple[Leaf, ...]) -> tuple[bool, ...]:
    params = tuple(leaf.variable is not None and issubclass(leaf.variable, nnx.Param) for leaf in leaves)
    if any(params):
        return params
    return tuple(leaf.dtype.startswith(_FLOATS) for leaf in leaves)
