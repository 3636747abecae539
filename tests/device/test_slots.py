"""The parameters a filter selects, read again and again while the model changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_probes.device import slots
from nnx_probes.device.slots import Params


class Net(nnx.Module):
    def __init__(self, rngs=None):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.b = nnx.Linear(3, 4, rngs=rngs)
        self.a = nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.pair = nnx.Param({"u": jnp.ones(2), "t": jnp.zeros(3)})


class Stacked(nnx.Module):
    def __init__(self):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(3, 3, rngs=rngs)

        self.blocks = make(nnx.Rngs(0))


@pytest.fixture
def worked_out(monkeypatch):
    """Grows by one whenever the names are worked out."""
    calls, real = [], slots._select
    monkeypatch.setattr(slots, "_select", lambda *a: calls.append(0) or real(*a))
    return calls


def same(params, model, wrt=nnx.Param):
    """Reads; the answer has to be that of a fresh reader."""
    found, arrays = params.read(model, wrt)
    state, _ = jax.tree_util.tree_flatten_with_path(nnx.as_pure(nnx.state(model, wrt)))
    assert [slot.parts for slot in found] == [
        tuple(getattr(k, "key", getattr(k, "name", k)) for k in ks) for ks, _ in state
    ]
    assert all(x is y for x, (_, y) in zip(arrays, state, strict=True))
    assert [(s.shape, s.dtype) for s in found] == [(x.shape, str(x.dtype)) for x in arrays]
    fresh, _ = Params().read(model, wrt)
    assert found == fresh
    return found


def test_names_are_worked_out_once_while_the_arrays_change(worked_out):
    model, params = Net(), Params()
    for _ in range(3):
        params.read(model, nnx.Param)
        model.a.kernel[...] += 1
    assert len(worked_out) == 1
    same(params, model)


def test_a_model_merged_anew_each_time_is_known_by_how_it_is_built(worked_out):
    graphdef, state = nnx.split(Net())
    params = Params()
    for _ in range(3):
        params.read(nnx.merge(graphdef, state), nnx.Param)
    assert len(worked_out) == 1
    same(params, nnx.merge(graphdef, state))


def frozen(model):
    model.a.kernel = nnx.BatchStat(model.a.kernel[...])


def replaced(model):
    model.a.kernel = nnx.Param(model.a.kernel[...])


def grown(model):
    model.a.kernel.set_value(jnp.zeros((5, 5)))


def retyped(model):
    model.a.kernel.set_value(model.a.kernel[...].astype(jnp.bfloat16))


def tied(model):
    model.a.kernel = model.b.kernel


def added(model):
    model.more = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def evaluating(model):
    model.eval()


def deeper(model):
    model.pair.set_value({"u": jnp.ones(2), "t": jnp.zeros(3), "s": jnp.zeros(1)})


def renamed(model):
    model.pair.set_value({"u": jnp.ones(2), "s": jnp.zeros(3)})


@pytest.mark.parametrize("change", [frozen, replaced, grown, retyped, tied, added, evaluating, deeper, renamed])
def test_what_is_built_otherwise_is_worked_out_anew(change):
    model, params = Net(), Params()
    before = same(params, model)
    change(model)
    after = same(params, model)
    assert (before == after) == (change in (replaced, evaluating))


def test_another_filter_selects_others():
    model, params = Net(), Params()
    head = nnx.PathContains("a")
    sizes = [len(same(params, model, wrt)) for wrt in (nnx.Param, nnx.All(nnx.Param, head), nnx.BatchStat, nnx.Param)]
    assert sizes == [8, 2, 2, 8]


def test_the_axis_of_layers_is_kept():
    model, params = Stacked(), Params()
    for _ in range(2):
        found, _ = params.read(model, nnx.Param)
        assert [(slot.parts[-1], slot.axis) for slot in found] == [("bias", 0), ("kernel", 0)]


def test_a_model_that_holds_its_parent_is_read(worked_out):
    model, params = Net(), Params()
    model.a.up = model
    for _ in range(2):
        found, arrays = params.read(model, nnx.Param)
    assert len(found) == len(arrays) == 8 and len(worked_out) == 1


def test_a_state_is_read_too():
    state, params = nnx.state(Net()), Params()
    for _ in range(2):
        found, arrays = params.read(state, nnx.Param)
        assert [slot.parts for slot in found][:2] == [("a", "bias"), ("a", "kernel")]
        assert all(isinstance(x, (jax.Array, np.ndarray)) for x in arrays)
