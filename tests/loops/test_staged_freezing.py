"""Another optimizer in the middle of a run: other leaves are meant to move from then on."""

from __future__ import annotations

import gc
import weakref

import optax
import pytest
from flax import nnx
from rig import BATCH, Net, build, compiled_once, jitted, loud, nothing_fails_inside  # noqa: F401

import nnx_probes as probes
from nnx_probes.writers import MemoryWriter

HEAD = nnx.All(nnx.Param, nnx.PathContains("b"))
ALL = {"a.kernel", "a.bias", "b.kernel", "b.bias"}


def staged(first, then, *, by, steps=24, at=6, tx=lambda: optax.sgd(0.05), broken=False):
    """Trains with one filter, then with another; `by` says how the monitor learns of it. Returns (monitor, trained leaves)."""
    model, writer = Net(nnx.Rngs(0)), MemoryWriter()
    optimizers = [nnx.Optimizer(model, tx(), wrt=wrt) for wrt in (first, then)]
    given = (lambda: optimizers[0]) if by == "getter" else optimizers[0]
    with probes.Monitor(writer, model=model, optimizer=given, every=1) as monitor:
        for step in range(steps):
            if step == at:
                monitor.mark(step, "other leaves are trained")  # else the new optimizer's step is one that was set back
            if step == at and by == "attribute":
                optimizers[0].wrt = then
            elif step == at:
                del optimizers[0]
                gc.collect()
            if broken and step >= at:
                kernel = model.a.kernel[...]
            loss = jitted(model, optimizers[0], BATCH)
            if broken and step >= at:
                model.a.kernel[...] = kernel
            monitor(step, loss=loss, **({"optimizer": optimizers[0]} if by == "call" else {}))
    assert monitor.failures == {}
    tables = [r.leaves["params"] for r in writer.records if "params" in r.leaves]
    trained = [{p for p, t in zip(table.paths, table.trained, strict=True) if t} for table in tables]
    return monitor, trained


@pytest.mark.parametrize("by", ["getter", "call", "attribute"])
def test_a_narrower_filter_is_no_freezing(by):
    monitor, trained = staged(nnx.Param, HEAD, by=by)
    assert loud(monitor.alerts) == []
    assert trained == [ALL] * 6 + [{"b.kernel", "b.bias"}] * 18


@pytest.mark.parametrize("by", ["getter", "call"])
def test_leaves_that_a_wider_filter_adds_are_judged(by):
    monitor, trained = staged(HEAD, nnx.Param, by=by, broken=True)
    assert trained == [{"b.kernel", "b.bias"}] * 6 + [ALL] * 18
    assert [(a.rule, a.paths) for a in monitor.alerts if a.rule == "frozen_params"] == [
        ("frozen_params", ("a.kernel",))
    ]


def test_a_filter_that_selects_nothing_is_told_when_it_comes_and_no_longer_than_it_lasts():
    model, writer = Net(nnx.Rngs(0)), MemoryWriter()
    filters = (nnx.Param, nnx.LoRAParam, nnx.Param)
    with probes.Monitor(writer, model=model, every=1) as monitor:
        for step, wrt in enumerate(filters):
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt)
            monitor(step, loss=jitted(model, optimizer, BATCH), optimizer=optimizer)
    told = [(r.get("optimizer.selects_nothing"), r.get("optimizer.wrt")) for r in writer.records]
    assert told == [(None, None), (True, "LoRAParam"), (None, None)]


def test_the_optimizer_is_let_go_of_where_the_model_cannot_be_measured():
    probe, model = probes.ParamProbe(), {"nothing": "here"}
    _, optimizer = build()
    with pytest.raises(TypeError, match="found no array"):
        probe.on_step_end(probes.callbacks.Context(0, model=model, optimizer=optimizer))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
