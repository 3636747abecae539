"""Asking the optimizer what it would do: right answers, and nothing of the caller's changes."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from conftest import Net, Run, train_step
from flax import nnx

import nnx_probes as probes
from nnx_probes.device.leaves import Tree
from nnx_probes.device.trial import try_update


def ask(optimizer, model):
    tree = Tree(model)
    tree.read()
    found = try_update(optimizer, model, tree.leaves)
    if found is None:
        return None
    paths = [leaf.path for leaf in tree.leaves]
    by_path = {
        name: dict(zip(paths, found[name].tolist(), strict=True))
        for name in ("params.trial_update", "params.trial_absorbed")
    }
    return (
        by_path["params.trial_update"],
        by_path["params.trial_absorbed"],
        found["trial.later"],
        found["trial.earlier"],
    )


def asked(tx, model=None, steps=0, wrt=nnx.Param):
    model = Net(nnx.Rngs(0)) if model is None else model
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(8, 3)).astype(np.float32)
        train_step(model, optimizer, (x, x[:, :2]))
    return ask(optimizer, model)


NET = ["a.bias", "a.kernel", "b.bias", "b.kernel"]

# --- learning rates and schedules ---------------------------------------------------------------------------


def test_plain_sgd_moves_every_leaf_by_its_learning_rate():
    update, absorbed, later, earlier = asked(optax.sgd(0.25))
    assert update == dict.fromkeys(NET, 0.25) and absorbed == dict.fromkeys(NET, 0.0)
    assert later == earlier == 0.25


@pytest.mark.parametrize("tx", [optax.sgd(0.0), optax.adam(0.0), optax.adamw(0.0), optax.set_to_zero()])
def test_a_learning_rate_of_zero_moves_nothing_at_any_time(tx):
    update, absorbed, later, earlier = asked(tx)
    assert update == absorbed == dict.fromkeys(NET, 0.0) and later == earlier == 0.0


def test_a_schedule_that_ran_out_moved_earlier_and_never_will_again():
    update, _, later, earlier = asked(optax.sgd(optax.linear_schedule(1.0, 0.0, 8)), steps=9)
    assert update == dict.fromkeys(NET, 0.0) and later == 0.0 and earlier == 1.0


def test_a_schedule_that_rests_moves_later():
    resting = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(0.5)], [20])
    update, _, later, earlier = asked(optax.sgd(resting), steps=3)
    assert update == dict.fromkeys(NET, 0.0) and later == 0.5 and earlier == 0.0


def test_a_schedule_that_rests_in_the_middle_moved_earlier_and_moves_later():
    middle = optax.join_schedules([optax.constant_schedule(c) for c in (1.0, 0.0, 0.5)], [2, 9])
    update, _, later, earlier = asked(optax.sgd(middle), steps=4)
    assert update == dict.fromkeys(NET, 0.0) and later == 0.5 and earlier == 1.0


def test_warmup_from_zero_is_zero_now_and_moves_later():
    update, _, later, _ = asked(optax.adam(optax.linear_schedule(0.0, 1e-3, 100)))
    assert update == dict.fromkeys(NET, 0.0) and later > 0


def test_an_injected_learning_rate_of_zero_is_seen():
    update, _, later, _ = asked(optax.inject_hyperparams(optax.sgd)(learning_rate=0.0))
    assert update == dict.fromkeys(NET, 0.0) and later == 0.0
    update, *_ = asked(optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(0.5)), steps=2)
    assert update == dict.fromkeys(NET, 0.5)


@pytest.mark.parametrize("tx", [optax.adam(1e-2), optax.lion(1e-2), optax.adamw(1e-2), optax.rmsprop(1e-2)])
def test_other_optimizers_move_every_leaf(tx):
    update, absorbed, *_ = asked(tx, steps=2)
    assert all(v > 1e-3 for v in update.values()) and not any(absorbed.values())


# --- parts --------------------------------------------------------------------------------------------------


def test_a_part_set_to_zero_is_told_apart():
    def label(params):
        return jax.tree.map_with_path(lambda path, _: "off" if path[0].key == "b" else "on", params)

    update, *_ = asked(optax.partition({"on": optax.sgd(0.5), "off": optax.set_to_zero()}, label))
    assert update == {"a.bias": 0.5, "a.kernel": 0.5, "b.bias": 0.0, "b.kernel": 0.0}


def test_what_wrt_leaves_out_is_nan():
    update, absorbed, *_ = asked(optax.sgd(0.5), wrt=nnx.All(nnx.Param, nnx.PathContains("a")))
    assert (update["a.bias"], update["a.kernel"]) == (0.5, 0.5)
    assert np.isnan([update["b.bias"], update["b.kernel"], absorbed["b.bias"]]).all()


def test_each_answer_stands_at_its_own_leaf_with_more_than_ten_layers_and_tied_weights():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Param(jnp.ones(1)) for _ in range(12)])
            self.zz = nnx.Linear(2, 2, rngs=rngs)
            self.aa = nnx.Linear(2, 2, rngs=rngs)
            self.zz.kernel = self.aa.kernel
            self.stat = nnx.BatchStat(jnp.ones(1))

    model = Deep(nnx.Rngs(0))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    rate = {path: float(i + 1) for i, path in enumerate(paths)}

    def scale(updates, state, params=None):
        flat = [(path, u * rate[tuple(path)]) for path, u in nnx.to_flat_state(updates)]
        return nnx.from_flat_state(flat), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), scale)
    update, *_ = asked(tx, model)
    assert np.isnan(update.pop("stat"))
    assert update == {".".join(map(str, path)): value for path, value in rate.items()}


def test_a_leaf_without_elements_is_zero():
    class Empty(nnx.Module):
        def __init__(self):
            self.none, self.one = nnx.Param(jnp.zeros((0, 3))), nnx.Param(jnp.ones(1))

    update, absorbed, *_ = asked(optax.sgd(0.5), Empty())
    assert update == {"none": 0.0, "one": 0.5} and absorbed == {"none": 0.0, "one": 0.0}


# --- rounding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-1, 1e-2, 3e-3, 1e-3, 1e-5])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_share_that_rounding_absorbs_is_exact(dtype, rate):
    class Half(nnx.Module):
        def __init__(self):
            values = np.random.default_rng(0).normal(size=(64, 32)) * 10.0 ** np.random.default_rng(1).integers(
                -3, 3, (64, 32)
            )
            self.w = nnx.Param(jnp.asarray(values, dtype))

    model = Half()
    p = np.asarray(model.w[...])
    host = {jnp.bfloat16: ml_dtypes.bfloat16, jnp.float16: np.float16}[dtype]
    u = host(-rate)  # what sgd makes of ones, in the parameters' dtype
    exact = np.mean(((p.astype(np.float64) + np.float64(u)).astype(np.float32).astype(host) == p) & (u != 0))
    update, absorbed, *_ = asked(optax.sgd(rate), model)
    assert update["w"] == abs(float(u)) and absorbed["w"] == np.float32(exact) and (rate != 1e-3 or 0 < exact < 1)
    eager = jax.tree.leaves(optax.apply_updates(model.w[...], jnp.full_like(model.w[...], u)))[0]
    assert exact == np.mean(np.asarray(eager) == p)  # the reference is what the user's own step does


def test_updates_lost_to_bfloat16_are_told_as_such_by_a_monitor():
    class Half(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((4, 4), jnp.bfloat16))

    model = Half()
    optimizer = nnx.Optimizer(model, optax.sgd(1e-5), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m.w[...]).astype(jnp.float32))(model))

    with probes.Monitor(None, model=model, optimizer=optimizer, every=1) as monitor:
        for i in range(8):
            step(model, optimizer)
            monitor(i)
    assert [(a.rule, a.causes[0].slug) for a in monitor.alerts] == [("frozen_params", "absorbed_by_dtype")]
    assert monitor.failures == {}


# --- what cannot be asked -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.adam(1e-3), 4),
        optax.chain(optax.clip_by_global_norm(1.0), optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation()),
    ],
)
def test_accumulated_steps_give_no_answer(tx):
    assert asked(tx) is None


@pytest.mark.parametrize("optimizer", [None, optax.adam(1e-3), {"mu": jnp.ones(2)}])
def test_what_is_no_nnx_optimizer_gives_no_answer(optimizer):
    assert ask(optimizer, Net(nnx.Rngs(0))) is None


def test_a_filter_that_selects_nothing_gives_no_answer():
    assert asked(optax.sgd(0.1), wrt=nnx.LoRAParam) is None


def needs_value():
    def update(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda u: u * value, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def test_an_optimizer_that_needs_more_arguments_spoils_no_run(caplog):
    run = Run(tx=needs_value())
    with (
        probes.Monitor(None, model=run.model, optimizer=run.optimizer, every=1) as monitor,
        caplog.at_level(logging.WARNING),
    ):
        for step in range(8):
            monitor(step, loss=1.0)  # nothing moves, so it is asked
    assert [a.rule for a in monitor.alerts] == ["frozen_params"]
    assert set(monitor.failures) <= {"OptimizerProbe.explain"} and len(caplog.records) <= 1


# --- nothing changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-2),
        optax.sgd(optax.linear_schedule(1.0, 0.0, 4)),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    ],
    ids=["adamw", "schedule", "injected"],
)
def test_the_callers_objects_stay_bit_identical(tx):
    run = Run(tx=tx)
    for _ in range(3):
        run.step()

    def everything():
        variables = jax.tree.leaves((run.model, run.optimizer), is_leaf=lambda x: isinstance(x, nnx.Variable))
        return (
            [id(v) for v in variables],
            [id(v.get_raw_value()) for v in variables],
            probes.fingerprint((run.model, run.optimizer)),
            jax.tree.structure((run.model, run.optimizer)),
        )

    before = everything()
    assert ask(run.optimizer, run.model) is not None
    assert everything() == before
    batch = run.batch()
    twin = Run(tx=tx)
    for _ in range(3):
        twin.step()
    twin.batch()
    assert float(run.step(batch)) == float(twin.step(batch))
