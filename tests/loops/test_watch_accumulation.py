"""Watched optimizers of which not every step makes an update that moves the parameters."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import batch, build, compiled_once, jitted, nothing_fails_inside, train  # noqa: F401

import nnx_probes as probes

BATCHES = [batch(seed) for seed in range(8)]
WHEN = pytest.mark.parametrize("when", ["armed", "inside"])


def params(model):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param)))])


def follow(step, model, optimizer, *, steps, every, by=1):
    """Runs ``step(i)`` under a monitor.

    Returns the records with updates, how far each step really moved the parameters, and the steps after which a
    `ProbeState` hung on the optimizer.
    """
    writer, moves, hung = probes.writers.MemoryWriter(), {}, []
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=every) as monitor:
        for i in range(0, steps * by, by):
            before = params(model)
            loss = step(i // by)
            moves[i] = float(np.linalg.norm(params(model) - before))
            monitor(i, loss=loss)
            if "probe_state" in vars(optimizer):
                hung.append(i)
    assert monitor.failures == {}
    records = [r for r in writer.records if "updates.norm" in r]
    return SimpleNamespace(records=records, moves=moves, hung=hung, alerts=monitor.alerts)


def total(record):
    return float(np.linalg.norm(record.values["updates.norm"]))


def last_move(found, step):
    return max((i for i in found.moves if i <= step and found.moves[i]), default=None)


@WHEN
@pytest.mark.parametrize("k, every, by", [(2, 10, 1), (4, 6, 1), (4, 12, 3), (3, 1, 1)])
def test_under_multi_steps_the_last_update_that_moved_is_the_one_measured(when, k, every, by):
    model, optimizer = build(optax.MultiSteps(optax.adam(1e-2), k))
    optimizer = probes.watch(optimizer, model, when=when)
    traces = 0

    @nnx.jit
    def step(model, optimizer, data):
        nonlocal traces
        traces += 1
        return train(model, optimizer, data)

    found = follow(lambda i: step(model, optimizer, BATCHES[i % 8]), model, optimizer, steps=50, every=every, by=by)
    late = [r for r in found.records if r.step >= 2 * max(every, k * by)]
    assert len(late) >= 2 and found.alerts == ()
    if every % (k * by) and when == "inside":  # the branch in the step looks at every update in turn
        late = [r for r in late if total(r)]
    for record in late if every > 1 else []:
        expected = last_move(found, record.step)
        assert total(record) == pytest.approx(found.moves[expected], rel=1e-3)
        assert record.values["grads.age"] == (record.step - expected) // by
    assert traces == (2 if when == "armed" else 1)
    if when == "armed" and every > k:
        assert len(found.hung) <= len(found.records) + 1


def test_an_update_that_multi_steps_skipped_moves_the_turn_and_it_is_found_again():
    model, optimizer = build(optax.MultiSteps(optax.sgd(1e-2), 4, should_skip_update_fn=optax.skip_not_finite))
    optimizer = probes.watch(optimizer, model)
    bad = (jnp.full_like(BATCHES[0][0], jnp.nan), BATCHES[0][1])
    found = follow(
        lambda i: jitted(model, optimizer, bad if i == 21 else BATCHES[i % 8]), model, optimizer, steps=120, every=8
    )
    assert all(total(r) > 0 for r in found.records if 8 < r.step < 21)
    assert [total(r) > 0 for r in found.records][-4:] == [True] * 4


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("k, every", [(4, 10), (2, 10), (5, 4)])
def test_a_loop_that_gathers_gradients_itself_is_measured_at_the_next_update(k, every, compiled):
    model, optimizer = build(optax.sgd(0.1))
    optimizer = probes.watch(optimizer, model)
    kept, means = [], []

    @nnx.jit
    def gradients(model, data):
        return nnx.value_and_grad(lambda m: jnp.mean((m(data[0]) - data[1]) ** 2))(model)

    def apply(model, optimizer, grads):
        optimizer.update(model, grads)

    apply = nnx.jit(apply) if compiled else apply

    def step(i):
        loss, grads = gradients(model, BATCHES[i % 8])
        kept.append(grads)
        if len(kept) == k:
            mean = jax.tree.map(lambda *g: sum(g) / k, *kept)
            means.append(float(optax.tree.norm(mean)))
            apply(model, optimizer, mean)
            kept.clear()
        return loss

    found = follow(step, model, optimizer, steps=80, every=every)
    assert len(found.records) >= 3 and found.alerts == ()
    for record in found.records:
        norm = float(np.linalg.norm(record.values["grads.norm"]))
        assert any(norm == pytest.approx(mean, rel=1e-4) for mean in means)
        assert total(record) == pytest.approx(0.1 * norm, rel=1e-4)
    if not compiled:
        assert not found.hung and not optimizer.evidence.wanted
        return
    written = {i + 1 for i in found.hung} & {i for i in range(80) if i % k == k - 1}
    assert written and not written & set(found.hung), "it is taken off as soon as it is written"


def test_an_update_method_that_is_compiled_itself_is_compiled_twice():
    traces = 0

    class Compiled(nnx.Optimizer):
        @nnx.jit
        def update(self, model, grads):
            nonlocal traces
            traces += 1
            super().update(model, grads)

    model, _ = build()
    optimizer = probes.watch(Compiled(model, optax.adam(1e-2), wrt=nnx.Param), model)
    writer = probes.writers.MemoryWriter()
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=3) as monitor:
        for i in range(20):
            monitor(i, loss=train(model, optimizer, BATCHES[i % 8]))
    assert traces == 2 and monitor.failures == {}
    assert [r.step for r in writer.records if "grads.norm" in r] == list(range(3, 20, 3))
