"""Measuring gradients and updates that a loop hands over."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx

from nnx_probes.device.flow import Layout, Slot
from nnx_probes.device.leaves import key_name
from nnx_probes.device.reduce import on_one_device
from nnx_probes.device.slots import Params
from nnx_probes.errors import ArgumentTypeError

__all__ = ["Handed"]


class Handed:
    """Measures pytrees of gradients and updates against the live parameters; compiles once a structure."""

    def __init__(self) -> None:
        self._params = Params()

    def enqueue(self, model: Any, optimizer: Any, grads: Any, updates: Any) -> tuple[Layout, jax.Array]:
        """Queues the measurement; returns what its words mean, and them.

        The live parameters have been updated already, so ``p + u == p`` is asked of the new ones: it holds wherever the
        update was absorbed, and elsewhere only where adding it a second time would be. Where they cannot be read (donated,
        traced) gradients and updates are measured alone.

        Raises:
          ArgumentTypeError: neither holds an array.
        """
        wrt = optimizer.wrt if isinstance(optimizer, nnx.Optimizer) else nnx.Param
        g, u = _arrays(grads), _arrays(updates)
        first = g or u
        if not first:
            raise ArgumentTypeError(
                "grads= and updates= hold no jax.Array: expected what nnx.grad or optimizer.update returned."
            )
        slots, params = self._params.read(model, wrt) if isinstance(model, nnx.Pytree) else ((), [])
        known = {slot.parts: (slot, x) for slot, x in zip(slots, params, strict=True)}
        p: list[Any] | None = None
        together = on_one_device(list(first.values()))
        if all(parts in known and known[parts][0].shape == tuple(x.shape) for parts, x in first.items()):
            layout = Layout([known[parts][0] for parts in first], together=together)
            live = [known[parts][1] for parts in first]
            p = live if all(map(_readable, live)) else None
        else:
            layout = Layout(
                [Slot(parts, tuple(x.shape), str(x.dtype)) for parts, x in first.items()], together=together
            )
        rows = [None if not xs or xs.keys() != first.keys() else list(xs.values()) for xs in (g, u)]
        return layout, _measure(layout, rows[0], p, rows[1])


@functools.partial(jax.jit, static_argnums=0)
def _measure(layout: Layout, grads: Any, params: Any, updates: Any) -> jax.Array:
    return layout.measure(grads, params, updates)


def _readable(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and not (isinstance(x, jax.Array) and x.is_deleted())


def _arrays(tree: Any) -> dict[tuple[Any, ...], Any]:
    if tree is None:
        return {}
    if isinstance(tree, nnx.Pytree):
        tree = nnx.state(tree)
    found, _ = jax.tree_util.tree_flatten_with_path(nnx.as_pure(tree))
    return {tuple(key_name(key) for key in keys): x for keys, x in found if isinstance(x, jax.Array)}
