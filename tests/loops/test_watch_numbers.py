"""A watched optimizer computes what an unwatched one computes, bit for bit, and costs one more trace of the step."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import batch, compiled_once, mse, nothing_fails_inside  # noqa: F401

import nnx_probes as probes

STEPS = 60
EVERY = 10
BATCHES = [batch(seed) for seed in range(STEPS)]
SPOILED = [(x, y.at[0, 0].set(jnp.inf)) if i % 7 == 3 or i % 20 == 0 else (x, y) for i, (x, y) in enumerate(BATCHES)]
"""Some of them on steps that are measured."""


def kernels_apart(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" if "kernel" in str(path) else "rest", params)


TRANSFORMS = {
    "sgd-momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2)),
    "multi-steps": lambda: optax.MultiSteps(optax.adam(1e-2), 4),
    "apply-if-finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(
        learning_rate=optax.linear_schedule(0.1, 1e-2, 50), momentum=0.9
    ),
    "multi-transform": lambda: optax.multi_transform(
        {"kernel": optax.adam(1e-2), "rest": optax.sgd(0.1)}, kernels_apart
    ),
    "muon": lambda: optax.contrib.muon(1e-2),
    "lion": lambda: optax.lion(1e-3),
}
FORMS = {
    "graph": {},
    "graph-donated": {"donate_argnums": (0, 1)},
    "tree": {"graph": False},
    "tree-donated": {"graph": False, "donate_argnums": (0, 1)},
    "no-graph-updates": {"graph": True, "graph_updates": False},
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Small(nnx.Module):
    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(3, 4, rngs=rngs, param_dtype=dtype)
        self.b = nnx.Linear(4, 2, use_bias=False, rngs=rngs, param_dtype=dtype)

    def __call__(self, x):
        return self.b(nnx.tanh(self.a(x)))


def bits(tree):
    """Returns dtype, shape and bytes of every leaf by its path, without what `watch` adds."""
    pure = nnx.as_pure(nnx.state(tree, nnx.Not(probes.ProbeState)))
    found, _ = jax.tree_util.tree_flatten_with_path(pure)
    return {jax.tree_util.keystr(path): (str(x.dtype), x.shape, np.asarray(x).tobytes()) for path, x in found}


@contextlib.contextmanager
def mode(form):
    """Flax's mode in which the whole program runs."""
    with contextlib.ExitStack() as stack:
        if form.startswith("tree"):
            stack.enter_context(nnx.set_graph_mode(False))
        if not form.startswith("graph"):
            stack.enter_context(nnx.set_graph_updates(False))
        yield


def run(transform, dtype, form, when=None):
    """Trains for 60 steps; returns (bits of losses, parameters and optimizer state; traces; counts measured)."""
    with mode(form):
        model = Small(DTYPES[dtype])
        optimizer = nnx.Optimizer(model, TRANSFORMS[transform](), wrt=nnx.Param)
        traces = []

        @nnx.jit(**FORMS[form])
        def step(model, optimizer, data):
            traces.append(1)
            loss, grads = nnx.value_and_grad(mse)(model, data)
            optimizer.update(model, grads)
            return loss

        data = SPOILED if transform == "apply-if-finite" else BATCHES
        writer = probes.writers.MemoryWriter()
        if when is None:
            losses = [step(model, optimizer, one) for one in data]
        else:
            optimizer = probes.watch(optimizer, model, when=when)
            losses = []
            with probes.Monitor(writer, model=model, optimizer=optimizer, every=EVERY) as monitor:
                for i, one in enumerate(data):
                    losses.append(step(model, optimizer, one))
                    monitor(i, loss=losses[-1])
            assert monitor.failures == {}
        found = ([np.asarray(loss).tobytes() for loss in losses], bits(model), bits(optimizer))
        return found, len(traces), [r.step for r in writer.records if "grads.norm" in r and "updates.norm" in r]


@functools.cache
def alone(transform, dtype, form):
    found, traces, _ = run(transform, dtype, form)
    assert traces == 1
    return found


def paired():
    """Every transformation in every form and in both dtypes, and every form in both dtypes."""
    for t, transform in enumerate(TRANSFORMS):
        for form in FORMS:
            yield transform, list(DTYPES)[(t + (form in ("graph", "tree-donated"))) % 2], form


@pytest.mark.parametrize(("transform", "dtype", "form"), list(paired()))
def test_armed_steps_leave_the_same_bits_and_are_traced_twice(transform, dtype, form):
    found, traces, measured = run(transform, dtype, form, "armed")
    assert found == alone(transform, dtype, form)
    assert traces == 2
    assert measured == list(range(EVERY, STEPS, EVERY))  # the first due step shows how the loop is compiled


@pytest.mark.parametrize(("form", "dtype"), [("graph", "bfloat16"), ("tree", "float32"), ("tree-donated", "bfloat16")])
@pytest.mark.parametrize("transform", ["adamw", "apply-if-finite", "multi-steps"])
def test_measuring_inside_leaves_the_same_bits_and_is_traced_once(transform, form, dtype):
    found, traces, measured = run(transform, dtype, form, "inside")
    assert found == alone(transform, dtype, form)
    assert traces == 1
    assert measured == list(range(0, STEPS, EVERY))


def test_the_spoiled_batches_were_skipped_and_the_others_trained():
    losses, _, state = alone("apply-if-finite", "float32", "graph")
    skipped = np.frombuffer(state["['opt_state']['total_notfinite']"][2], np.int32)[0]
    assert skipped == sum(not np.isfinite(np.asarray(y)).all() for _, y in SPOILED)
    finite = [x for x in np.frombuffer(b"".join(losses), np.float32) if np.isfinite(x)]
    assert len(finite) == STEPS - skipped and finite[-1] < finite[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_run_compared_trains_on_finite_numbers(dtype):
    """Bit-equal NaNs would prove nothing."""
    for transform in TRANSFORMS:
        for form in FORMS:
            if (transform, dtype, form) in set(paired()):
                losses, params, _ = alone(transform, dtype, form)
                values = np.frombuffer(b"".join(losses), np.float32)
                assert transform == "apply-if-finite" or np.isfinite(values).all()
                assert len(set(losses)) > STEPS / 2
                for kind, _, raw in params.values():
                    assert np.isfinite(np.frombuffer(raw, jnp.dtype(kind)).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_comparison_would_notice_one_flipped_bit(dtype):
    model = Small(DTYPES[dtype])
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for tree, variable in (
        (model, model.b.kernel),
        (optimizer, optimizer.opt_state[0].nu["a"]["bias"]),
        (optimizer, optimizer.step),
    ):
        before = bits(tree)
        raw = np.array(variable[...])
        raw.reshape(-1).view(np.uint8)[-1] ^= 1
        variable.set_value(jnp.asarray(raw))
        after = bits(tree)
        assert after.keys() == before.keys()
        assert sum(after[path] != before[path] for path in before) == 1
