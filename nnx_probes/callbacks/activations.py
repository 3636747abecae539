"""Activations: what every module gives, and which units never fire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_probes.callbacks.base import Callback, Context, Every, Later, check_every
from nnx_probes.device.forward import RECTIFIERS, Forward, Place, read_places
from nnx_probes.errors import ArgumentError, ArgumentTypeError
from nnx_probes.host.record import Leaves

__all__ = ["ActivationProbe"]


class ActivationProbe(Callback):
    """Runs one forward pass on due steps and measures every module's output and every activation function.

    ::

        probes.Monitor(..., callbacks=[*callbacks.default(), ActivationProbe(lambda model, batch: model(batch["x"]))])

    Puts into the record, one row a place in the order of computation: ``activations.rms``, ``activations.max_abs``
    (float32), ``activations.nonfinite`` (count), ``activations.saturated`` (share within 1 % of the end of a sigmoid's or
    tanh's range; NaN elsewhere) and ``activations.dead`` (share of units, along the last axis, that were exactly 0 on
    every sample of every probed batch for `window` steps; behind ReLUs only, NaN elsewhere). Also ``activations.window`` and
    ``activations.before`` (whether it ran on the parameters from before the step).

    A place is a module (``layers.0.lin``) or an activation function behind one (``layers.0.lin > relu``). Parameters, batch
    and random state are those the step itself used. Of what runs inside ``nnx.scan``, ``nnx.remat`` or an inner
    ``nnx.jit`` the modules' outputs are measured (stacked by a scan), not the activation functions between them.

    Args:
      forward: of the model and the batch handed to the monitor; its result is not looked at.
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget. A forward pass is not free:
        take a large one.
      window: steps for which a unit must have been 0 to count as dead.
      copy: keep a copy of the model's arrays from before a due step, which takes their size of memory for that long. False:
        use the parameters after the step; the first bad module cannot be named once those are NaN.

    Cost: one copy of the parameters and one forward pass a due step (dropout and running statistics as the model's mode
    says; nothing of the model changes), one to two passes over its activations, and one compilation.
    """

    provides = ("activations.*",)

    def __init__(
        self, forward: Callable[..., Any], *, every: Every = None, window: int = 64, copy: bool = True
    ) -> None:
        check_every(every, "ActivationProbe")
        if not callable(forward) or isinstance(forward, nnx.Module):
            raise ArgumentTypeError(
                f"ActivationProbe(forward={type(forward).__name__}): expected a function of the model and a batch, for example "
                "lambda model, batch: model(batch['x'])."
            )
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ArgumentError(f"ActivationProbe(window={window!r}): expected a whole number of steps, at least 1.")
        self.every = every
        self.window = window
        self._forward = Forward(forward)
        self._copy = bool(copy)
        self._kept: Any = None
        self._kept_for = range(0)  # steps that may begin from what was kept
        self._began = False
        self._table: Leaves | None = None
        self._fired_at: dict[str, np.ndarray] = {}

    def before_due(self, ctx: Context) -> None:
        """Keeps the parameters the next step will start from."""
        self._kept = self._forward.keep(ctx.model) if self._copy and isinstance(ctx.model, nnx.Pytree) else None
        self._kept_for = range(ctx.step + 1, ctx.step + ctx.stride + 1)

    def on_train_end(self, ctx: Context) -> None:
        """Lets go of the copy for a step that will not come."""
        self._kept = None

    def on_step_end(self, ctx: Context) -> None:
        """Queues the forward pass."""
        kept, self._kept = self._kept, None
        if self._began and ctx.step not in self._kept_for:
            kept = None  # the loop went back, or on without the monitor: the step began from other parameters
        self._began = True
        if ctx.batch is None or not isinstance(ctx.model, nnx.Pytree):
            return
        ctx.values["activations.before"] = kept is not None
        places, packed = self._forward.enqueue(ctx.model, ctx.batch, kept)
        step = ctx.step

        def read() -> tuple[Mapping[str, Any], Mapping[str, Leaves]]:
            found, alive = read_places(places, np.asarray(jax.device_get(packed)))
            values: dict[str, Any] = {f"activations.{name}": numbers for name, numbers in found.items()}
            values["activations.nonfinite"] = found["nonfinite"].astype(np.int32)
            values["activations.dead"] = self._dead(step, places, alive)
            values["activations.window"] = self.window
            return values, {"activations": self._leaves(places)}

        packed.copy_to_host_async()
        ctx.later.append(Later(lambda: bool(getattr(packed, "is_ready", lambda: True)()), read))

    def _dead(self, step: int, places: tuple[Place, ...], alive: list[np.ndarray | None]) -> np.ndarray:
        """Share of units that have not fired for `window` steps, counted from the first probe that saw them."""
        shares = np.full(len(places), np.nan, np.float32)
        for i, (place, fires) in enumerate(zip(places, alive, strict=True)):
            if fires is None or not len(fires) or place.function not in RECTIFIERS:
                continue
            at = self._fired_at.get(place.path)
            at = np.full(len(fires), step) if at is None or len(at) != len(fires) else np.where(fires, step, at)
            self._fired_at[place.path] = at
            shares[i] = float(np.mean(~fires & (step - at >= self.window - 1)))
        return shares

    def _leaves(self, places: tuple[Place, ...]) -> Leaves:
        paths = tuple(place.path for place in places)
        if self._table is None or self._table.paths != paths:
            self._table = Leaves(
                group="activations",
                paths=paths,
                kinds=tuple(place.function or "output" for place in places),
                shapes=tuple(place.shape for place in places),
                dtypes=tuple(place.dtype for place in places),
                trained=(False,) * len(places),
            )
        return self._table
