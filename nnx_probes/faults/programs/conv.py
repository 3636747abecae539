"""A convolution net with BatchNorm and Dropout on digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from nnx_probes.faults.data import digits, digits_held_out
from nnx_probes.faults.recipe import Batch, Recipe

__all__ = ["Conv", "recipe"]


class Conv(nnx.Module):
    """Two convolutions, each with BatchNorm, then a mean over the picture."""

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        activation: Callable[[jax.Array], jax.Array] = nnx.relu,
        bias: float = 0.0,
        kernel_init: Any = None,
        dtype: Any = None,
        dropout: float = 0.1,
        momentum: float = 0.9,
        norm: bool = True,
    ) -> None:
        init = kernel_init or nnx.initializers.lecun_normal()
        layer = {"rngs": rngs, "kernel_init": init, "dtype": dtype}
        self.first = nnx.Conv(1, 8, (3, 3), bias_init=nnx.initializers.constant(bias), **layer)
        self.norm1 = nnx.BatchNorm(8, momentum=momentum, rngs=rngs) if norm else None
        self.hidden = nnx.Conv(8, 24, (3, 3), strides=2, **layer)
        self.norm2 = nnx.BatchNorm(24, momentum=momentum, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(24 * 16, 10, **layer)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float32[n, 64] to logits float32[n, 10]."""
        x = self.first(x.reshape(-1, 8, 8, 1))
        x = self.activation(x if self.norm1 is None else self.norm1(x))
        x = self.hidden(x)
        x = self.activation(x if self.norm2 is None else self.norm2(x))
        return self.head(self.dropout(x.reshape(len(x), -1)))


def _apply(model: Any, batch: Batch) -> jax.Array:
    logits: jax.Array = model(batch["input"])
    return logits


def recipe() -> Recipe:
    """Returns the healthy program."""
    return Recipe("conv", Conv, _apply, digits(), digits_held_out, optax.adamw(3e-3))
