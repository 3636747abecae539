"""What can be read off an optax transformation without running it."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from nnx_probes.device.chain import accumulation, clip_norm, skip_limit

MASK = {"a": True, "b": False}


def clip(limit=1.5):
    return optax.clip_by_global_norm(limit)


def skip(inner=None, limit=7):
    return optax.apply_if_finite(inner or optax.adam(1e-3), limit)


def wrappers():
    """Name -> a transformation around another that leaves nothing out."""
    return {
        "alone": lambda tx: tx,
        "first in a chain": lambda tx: optax.chain(tx, optax.adam(1e-3)),
        "last in a chain": lambda tx: optax.chain(optax.adam(1e-3), optax.scale(0.5), tx),
        "chain in a chain": lambda tx: optax.chain(optax.scale(2.0), optax.chain(optax.scale(0.5), optax.chain(tx))),
        "named_chain": lambda tx: optax.named_chain(("one", optax.scale(2.0)), ("two", tx)),
        "MultiSteps": lambda tx: optax.MultiSteps(tx, 4),
        "MultiSteps as a transformation": lambda tx: optax.MultiSteps(tx, 4).gradient_transformation(),
        "MultiSteps by a schedule": lambda tx: optax.MultiSteps(tx, lambda step: step + 1),
        "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 7),
        "chain in MultiSteps in apply_if_finite": lambda tx: optax.apply_if_finite(
            optax.MultiSteps(optax.chain(tx, optax.adam(1e-3)), 2).gradient_transformation(), 7
        ),
        "beside inject_hyperparams": lambda tx: optax.chain(
            tx, optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1.0, 0.0, 9))
        ),
        "with_extra_args_support": optax.with_extra_args_support,
        "flatten": optax.flatten,
        "lookahead": lambda tx: optax.lookahead(tx, sync_period=5, slow_step_size=0.5),
        "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
        "compiled": lambda tx: optax.GradientTransformation(tx.init, jax.jit(tx.update)),
    }


@pytest.mark.parametrize("name", wrappers())
def test_the_clipping_norm_is_found(name):
    assert clip_norm(wrappers()[name](clip())) == 1.5


@pytest.mark.parametrize("name", [n for n in wrappers() if "apply_if_finite" not in n])
def test_the_limit_of_skipped_updates_is_found(name):
    assert skip_limit(wrappers()[name](skip())) == 7


def partitions():
    """Name -> a transformation of a part of the parameters."""
    return {
        "masked": lambda tx: optax.masked(tx, MASK),
        "masked by a function": lambda tx: optax.masked(tx, lambda params: MASK),
        "masked in a chain": lambda tx: optax.chain(optax.masked(tx, MASK), optax.adam(1e-3)),
        "masked in MultiSteps": lambda tx: optax.MultiSteps(optax.masked(tx, MASK), 2),
        "multi_transform": lambda tx: optax.multi_transform({True: tx, False: optax.adam(1e-3)}, MASK),
        "partition": lambda tx: optax.partition({True: optax.chain(tx, optax.adam(1e-3)), False: tx}, MASK),
    }


@pytest.mark.parametrize("name", partitions())
def test_what_is_done_to_a_part_of_the_parameters_is_passed_over(name):
    assert clip_norm(partitions()[name](clip())) is None
    assert skip_limit(partitions()[name](skip())) is None


@pytest.mark.parametrize("name", partitions())
def test_what_is_done_to_all_is_found_beside_what_is_done_to_a_part(name):
    assert clip_norm(optax.chain(partitions()[name](clip(0.5)), clip(2.0))) == 2.0


def transformations_of_another_kind():
    return [
        optax.adam(1e-3),
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 100)),
        optax.chain(optax.clip(1.0), optax.adam(1e-3)),
        optax.clip_by_block_rms(1.0),
        optax.adaptive_grad_clip(0.1),
        optax.identity(),
        optax.MultiSteps(optax.adam(1e-3), 4),
        None,
        object(),
        3,
    ]


@pytest.mark.parametrize("tx", transformations_of_another_kind())
def test_other_transformations_have_neither(tx):
    assert clip_norm(tx) is None and skip_limit(tx) is None


def test_the_smallest_of_several_norms_counts():
    assert clip_norm(optax.chain(clip(3.0), optax.adam(1e-3), clip(0.5), clip(2.0))) == 0.5


@pytest.mark.parametrize("limit", [2, jnp.float32(2), jnp.asarray(2.0)])
def test_the_norm_may_be_an_array(limit):
    found = clip_norm(clip(limit))
    assert found == 2 and isinstance(found, float)


def test_both_are_found_in_the_optimizer_of_a_model():
    tx = skip(optax.chain(clip(), optax.adam(1e-3)))
    optimizer = nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    assert (clip_norm(optimizer.tx), skip_limit(optimizer.tx)) == (1.5, 7)


def test_what_inject_hyperparams_makes_anew_on_every_update_is_not_found():
    assert clip_norm(optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=1.5)) is None
    inside = optax.inject_hyperparams(lambda rate: optax.chain(clip(), optax.adam(rate)))
    assert clip_norm(inside(rate=0.1)) is None


def test_a_norm_that_is_traced_is_no_number():
    found = []

    @jax.jit
    def traced(limit):
        found.append(clip_norm(clip(limit)))
        return limit

    traced(1.0)
    assert found == [None]


def test_a_transformation_that_contains_itself_is_read_once():
    inner = []
    tx = optax.GradientTransformation(lambda params: inner, lambda updates, state, params=None: (inner, updates))
    inner += [tx, clip()]
    assert clip_norm(tx) == 1.5


def test_the_names_that_are_looked_for_are_those_in_optax():
    assert "max_norm" in inspect.signature(optax.clip_by_global_norm).parameters
    assert "max_consecutive_errors" in inspect.signature(optax.apply_if_finite).parameters


def test_the_norm_is_found_in_a_chain_of_six_chains():
    tx = clip()
    for _ in range(6):
        tx = optax.chain(optax.scale(1.0), tx)
    assert clip_norm(tx) == 1.5


def test_a_function_of_the_users_whose_name_ends_like_one_of_optax_is_looked_through():
    def make_unmasked(inner):
        def update(updates, state, params=None):
            return inner.update(updates, state, params)

        return optax.GradientTransformation(inner.init, update)

    assert clip_norm(make_unmasked(clip())) == 1.5


@pytest.mark.parametrize(
    ("tx", "k"),
    [
        (optax.adam(1e-3), None),
        (optax.MultiSteps(optax.adam(1e-3), 4), 4),
        (optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(), 4),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation()), 3),
        (optax.apply_if_finite(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), 5), 2),
        (optax.MultiSteps(optax.adam(1e-3), lambda step: 4), None),
    ],
)
def test_over_how_many_mini_steps_an_update_is_gathered(tx, k):
    assert accumulation(tx) == k
