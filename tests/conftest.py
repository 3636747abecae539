"""Small models shared by the tests: jax's compilations are most of their time."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.b = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def mse(model, batch):
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(mse)(model, batch)
    optimizer.update(model, grads)
    return loss


class Run:
    """A tiny training run: model, optimizer, step and batches, all seeded."""

    def __init__(self, tx=None, wrt=nnx.Param):
        self.model = Net(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, tx or optax.adam(1e-2), wrt=wrt)
        self.rng = np.random.default_rng(0)

    def batch(self):
        x = self.rng.normal(size=(8, 3)).astype(np.float32)
        return x, x[:, :2]

    def step(self, batch=None):
        return train_step(self.model, self.optimizer, self.batch() if batch is None else batch)


@pytest.fixture
def training():
    return Run()
