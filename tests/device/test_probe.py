"""A probe between `enqueue` and `fetch`: it holds nothing of the user's, moves one small array, upsets no guard."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Run
from flax import nnx

import nnx_probes as probes
from nnx_probes.callbacks import BatchProbe, LossProbe, OptimizerProbe, ParamProbe
from nnx_probes.callbacks.group import Group
from nnx_probes.device import probe as probe_module
from nnx_probes.device.probe import Probe
from nnx_probes.writers import MemoryWriter

METHODS = pytest.mark.parametrize("fingerprints", ["mix64", "xxh3", None])


def arrays():
    return {
        "w": jnp.arange(12.0).reshape(3, 4),
        "h": jnp.full(5, 300, jnp.float16),
        "n": jnp.int32(3),
        "np": np.ones(3),
        "py": 2.5,
    }


def rows(sample):
    return [sample.norm.tolist(), sample.max_abs.tolist(), sample.nonfinite.tolist(), sample.fingerprints]


# --- it holds nothing ---------------------------------------------------------------------------------------


@METHODS
def test_what_was_queued_is_read_after_the_arrays_were_donated(fingerprints):
    tree = arrays()
    expected = rows(Probe(arrays(), fingerprints=fingerprints).enqueue().fetch())
    pending = Probe(lambda: tree, fingerprints=fingerprints).enqueue()
    new = jax.jit(lambda w: w + 1, donate_argnums=0)(tree["w"])
    tree["h"].delete()
    assert tree["w"].is_deleted() and float(new.sum()) == 78
    assert rows(pending.fetch()) == expected


@METHODS
def test_between_enqueue_and_fetch_nothing_of_the_users_is_alive(fingerprints):
    group = Group("params", fingerprints=fingerprints)
    tree = arrays()
    alive = [weakref.ref(x) for x in jax.tree.leaves(tree) if isinstance(x, (jax.Array, np.ndarray))]
    later = group.enqueue(tree)
    del tree
    gc.collect()
    assert [r() for r in alive] == [None] * 4
    assert later.read()[0]["params.max_abs"].tolist() == [300, 3, 1, 2.5, 11]


def test_between_enqueue_and_fetch_no_module_is_alive():
    group, model = Group("params"), Run().model
    alive = [weakref.ref(model), weakref.ref(model.a.kernel.get_value())]
    later = group.enqueue(model)
    del model
    gc.collect()
    assert [r() for r in alive] == [None] * 2 and len(later.read()[0]["params.norm"]) == 4


@pytest.mark.parametrize("callback", [ParamProbe, OptimizerProbe, LossProbe, BatchProbe])
def test_a_monitor_keeps_no_array_of_a_carried_state_alive(callback):
    """With getters over pure states, what a probed step was called with may be donated or dropped after it."""
    run = Run()
    carried = {"model": nnx.to_pure_dict(nnx.state(run.model)), "optimizer": nnx.to_pure_dict(nnx.state(run.optimizer))}
    monitor = probes.Monitor(
        None, model=lambda: carried["model"], optimizer=lambda: carried["optimizer"], every=2, callbacks=[callback()]
    )
    loss, batch = jnp.float32(1), tuple(map(jnp.asarray, run.batch()))
    alive = [weakref.ref(x) for x in jax.tree.leaves((carried, loss, batch))]
    assert monitor(0, loss=loss, batch=batch)
    del run, loss, batch
    carried.update(jax.tree.map(lambda x: x + 1, carried))
    gc.collect()
    assert [r() for r in alive if r() is not None] == []
    assert not monitor(1) and monitor.failures == {}


@pytest.mark.parametrize("callback", [ParamProbe, OptimizerProbe])
def test_a_monitor_keeps_no_module_of_a_rebinding_loop_alive(callback):
    """`model, optimizer = step(model, optimizer, batch)`: the old objects are dropped, so their arrays must go."""
    run = Run()
    live = [run.model, run.optimizer]
    monitor = probes.Monitor(None, every=2, callbacks=[callback()])
    old = [weakref.ref(x) for x in jax.tree.leaves(live)]
    del run
    monitor(0, model=live[0], optimizer=live[1])
    live[:] = jax.jit(lambda *state: jax.tree.map(lambda x: x + 1, state))(*live)
    gc.collect()
    assert [r() for r in old if r() is not None] == []


# --- guards -------------------------------------------------------------------------------------------------


@METHODS
def test_a_probe_works_under_a_transfer_guard(fingerprints):
    tree = {
        **arrays(),
        "bool": True,
        "int": 7,
        "half": np.float16(1),
        "key": jax.random.key(0),
        "empty": jnp.zeros((0,)),
    }
    jax.block_until_ready([x for x in tree.values() if isinstance(x, jax.Array)])
    expected = rows(Probe(dict(tree), fingerprints=fingerprints).enqueue().fetch())
    probe = Probe(tree, fingerprints=fingerprints)
    with jax.transfer_guard("disallow_explicit" if fingerprints != "xxh3" else "disallow"):
        pending = probe.enqueue()  # no transfer at all, not even an explicit one
    with jax.transfer_guard("disallow"):
        assert rows(pending.fetch()) == expected


@pytest.mark.parametrize("method", ["mix64", "xxh3", "auto"])
def test_fingerprint_works_under_a_transfer_guard(method):
    tree = {**arrays(), "key": jax.random.key(0)}
    expected = probes.fingerprint(tree, method=method)
    with jax.transfer_guard("disallow"):
        assert probes.fingerprint(tree, method=method) == expected


@pytest.mark.parametrize("frozen", [False, True])
def test_a_whole_run_works_under_a_transfer_guard(frozen):
    run, memory = Run(tx=optax.sgd(0.0 if frozen else 0.1)), MemoryWriter()
    batches = [tuple(map(jax.device_put, run.batch())) for _ in range(12)]
    run.step(batches[0])
    with (
        probes.Monitor(memory, model=run.model, optimizer=run.optimizer, every=1) as monitor,
        jax.transfer_guard("disallow"),
    ):
        for step, batch in enumerate(batches):
            loss = run.step(batch)
            monitor(step, loss=loss, batch=batch, metrics={"py": 1.5, "np": np.float32(2), "loss": loss})
    assert monitor.failures == {} and len(memory.records) == 12
    assert [a.rule for a in monitor.alerts] == (["frozen_params"] if frozen else [])


# --- one copy -----------------------------------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch):
    """Arrays brought to the host, by `jax.device_get` of the measuring program and by any other way."""
    from jax._src.array import ArrayImpl

    seen = {"get": 0, "value": 0}
    get, value = jax.device_get, ArrayImpl._value

    def counted_get(x):
        seen["get"] += len(jax.tree.leaves(x))
        return get(x)

    def counted_value(self):
        seen["value"] += self._npy_value is None
        return value.fget(self)

    monkeypatch.setattr(jax, "device_get", counted_get)
    monkeypatch.setattr(ArrayImpl, "_value", property(counted_value))
    return seen


def test_one_small_array_comes_to_the_host_for_a_whole_group(copies):
    run = Run()
    group = Group("params", fingerprints="mix64")
    for n in range(1, 4):
        later = group.enqueue(run.model)
        assert copies == {"get": n - 1, "value": n - 1}
        later.read()
        assert copies == {"get": n, "value": n}


def test_a_probe_without_fingerprints_and_one_of_host_arrays_copy_no_more_than_that(copies):
    Probe({"a": jnp.ones(3), "b": jnp.ones((2, 2)), "c": np.ones(3), "d": 1.5}, fingerprints=None).enqueue().fetch()
    assert copies == {"get": 1, "value": 1}
    Probe({"c": np.ones(3), "d": 1.5}).enqueue().fetch()
    assert copies == {"get": 1, "value": 1}


def test_a_run_copies_one_array_a_group_after_due_steps_the_batch_on_them_and_nothing_on_others(copies, monkeypatch):
    monkeypatch.setattr(probe_module, "_is_ready", lambda x: bool(x.block_until_ready() is x))  # never late
    run, by_step = Run(), {}
    callbacks = [ParamProbe(fingerprints="mix64"), OptimizerProbe(fingerprints="mix64"), LossProbe(), BatchProbe()]
    batches = [tuple(map(jnp.asarray, run.batch())) for _ in range(23)]
    with probes.Monitor(None, model=run.model, optimizer=run.optimizer, every=5, callbacks=callbacks) as monitor:
        for step, batch in enumerate(batches):
            loss = run.step(batch)
            before = dict(copies)
            probed = monitor(step, loss=loss, batch=batch, metrics={"a": loss})
            by_step[step] = copies["get"] - before["get"], copies["value"] - before["value"]
            assert probed == (step % 5 == 0)
    groups = 5  # params, optimizer, loss, metrics, batch
    rows = 2  # the batch's two arrays: hashed at once (on the CPU backend), and read later to see whether they differ
    expected = {0: (rows, rows), 1: (groups + rows, groups + rows)}
    assert by_step == {step: expected.get(step % 5, (0, 0)) for step in range(23)}
    assert monitor.failures == {} and monitor.alerts == ()


def test_a_step_that_is_not_due_touches_no_argument():
    class Explosive:
        def __getattribute__(self, name):
            raise AssertionError(f"touched: {name}")

    run = Run()
    monitor = probes.Monitor(None, model=run.model, every=5)
    monitor(0)
    monitor.flush()
    for step in range(1, 5):
        mine = Explosive()
        assert monitor(step, loss=mine, batch=mine, metrics=mine, grads=mine, updates=mine, model=mine) is False
    assert monitor.failures == {}


# --- compiled once ------------------------------------------------------------------------------------------


def test_a_run_traces_each_measuring_program_once_also_across_eval_and_replaced_arrays():
    run = Run()
    callbacks = [ParamProbe(fingerprints="mix64"), OptimizerProbe(fingerprints="mix64"), LossProbe(), BatchProbe()]
    with probes.Monitor(None, model=run.model, optimizer=run.optimizer, every=1, callbacks=callbacks) as monitor:
        for step in range(12):
            monitor(step, loss=run.step(), batch=tuple(map(jnp.asarray, run.batch())))
            run.model.eval() if step % 2 else run.model.train()
    assert [c._group.probe.traces for c in (callbacks[0], callbacks[1], callbacks[3])] == [1, 1, 1]
    assert callbacks[2]._loss.probe.traces == 1


# --- which method "auto" is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["deleted", "host", "nothing"])
def test_what_auto_means_is_settled_by_the_first_device_array_that_can_be_read(monkeypatch, first):
    def elsewhere(arrays):  # what `choose_method` says where the device is no CPU
        return "mix64" if any(isinstance(x, jax.Array) for x in arrays) else "xxh3"

    monkeypatch.setattr(probe_module, "choose_method", elsewhere)
    source = {"deleted": {"w": jnp.ones(3)}, "host": {"w": np.ones(3)}, "nothing": {}}[first]
    if first == "deleted":
        source["w"].delete()
    probe = Probe(lambda: source, may_be_empty=True)
    before = probe.enqueue().fetch().fingerprints
    assert not any(text.startswith("mix64:") for text in before)
    for source in ({"w": jnp.ones(3)}, {"w": np.ones(3)}, {"w": jnp.ones(3)}):
        (text,) = probe.enqueue().fetch().fingerprints
        assert text.startswith("mix64:" if isinstance(source["w"], jax.Array) else "xxh3:")
    probe.prefer("xxh3")
    assert probe.enqueue().fetch().fingerprints == (text,)
