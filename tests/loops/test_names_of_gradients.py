"""The names of gradients and updates while model, optimizer and filter change."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import Net, build, compiled_once, nothing_fails_inside  # noqa: F401

import nnx_probes as probes
from nnx_probes.callbacks.arming import Arming
from nnx_probes.callbacks.flow_values import FlowTable
from nnx_probes.callbacks.grads import GradientProbe


@pytest.fixture(autouse=True)
def addresses_are_given_again(monkeypatch):
    """As the worst case has it: every object gets the ``id`` of the one before."""
    for module in ("flow_values", "grads", "arming"):
        monkeypatch.setattr(f"nnx_probes.callbacks.{module}.id", lambda x: 1, raising=False)


HEAD = nnx.All(nnx.Param, nnx.PathContains("b"))


class Named(nnx.Module):
    """Two parameters under names of the caller's choice."""

    def __init__(self, *names):
        for name in names:
            setattr(self, name, nnx.Param(jnp.ones(3)))


def stats_of(n):
    return {"grads_norm": np.arange(n, dtype=np.float32)}


def names(table, n):
    return table.from_stats(stats_of(n))[1]["grads"].paths


def test_a_model_in_the_place_of_one_that_is_gone_is_another():
    table = FlowTable()
    for i in range(4):
        table.adopt(Named(f"u{i}", f"v{i}"), None)
        assert names(table, 2) == (f"u{i}", f"v{i}")


def test_another_filter_names_others():
    model, table = Net(nnx.Rngs(0)), FlowTable()
    for wrt, paths in [
        (nnx.Param, ("a.bias", "a.kernel", "b.bias", "b.kernel")),
        (HEAD, ("b.bias", "b.kernel")),
        (nnx.Param, ("a.bias", "a.kernel", "b.bias", "b.kernel")),
    ]:
        table.adopt(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt))
        assert names(table, len(paths)) == paths


def test_a_model_that_is_a_dict_is_named_and_let_go_of():
    table, model = FlowTable(), {"u": jnp.ones(3), "v": jnp.ones(2)}
    for _ in range(2):
        table.adopt(model, None)
    array = model["u"]
    del model
    assert not any(isinstance(x, dict) for x in gc.get_referrers(array) if "u" in x)


def test_statistics_are_fetched_together(monkeypatch):
    table, fetched, real = FlowTable(), [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(len(x)) or real(x))
    stats = {name: jnp.ones(4) for name in ("grads_norm", "grads_max_abs", "updates_norm")}
    values, _ = table.from_stats({**stats, "other": jnp.ones(4)})
    assert fetched == [3]
    assert {name: type(x) for name, x in values.items()} == {
        "grads.norm": np.ndarray,
        "grads.max_abs": np.ndarray,
        "updates.norm": np.ndarray,
    }


def test_a_transformation_in_the_place_of_one_that_is_gone_is_read_anew():
    probe, model = GradientProbe(), Net(nnx.Rngs(0))

    def clipped(most):
        tx = optax.chain(optax.clip_by_global_norm(most), optax.sgd(0.1))
        ctx = probes.callbacks.Context(0, optimizer=nnx.Optimizer(model, tx, wrt=nnx.Param))
        probe.on_step_end(ctx)
        return ctx.values["grads.clip_norm"]

    for i in range(1, 4):
        assert clipped(float(i)) == i


@pytest.mark.parametrize("when", ["armed", "inside"])
def test_how_many_updates_are_gathered_is_read_anew_with_another_transformation(when):
    arming = Arming()

    def lead(k):
        model, optimizer = build(optax.MultiSteps(optax.sgd(0.1), k))
        arming.before(probes.callbacks.Context(0, every=100, until=100), probes.watch(optimizer, model, when=when))
        return arming.lead

    for k in (1, 4, 2, 3):
        assert lead(k) == k
