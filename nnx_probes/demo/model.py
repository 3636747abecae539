"""A small transformer that predicts the next character."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_probes.demo.text import Batch

__all__ = ["Block", "LanguageModel", "loss_fn"]

# Small enough to compile in seconds and to take 50 steps a second on two CPU cores, large enough to
# have the parts that go wrong in a large one: about 120,000 parameters in 38 leaves.
WIDTH, HEADS, DEPTH, MAX_LENGTH = 64, 4, 2, 64


class Block(nnx.Module):
    """Causal self-attention and an MLP, each behind a LayerNorm and beside a residual path."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        """Makes the layers for vectors of `width` numbers."""
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the vectors after this block, float[batch, length, width] like `x`."""
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class LanguageModel(nnx.Module):
    """Predicts the next character from those before it."""

    def __init__(self, n_tokens: int, *, rngs: nnx.Rngs):
        """Makes the layers for a vocabulary of `n_tokens` characters."""
        self.embed = nnx.Embed(n_tokens, WIDTH, rngs=rngs)
        self.position = nnx.Embed(MAX_LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(WIDTH, rngs=rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, n_tokens, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits, float[batch, length, n_tokens], for `tokens`, int32[batch, length]."""
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_fn(model: LanguageModel, batch: Batch) -> jax.Array:
    """Returns the weighted mean cross-entropy in nats a character, float32[]."""
    logits = model(jnp.asarray(batch["tokens"])).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(batch["weights"] * losses) / jnp.sum(batch["weights"])
