"""A run under a monitor computes what it computes without one: the same bits."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from rig import batch, build, compiled_once, mse, nothing_fails_inside, train  # noqa: F401

import nnx_probes as probes

STEPS = 20
BATCHES = [batch(seed) for seed in range(STEPS)]

TRANSFORMS = {
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "multi-steps": lambda: optax.MultiSteps(optax.adam(1e-2), 4),
    "apply-if-finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
}


@nnx.jit
def spoiled(model, optimizer, data):
    """The gradient of every fifth batch or so is not finite, and is skipped."""
    loss, grads = nnx.value_and_grad(mse)(model, data)
    bad = data[0][0, 0] > 0.9
    optimizer.update(model, jax.tree.map(lambda g: jax.numpy.where(bad, jax.numpy.inf, g), grads))
    return loss


FORMS = {
    "eager": lambda: train,
    "jit": lambda: nnx.jit(train),
    "donated": lambda: nnx.jit(train, donate_argnums=(0, 1)),
    "skipping": lambda: spoiled,
}

MONITORS = {
    "plain": dict(watch=False, sync=False),
    "sync": dict(watch=False, sync=True),
    "watch": dict(watch=True, sync=False),
    "watch-sync": dict(watch=True, sync=True),
}


def bits(tree):
    """Returns the bytes of every leaf by its path."""
    found, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(tree)))
    return {jax.tree_util.keystr(path): (str(x.dtype), x.shape, np.asarray(x).tobytes()) for path, x in found}


def run(transform, form, monitor=None):
    """Trains for 20 steps; returns the bits of losses, parameters and optimizer state."""
    model, optimizer = build(TRANSFORMS[transform]())
    step = FORMS[form]()
    losses = []
    if monitor is None:
        losses = [step(model, optimizer, data) for data in BATCHES]
    else:
        if monitor["watch"]:
            optimizer = probes.watch(optimizer, model)
        with probes.Monitor(None, model=model, optimizer=optimizer, every=1, sync=monitor["sync"]) as hook:
            for i, data in enumerate(BATCHES):
                losses.append(step(model, optimizer, data))
                assert hook(i, loss=losses[-1], batch=data, metrics={"loss": losses[-1]})
        assert hook.failures == {} and all(a.level == probes.Level.INFO for a in hook.alerts)
    return [np.asarray(x).tobytes() for x in losses], bits(model), bits(optimizer)


@functools.cache
def alone(transform, form):
    return run(transform, form)


CASES = [(form, monitor) for form in ("jit", "donated") for monitor in MONITORS]
CASES += [("eager", "plain"), ("eager", "watch-sync")]


@pytest.mark.parametrize(("form", "monitor"), CASES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_losses_parameters_and_optimizer_state_are_the_same_bits(transform, form, monitor):
    losses, params, state = run(transform, form, MONITORS[monitor])
    expected_losses, expected_params, expected_state = alone(transform, form)
    assert losses == expected_losses
    assert params == expected_params
    assert state == expected_state


@pytest.mark.parametrize("monitor", MONITORS)
def test_steps_that_are_skipped_are_the_same_bits(monitor):
    losses, params, state = run("apply-if-finite", "skipping", MONITORS[monitor])
    assert (losses, params, state) == alone("apply-if-finite", "skipping")
    skipped = np.frombuffer(state["['opt_state']['total_notfinite']"][2], np.int32)[0]
    assert 1 <= skipped < STEPS / 2


def test_the_comparison_would_see_a_single_bit():
    model, _ = build()
    before = bits(model)
    kernel = np.asarray(model.a.kernel[...])
    kernel = kernel.copy()
    kernel.view(np.uint32)[0, 0] ^= 1
    model.a.kernel[...] = jax.numpy.asarray(kernel)
    assert bits(model) != before and bits(model).keys() == before.keys()
