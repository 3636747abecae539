"""A multilayer perceptron on digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from nnx_probes.faults.data import digits, digits_held_out
from nnx_probes.faults.recipe import Batch, Recipe

__all__ = ["Dense", "recipe"]


class Dense(nnx.Module):
    """64 pixels, `depth` hidden layers, 10 classes."""

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        depth: int = 2,
        width: int = 48,
        activation: Callable[[jax.Array], jax.Array] = nnx.relu,
        bias: float = 0.0,
        kernel_init: Any = None,
        dtype: Any = None,
        dropout: float = 0.0,
        residual: bool = False,
    ) -> None:
        init = kernel_init or nnx.initializers.lecun_normal()
        layer = {"rngs": rngs, "kernel_init": init, "dtype": dtype}
        self.first = nnx.Linear(64, width, bias_init=nnx.initializers.constant(bias), **layer)
        self.hidden = nnx.List([nnx.Linear(width, width, **layer) for _ in range(depth - 1)])
        self.head = nnx.Linear(width, 10, **layer)
        self.activation = activation
        self.residual = residual
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float32[n, 64] to logits float32[n, 10]."""
        x = self.activation(self.first(x))
        for layer in self.hidden:
            y = self.activation(layer(x))
            x = x + y if self.residual else y
        if self.dropout is not None:
            x = self.dropout(x)
        return self.head(x)


def _apply(model: Any, batch: Batch) -> jax.Array:
    logits: jax.Array = model(batch["input"])
    return logits


def recipe() -> Recipe:
    """Returns the healthy program."""
    return Recipe("mlp", Dense, _apply, digits(), digits_held_out, optax.adam(3e-3))
