"""A watched optimizer's numbers, bit for bit, for layers whose gradients XLA likes to reshape on their way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import compiled_once, nothing_fails_inside  # noqa: F401

import nnx_probes as probes

WIDTH = 8


class Layered(nnx.Module):
    """One layer of a kind, and a head of `outputs`."""

    def __init__(self, layer, outputs):
        rngs = nnx.Rngs(0)
        self.layer = layer(rngs)
        self.head = nnx.Linear(WIDTH, outputs, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + jnp.tanh(self.layer(x).reshape(x.shape))
        return self.head(self.dropout(x)).mean(1)


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.b = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.b.kernel = self.a.kernel

    def __call__(self, x):
        return self.b(nnx.tanh(self.a(x)))


class Narrow(nnx.Module):
    """To one feature and back."""

    def __init__(self, rngs):
        self.down = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((WIDTH,)))

    def __call__(self, x):
        return x * self.scale + self.down(x)


LAYERS = {
    "linear": lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
    "batch-norm": lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs),
    "group-norm": lambda rngs: nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs),
    "attention": lambda rngs: nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=False, rngs=rngs),
    "general": lambda rngs: nnx.LinearGeneral(WIDTH, (2, WIDTH // 2), rngs=rngs),
    "recurrent": lambda rngs: nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)),
    "tied": Tied,
    "narrow": Narrow,
}
TRANSFORMS = {
    "adam": lambda: optax.adam(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: optax.lion(1e-3),
}
CASES = [
    ("linear", "adam", 1, "armed"),
    ("batch-norm", "adam", 3, "armed"),
    ("batch-norm", "lamb", 1, "inside"),
    ("group-norm", "lion", 1, "inside"),
    ("attention", "adam", 3, "armed"),
    ("general", "adam", 1, "inside"),
    ("recurrent", "adam", 1, "armed"),
    ("tied", "adam", 3, "armed"),
    ("narrow", "adam", 3, "inside"),
]


def bits(of):
    state = nnx.state(of, nnx.Not(nnx.Any(probes.ProbeState, nnx.RngState)))
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(nnx.as_pure(state))]


def run(layer, transform, outputs, when):
    """Trains 16 steps; returns the bits of each loss, and of model and optimizer after it; and the steps measured."""
    model = Layered(LAYERS[layer], outputs)
    optimizer = nnx.Optimizer(model, TRANSFORMS[transform](), wrt=nnx.Param)
    if when is not None:
        optimizer = probes.watch(optimizer, model, when=when)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    random, found, writer = np.random.default_rng(0), [], probes.writers.MemoryWriter()
    every = 1 if when == "inside" else 3
    with probes.Monitor(writer if when else None, model=model, optimizer=optimizer, every=every) as monitor:
        for i in range(16):
            x = random.normal(size=(6, 4, WIDTH)).astype(np.float32)
            y = random.normal(size=(6, outputs)).astype(np.float32)
            loss = step(model, optimizer, x, y)
            if when is not None:
                monitor(i, loss=loss)
            found.append((np.asarray(loss).tobytes(), *bits(model), *bits(optimizer)))
    return found, [record.step for record in writer.records if "updates.norm" in record.values]


@pytest.mark.parametrize(("layer", "transform", "outputs", "when"), CASES)
def test_every_bit_is_the_same(layer, transform, outputs, when):
    plain, _ = run(layer, transform, outputs, None)
    watched, measured = run(layer, transform, outputs, when)
    assert len(measured) >= 4
    assert watched == plain
