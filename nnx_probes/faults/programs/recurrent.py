"""A recurrent net that reads a digit row by row."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

from nnx_probes.faults.data import digits, digits_held_out
from nnx_probes.faults.recipe import Batch, Recipe

__all__ = ["Recurrent", "recipe"]


class Recurrent(nnx.Module):
    """A GRU over 8 rows of 8 pixels; the last state is classified."""

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        width: int = 32,
        kernel_init: Any = None,
        recurrent_init: Any = None,
        dtype: Any = None,
        dropout: float = 0.0,
    ) -> None:
        init = kernel_init or nnx.initializers.lecun_normal()
        self.first = nnx.Linear(8, width, rngs=rngs, kernel_init=init, dtype=dtype)
        cell = nnx.GRUCell(
            width,
            width,
            rngs=rngs,
            kernel_init=init,
            recurrent_kernel_init=recurrent_init or nnx.initializers.orthogonal(),
            dtype=dtype,
        )
        self.hidden = nnx.RNN(cell)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.head = nnx.Linear(width, 10, rngs=rngs, kernel_init=init, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float32[n, 64] to logits float32[n, 10]."""
        x = self.hidden(self.first(x.reshape(-1, 8, 8)))[:, -1]
        if self.dropout is not None:
            x = self.dropout(x)
        return self.head(x)


def _apply(model: Any, batch: Batch) -> jax.Array:
    logits: jax.Array = model(batch["input"])
    return logits


def recipe() -> Recipe:
    """Returns the healthy program."""
    return Recipe("recurrent", Recurrent, _apply, digits(), digits_held_out, optax.adam(3e-3))
