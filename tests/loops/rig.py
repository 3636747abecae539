"""A two-layer model, its step in the usual forms, and one way to run a loop under a monitor."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import nnx_probes as probes


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Many monitors, the same few programs: each is compiled once, which saves nine tenths of the time."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = [getattr(jax.config, name) for name in names]
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"  # of all workers
    for name, value in zip(names, (str(folder), 0.0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def nothing_fails_inside(caplog):
    """What the library passes over (a callback, a rule, a writer that failed) it logs: no run here may do that."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.name.startswith("nnx_probes")] == []


class Net(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.a = nnx.Linear(3, 4, rngs=rngs, param_dtype=dtype)
        self.b = nnx.Linear(4, 2, rngs=rngs, param_dtype=dtype)

    def __call__(self, x):
        return self.b(nnx.tanh(self.a(x)))


def build(tx=None, wrt=nnx.Param, model=None):
    """Returns (model, optimizer): 4 parameter leaves; 10 optimizer leaves with Adam."""
    model = Net(nnx.Rngs(0)) if model is None else model
    return model, nnx.Optimizer(model, optax.adam(1e-2) if tx is None else tx, wrt=wrt)


def batch(seed=0):
    """Returns (x: float32[8, 3], y: float32[8, 2]) as device arrays."""
    x = np.random.default_rng(seed).normal(size=(8, 3)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(0.5 * x[:, :2] + 0.25)


BATCH = batch()


def mse(model, data):
    return jnp.mean((model(data[0]) - data[1]) ** 2)


def train(model, optimizer, data):
    """One step on live objects; returns the loss. What a loop makes of it is up to the test."""
    loss, grads = nnx.value_and_grad(mse)(model, data)
    optimizer.update(model, grads)
    return loss


jitted = nnx.jit(train)
"""The sound step."""


def observe(call, model, optimizer, *, steps, every=1, watch=False, by=1, **settings):
    """Runs ``call(step, optimizer)`` for `steps` steps, numbered by `by`, under a monitor; returns the alerts.

    `call` returns the loss, or a dict of all that the monitor is to get. With `watch`, the optimizer that `call` and the
    monitor get is the watched one.
    """
    if watch:
        optimizer = probes.watch(optimizer, model)
    with probes.Monitor(None, model=model, optimizer=optimizer, every=every, **settings) as monitor:
        for step in range(0, steps * by, by):
            out = call(step, optimizer)
            monitor(step, **(out if isinstance(out, dict) else {"loss": out}))
    assert monitor.failures == {}
    return monitor.alerts


UNMEASURED = ("usage.watch.unmeasured",)
"""What the INFO is about that a watched optimizer cannot be measured in this loop."""


def told(alerts):
    """Returns each alert as (rule, level, first cause), but not that `watch` cannot measure in this loop."""
    return [(a.rule, a.level.name, a.causes[0].slug if a.causes else None) for a in alerts if a.paths != UNMEASURED]


def loud(alerts):
    """Returns the same of alerts above INFO."""
    return [one for one in told(alerts) if one[1] != "INFO"]


class Moves:
    """Counts the leaves of live objects that changed since it was made."""

    def __init__(self, *objects):
        self._objects = objects
        self._before = [probes.fingerprint(x) for x in objects]

    def counts(self):
        """Returns for each object the text ``"<changed leaves>/<all leaves>"``."""
        after = [probes.fingerprint(x) for x in self._objects]
        changed = [sum(b[path] != a[path] for path in b) for b, a in zip(self._before, after, strict=True)]
        return [f"{n}/{len(b)}" for n, b in zip(changed, self._before, strict=True)]
