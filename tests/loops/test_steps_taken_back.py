"""Loops that take a step back, swap parameters or let a schedule end, on purpose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_probes as probes


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.first(x))))


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def batches(n):
    rng = np.random.default_rng(0)
    for _ in range(n):
        yield {"x": rng.normal(size=(16, 8)).astype(np.float32), "y": rng.integers(0, 3, 16).astype(np.int32)}


@nnx.jit
def plain_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def scaled_step(model, optimizer, batch, scale):
    """Dynamic loss scaling by hand: a step whose gradients overflow is taken back whole."""
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    grads = jax.tree.map(lambda g: g * scale / scale, grads)
    fine = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    before = jax.tree.map(lambda x: x, nnx.state((model, optimizer)))
    optimizer.update(model, grads)
    after = nnx.state((model, optimizer))
    nnx.update((model, optimizer), jax.tree.map(lambda a, b: jnp.where(fine, a, b), after, before))
    return loss


def levels(monitor):
    return {(a.rule, a.level.name) for a in monitor.alerts if a.level > probes.Level.INFO}


@pytest.mark.parametrize("overflows", [3, 12])
def test_overflows_at_the_start_under_loss_scaling_are_no_lost_update(overflows):
    model = Net()
    optimizer = probes.watch(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), model)
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1, total_steps=40) as monitor:
        for step, batch in enumerate(batches(40)):
            scale = jnp.float32(jnp.inf if step < overflows or step == 25 else 1024.0)
            monitor(step, loss=scaled_step(model, optimizer, batch, scale), batch=batch)
    assert levels(monitor) == set()


def test_a_step_that_is_always_taken_back_is_found():
    model = Net()
    optimizer = probes.watch(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), model)
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1) as monitor:
        for step, batch in enumerate(batches(60)):
            monitor(step, loss=scaled_step(model, optimizer, batch, jnp.float32(jnp.inf)), batch=batch)
    assert next(a.step for a in monitor.alerts if a.rule in ("lost_update", "frozen_params")) < 50


@pytest.mark.parametrize("swapped_back", [True, False])
def test_averages_swapped_in_for_the_evaluation_are_no_error(swapped_back):
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    both = nnx.Any(nnx.Param, nnx.BatchStat)
    average = jax.tree.map(jnp.copy, nnx.state(model, both))
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1, total_steps=20) as monitor:
        for step, batch in enumerate(batches(20)):
            monitor(step, loss=plain_step(model, optimizer, batch), batch=batch)
            now = jax.tree.map(jnp.copy, nnx.state(model, both))
            average = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, average, now)
            if step % 10 == 9:
                nnx.update(model, average)
                model.eval()
                score = float(loss_of(model, batch))
                model.train()
                if swapped_back:
                    nnx.update(model, now)
                monitor.on_eval(step, loss=score)
                nnx.update(model, now)
    assert levels(monitor) == set()
    assert ("stale_state" in {a.rule for a in monitor.alerts}) == (not swapped_back)


@pytest.mark.parametrize("schedule", [optax.cosine_decay_schedule(1e-2, 100), optax.linear_schedule(1e-2, 0.0, 100)])
def test_a_frozen_part_and_a_schedule_that_ends_are_no_standstill(schedule):
    model = Net()

    def labels(tree):
        return jax.tree_util.tree_map_with_path(lambda p, _: "f" if "first" in jax.tree_util.keystr(p) else "t", tree)

    parts = {"t": optax.adam(schedule), "f": optax.set_to_zero()}
    optimizer = nnx.Optimizer(model, optax.multi_transform(parts, labels), wrt=nnx.Param)
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1, total_steps=105) as monitor:
        for step, batch in enumerate(batches(105)):
            monitor(step, loss=plain_step(model, optimizer, batch), batch=batch)
    assert levels(monitor) == set()
