"""A mixture of experts on digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_probes.faults.data import digits, digits_held_out
from nnx_probes.faults.recipe import Batch, Recipe

__all__ = ["Experts", "recipe"]


class Expert(nnx.Module):
    """One expert."""

    def __init__(self, width: int, kernel_init: Any, dtype: Any, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, width, rngs=rngs, kernel_init=kernel_init, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float32[n, width] to the same shape."""
        return nnx.relu(self.up(x))


class Experts(nnx.Module):
    """A gate sends each example to the two best of its experts, whose weights are stacked."""

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        width: int = 32,
        count: int = 4,
        top: int = 2,
        activation: Callable[[jax.Array], jax.Array] = nnx.relu,
        bias: float = 0.0,
        kernel_init: Any = None,
        dtype: Any = None,
    ) -> None:
        init = kernel_init or nnx.initializers.lecun_normal()
        layer = {"rngs": rngs, "kernel_init": init, "dtype": dtype}
        self.first = nnx.Linear(64, width, bias_init=nnx.initializers.constant(bias), **layer)
        self.gate = nnx.Linear(width, count, **layer)

        @nnx.split_rngs(splits=count)
        @nnx.vmap(in_axes=(0,))
        def make(rngs: nnx.Rngs) -> Expert:
            return Expert(width, init, dtype, rngs)

        self.hidden = make(rngs)
        self.head = nnx.Linear(width, 10, **layer)
        self.activation, self.top = activation, top

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float32[n, 64] to logits float32[n, 10]."""
        x = self.activation(self.first(x))
        scores = self.gate(x)
        least = jax.lax.top_k(scores, self.top)[0][:, -1:]
        shares = jax.nn.softmax(jnp.where(scores >= least, scores, -1e9))

        @nnx.vmap(in_axes=(0, None))
        def run(expert: Expert, x: jax.Array) -> jax.Array:
            return expert(x)

        return self.head(x + jnp.einsum("end,ne->nd", run(self.hidden, x), shares))


def _apply(model: Any, batch: Batch) -> jax.Array:
    logits: jax.Array = model(batch["input"])
    return logits


def recipe() -> Recipe:
    """Returns the healthy program."""
    return Recipe("experts", Experts, _apply, digits(), digits_held_out, optax.adam(3e-3))
