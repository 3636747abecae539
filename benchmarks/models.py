"""The programs that the benchmarks measure, and the train step they share.

The step donates model and optimizer, as a loop that is meant to be fast does. All of it is user code: nothing here knows the
library.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

_BATCHES = 7


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, depth: int) -> None:
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + nnx.relu(layer(x))
        return x


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, depth: int, vocabulary: int) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, width) for _ in range(depth)])
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Embedding(nnx.Module):
    """Nearly all parameters in an input and an output table, as in small language models."""

    def __init__(self, rngs: nnx.Rngs, width: int, vocabulary: int) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.norm(self.embed(tokens)))


@dataclass(frozen=True)
class Program:
    """A model with its data and loss; `seconds` is about what one step takes on two cores."""

    name: str
    build: Callable[[], nnx.Module]
    loss: Callable[[Any, Any], jax.Array]
    batches: Any
    seconds: float

    def feed(self) -> Iterator[Any]:
        """Returns the batches, over and over."""
        return itertools.cycle(self.batches)


def _regression(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - jnp.sin(x)) ** 2)


def _language(model: Any, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def _tokens(shape: tuple[int, int], vocabulary: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(0, vocabulary, size=shape)) for _ in range(_BATCHES)]


def floats(*shape: int) -> list[jax.Array]:
    """Returns batches of normal numbers."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(_BATCHES)]


PROGRAMS = (
    Program("perceptron, 0.8M", lambda: Perceptron(nnx.Rngs(0), 448, 4), _regression, floats(128, 448), 0.005),
    Program(
        "transformer, 10M", lambda: Transformer(nnx.Rngs(0), 344, 6, 2048), _language, _tokens((8, 129), 2048), 0.9
    ),
    Program("two tables, 77M", lambda: Embedding(nnx.Rngs(0), 768, 50257), _language, _tokens((4, 17), 50257), 0.4),
    Program("600 leaves, 1.2M", lambda: Perceptron(nnx.Rngs(0), 64, 300), _regression, floats(256, 64), 0.06),
)


def many_leaves(leaves: int, width: int = 32) -> nnx.Module:
    """Returns a model of so many leaves: kernels and biases of `width`."""
    return Perceptron(nnx.Rngs(0), width, leaves // 2)


def size_of(model: nnx.Module) -> int:
    """Returns the bytes of all parameters."""
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def step_of(loss: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any, Any], jax.Array]:
    """Returns the train step of a user."""

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        return value

    return train_step


def adam(model: nnx.Module) -> nnx.Optimizer:
    """Returns the optimizer of all programs."""
    return nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)
