"""Gradients computed anew, for loops in which nothing can be changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from nnx_probes.device.flow import Layout
from nnx_probes.device.leaves import Rest, split_arrays
from nnx_probes.device.reduce import on_one_device
from nnx_probes.device.slots import Params

__all__ = ["Recompute"]


class Recompute:
    """Computes and measures the gradient of `loss_fn`; compiles once a structure of model and batch.

    Args:
      loss_fn: of the model and a batch; returns the loss, or a tuple that begins with it.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = loss_fn
        self._params = Params()
        self._program = jax.jit(self._measure, static_argnums=(0, 1, 2))

    def enqueue(self, model: Any, wrt: Any, batch: Any) -> tuple[Layout, jax.Array]:
        """Queues one forward and backward pass; returns what its words mean, and them. Changes nothing of the model."""
        graphdef, *states = nnx.split(model, wrt, ...)
        params, rest = states
        slots, own = self._params.read(model, wrt)
        layout = Layout(slots, together=on_one_device(own))
        arrays, others = split_arrays(batch)
        words: jax.Array = self._program(graphdef, layout, others, nnx.as_pure(params), nnx.as_pure(rest), arrays)
        return layout, words

    def _measure(
        self, graphdef: Any, layout: Layout, others: Rest, params: Any, rest: Any, arrays: list[Any]
    ) -> jax.Array:
        batch = others.join(arrays)

        def loss(params: Any) -> jax.Array:
            out = self._loss_fn(nnx.merge(graphdef, params, rest), batch)
            value: jax.Array = out[0] if isinstance(out, tuple) else out
            return value

        grads = jax.grad(loss)(params)
        return layout.measure(jax.tree.leaves(grads), jax.tree.leaves(params))
