"""Arrays of the loop that are freed or donated right after the call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
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


def deleted(model, first=None):
    for leaf in jax.tree.leaves(nnx.as_pure(nnx.state(model)))[:first]:
        leaf.delete()
    return model


def one_deleted(model):
    return deleted(model, 1)


def leaked(model):
    """Its arrays are tracers of a trace that is over."""
    graphdef, state = nnx.split(model)
    found = []
    jax.jit(lambda state: found.append(nnx.merge(graphdef, state)))(state)
    return found[0]


@pytest.mark.parametrize("spoil", [deleted, one_deleted, leaked])
def test_gradients_handed_over_are_measured_although_the_live_parameters_cannot_be_read(spoil):
    model, optimizer = made()
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    model, seen = spoil(model), probes.writers.MemoryWriter()
    with probes.Monitor(seen, every=1, rules=[]) as monitor:
        monitor(0, model=model, optimizer=optimizer, grads=grads, updates=grads)
    (record,) = seen.records
    assert monitor.failures == {}
    assert record.values["grads.max_abs"].tolist() == record.values["updates.max_abs"].tolist() == [1.0] * 2
    assert "updates.absorbed" not in record
