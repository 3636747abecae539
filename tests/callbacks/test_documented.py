"""Whatever a built-in callback puts into a record, its docstring and its `provides` name."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_probes as probes
from nnx_probes import callbacks
from nnx_probes.writers import MemoryWriter

X = jnp.ones((8, 3))
CALLBACKS = [
    callbacks.ParamProbe,
    callbacks.OptimizerProbe,
    callbacks.GradientProbe,
    callbacks.LossProbe,
    callbacks.ModeProbe,
    callbacks.LabelProbe,
]
SHORT = re.compile(r"slices\.|metrics\.|optimizer\.skip")
"""Named together, or by what they stand for."""


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(self.norm(x)))


@nnx.jit
def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def chain(rate=0.1):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.sgd)(rate))
    return optax.apply_if_finite(inner, 3)


def watched(model, monitor):
    optimizer = probes.watch(nnx.Optimizer(model, chain(), wrt=nnx.Param), model, fingerprints=True)
    for step in range(4):
        loss = train(model, optimizer, X)
        monitor(step, loss=loss, optimizer=optimizer, batch={"y": jnp.arange(4)}, metrics={"a": 1.0, "b": jnp.ones(3)})
    model.eval()
    model.norm.mean[...] += 1
    monitor.on_eval(3, loss=1.0)
    monitor(4, loss=jnp.ones(3), optimizer=optimizer)


def standing_still(model, monitor):
    for step in range(5):
        monitor(step, model=model, optimizer=nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam))
    model.out.kernel = nnx.Param(jnp.zeros((3, 1)))
    monitor(5, model=model)


def frozen(model, monitor):
    optimizer = nnx.Optimizer(model, chain(0.0), wrt=nnx.Param)
    for step in range(5):
        monitor(step, loss=train(model, optimizer, X), optimizer=optimizer)


def in_a_copy(model, monitor):
    """The step works on a copy of the optimizer, so that nothing comes back."""
    optimizer = probes.watch(nnx.Optimizer(model, chain(), wrt=nnx.Param), model)
    step = nnx.cached_partial(train, model, optimizer)
    for i in range(4):
        monitor(i, loss=step(X), optimizer=optimizer)


def inside(model, monitor):
    optimizer = probes.watch(nnx.Optimizer(model, chain(), wrt=nnx.Param), model, when="inside")
    for i in range(4):
        monitor(i, loss=train(model, optimizer, X), optimizer=optimizer)


def traced(model, monitor):
    optimizer = nnx.Optimizer(model, chain(), wrt=nnx.Param)

    @jax.jit
    def step(model, optimizer, x):
        monitor(0, loss=x.sum(), model=model, optimizer=optimizer)

    step(model, optimizer, X)


LOOPS = [watched, standing_still, frozen, in_a_copy, inside, traced]


@functools.cache
def put_by(kind):
    """Returns the names in the records of all loops."""
    names = set()
    for loop in LOOPS:
        writer, model = MemoryWriter(), Net()
        chosen = [kind()] if kind in (callbacks.ParamProbe, callbacks.LossProbe) else [callbacks.ParamProbe(), kind()]
        with probes.Monitor(writer, model=model, every=1, callbacks=chosen) as monitor:
            loop(model, monitor)
        assert monitor.failures == {}
        found = {name for record in writer.records for name in record.values}
        names |= {name for name in found if not name.startswith("probes.") and name != "eval.loss"}
    return names


@pytest.fixture(scope="module")
def of_params():
    return put_by(callbacks.ParamProbe)


@pytest.mark.parametrize("kind", CALLBACKS)
def test_every_value_is_named(kind, of_params):
    own = put_by(kind) - (set() if kind is callbacks.ParamProbe else of_params)
    assert own
    provided = set(kind.provides)
    assert {n for n in own if n not in provided and f"{n.partition('.')[0]}.*" not in provided} == set()
    words = " ".join(kind.__doc__.split())
    assert {name for name in own if f"``{name}``" not in words and not SHORT.match(name)} == set()


def test_the_loops_put_what_is_seldom_put(of_params):
    assert {"params.replaced", "optimizer.selects_nothing", "optimizer.wrt", "loop.traced"} <= of_params
    assert {"watch.missed", "watch.unmeasured", "watch.remedy", "optimizer.skip_limit"} <= put_by(
        callbacks.GradientProbe
    )
    assert {"optimizer.notfinite_count", "trial.later"} <= put_by(callbacks.OptimizerProbe)
