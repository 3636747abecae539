"""A character-level transformer on the demo's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_probes.faults.data import text, text_held_out, vocabulary
from nnx_probes.faults.recipe import Batch, Recipe

__all__ = ["Transformer", "recipe"]

_LENGTH = 24


class Block(nnx.Module):
    """Attention and a feed-forward part, each behind a LayerNorm and beside a residual connection."""

    def __init__(
        self, width: int, *, rngs: nnx.Rngs, activation: Callable[..., Any], kernel_init: Any, dtype: Any
    ) -> None:
        layer = {"rngs": rngs, "kernel_init": kernel_init, "dtype": dtype}
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, **layer)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, **layer)
        self.down = nnx.Linear(2 * width, width, **layer)
        self.activation = activation

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps float32[n, length, width] to the same shape."""
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """A causal language model."""

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        depth: int = 1,
        width: int = 32,
        activation: Callable[[jax.Array], jax.Array] = nnx.gelu,
        kernel_init: Any = None,
        dtype: Any = None,
        tied: bool = False,
    ) -> None:
        init = kernel_init or nnx.initializers.lecun_normal()
        self.first = nnx.Embed(vocabulary(), width, rngs=rngs)
        self.position = nnx.Embed(_LENGTH, width, rngs=rngs)
        self.hidden = nnx.List(
            [Block(width, rngs=rngs, activation=activation, kernel_init=init, dtype=dtype) for _ in range(depth)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = None if tied else nnx.Linear(width, vocabulary(), rngs=rngs, kernel_init=init, dtype=dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int32[n, length] to logits float32[n, length, vocabulary]."""
        x = self.first(tokens) + self.position(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.hidden:
            x = block(x, mask)
        x = self.norm(x)
        return self.first.attend(x) if self.head is None else self.head(x)


def _apply(model: Any, batch: Batch) -> jax.Array:
    logits: jax.Array = model(batch["input"])
    return logits


def recipe() -> Recipe:
    """Returns the healthy program."""
    return Recipe("transformer", Transformer, _apply, text(length=_LENGTH), text_held_out, optax.adamw(3e-3))
