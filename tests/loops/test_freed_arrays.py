"""Arrays of the loop that are freed or donated right after the call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nnx_probes as probes


def loss_of(model, x):
    return jnp.mean((model(x) - 1) ** 2)


@nnx.jit
def step_with_stats(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    updates = optimizer.update(model, grads)
    return loss, probes.step_stats(grads=grads, updates=updates, params=nnx.state(model, nnx.Param))


@nnx.jit(donate_argnums=(0, 1))
def donating_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


def made():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def test_statistics_that_the_loop_frees_after_the_call_are_still_read():
    model, optimizer = made()
    x, seen = jnp.ones((4, 4)), probes.writers.MemoryWriter()
    with probes.Monitor(seen, model=model, optimizer=optimizer, every=3) as monitor:
        for step in range(9):
            loss, stats = step_with_stats(model, optimizer, x)
            monitor(step, loss=loss, metrics=stats)
            for array in jax.tree.leaves(stats):
                array.delete()
    assert monitor.failures == {}
    assert ["grads.norm" in record for record in seen.records] == [True] * 3


def test_tuning_a_step_that_donates_leaves_the_users_model_readable():
    model, optimizer = made()
    before = jnp.copy(model.kernel[...])
    probes.tune(donating_step, model, optimizer, [jnp.ones((4, 4))] * 4, probes=1)
    assert (model.kernel[...] == before).all() and int(optimizer.step[...]) == 0
