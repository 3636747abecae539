"""What is measured of batches, and that a batch which comes at every step is found at any interval."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import compiled_once, nothing_fails_inside  # noqa: F401

import nnx_probes as probes
from nnx_probes.callbacks import BatchProbe, Callback
from nnx_probes.callbacks.sampled import queue_rows
from nnx_probes.inflight import InFlight
from nnx_probes.writers import MemoryWriter


@nnx.jit
def train(model, optimizer, data):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(data[0]) - data[1]) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def make(seed):
    """A new batch on the device; of the same bytes for the same seed."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(8, 3)).astype(np.float32)), jnp.asarray(rng.normal(size=(8, 1)), jnp.float32)


def arrived(monitor):
    """Waits until the device has answered, so that the monitor reads its last probe at the next call."""
    while monitor._pending is not None and not monitor._pending.ready():
        time.sleep(1e-4)


def loop(batch_of, steps, *, every=1, callbacks=None, on_host=False, watch_all=False, wait=True, **settings):
    """Trains on ``batch_of(step)``; returns (alerts, step -> ``batch.run``, step -> record with a batch)."""
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer, writer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param), MemoryWriter()
    if not watch_all:
        settings = {"callbacks": (BatchProbe(),) if callbacks is None else callbacks, **settings}
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=every, **settings) as monitor:
        for step in range(steps):
            data = batch_of(step)
            loss = train(model, optimizer, data)
            monitor(step, loss=loss, batch=jax.device_get(data) if on_host else data)
            if wait:
                arrived(monitor)
    assert monitor.failures == {}
    records = {r.step: r for r in writer.records if "batch.norm" in r}
    return monitor.alerts, {s: r.values["batch.run"] for s, r in records.items() if "batch.run" in r}, records


def told(alerts):
    return [(a.step, a.rule, a.level.name) for a in alerts]


# --- one batch again and again ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "step", "sync"),
    [(1, 2, False), (1, 2, True), (2, 4, False), (10, 12, False), (10, 12, True)],
)
@pytest.mark.parametrize("on_host", [False, True])
def test_the_same_batch_at_each_step_is_told_at_any_interval(every, step, sync, on_host):
    """At an interval above 1 the second probe raises the suspicion, and the two steps after it settle the matter."""
    alerts, runs, _ = loop(lambda step: make(0), 34, every=every, on_host=on_host, sync=sync)
    assert told(alerts) == [(step, "repeated_batch", "WARN")]
    assert alerts[0].causes[0].slug == "iterator_restarted"
    assert [runs[s] for s in range(step - 2 + (every == 1), step + 1)][-3:] == ([2, 3] if every == 1 else [1, 2, 3])


@pytest.fixture
def slow_device(monkeypatch):
    """Each probe is there three calls later at the earliest: the host runs ahead of the device, as it does with a GPU."""
    asked = []

    def ready(self):
        asked.append(self)
        return sum(one is self for one in asked) > 2

    monkeypatch.setattr(InFlight, "ready", ready)


def test_the_same_batch_is_told_where_the_device_answers_late(slow_device):
    alerts, _, _ = loop(lambda step: make(0), 64, every=10, wait=False)
    assert [(rule, level) for _, rule, level in told(alerts)] == [("repeated_batch", "WARN")]


def test_no_record_is_lost_where_the_device_answers_late(monkeypatch):
    monkeypatch.setattr(InFlight, "ready", lambda self: False)
    _, _, records = loop(lambda step: make(0), 64, every=10, wait=False)
    assert set(records) >= set(range(0, 64, 10))


def test_with_all_that_runs_by_default_it_is_the_only_finding():
    alerts, runs, records = loop(lambda step: make(0), 14, every=5, watch_all=True)
    assert [(rule, level) for _, rule, level in told(alerts) if level != "INFO"] == [("repeated_batch", "WARN")]
    assert runs[0] == 1 and max(runs.values()) == 3
    assert all(("params.norm" in record) is (step % 5 == 0) for step, record in records.items())


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("cycle", [2, 4])
def test_batches_by_turns_are_not_one_batch(every, cycle):
    alerts, runs, records = loop(lambda step: make(step % cycle), 40, every=every)
    assert told(alerts) == [] and max(runs.values()) == 1
    looked_at_too = [step for step in records if step % every]
    assert len(looked_at_too) == (3 if every % cycle == 0 else 0)  # a suspicion may turn out wrong three times


def test_new_batches_are_quiet_and_no_step_is_looked_at_besides():
    alerts, runs, _ = loop(make, 25, every=10)
    assert told(alerts) == [] and runs == {0: 1, 10: 1, 20: 1}


def test_a_batch_that_begins_to_come_again_is_told_three_steps_later():
    alerts, runs, _ = loop(lambda step: make(min(step, 5)), 12)
    assert told(alerts) == [(7, "repeated_batch", "WARN")]
    assert [runs[s] for s in range(4, 9)] == [1, 1, 2, 3, 4]


@pytest.mark.parametrize("part", [0, 1])
def test_a_batch_of_which_one_array_differs_is_another_one(part):
    def batch_of(step):
        data = list(make(0))
        data[part] = data[part].at[0, 0].set(step)
        return data

    assert told(loop(batch_of, 12)[0]) == []


@pytest.mark.parametrize("every", [1, 10])
def test_training_on_the_full_batch_is_declared(every):
    alerts, runs, records = loop(lambda step: make(0), 24, every=every, callbacks=(BatchProbe(full_batch=True),))
    assert told(alerts) == [] and runs == {}
    assert list(records) == list(range(0, 24, every))
    assert all("batch.fingerprint" not in r and "batch.spread" in r for r in records.values())


def test_a_loop_that_stops_handing_over_the_batch_is_not_looked_at_at_every_step():
    probed = []
    with probes.Monitor(None, every=10, callbacks=(BatchProbe(),)) as monitor:
        for step in range(41):
            probed += [step] * bool(monitor(step, loss=1.0, batch=make(0) if step <= 10 else None))
            arrived(monitor)
    assert monitor.failures == {} and probed in ([0, 10, 20, 30, 40], [0, 10, 11, 20, 30, 40])


# --- a callback that asks for the next step -------------------------------------------------------------------


class Curious(Callback):
    """Asks for the two steps after step 10."""

    def __init__(self, every):
        self.every, self.seen = every, []

    def on_step_end(self, ctx):
        self.seen.append((ctx.step, ctx.steps))
        self.again = ctx.step in (10, 11)


@pytest.mark.parametrize("sync", [True, False])
def test_a_callback_may_ask_for_the_next_step_alone(sync):
    one, other = Curious(10), Curious(10)
    other.on_step_end = lambda ctx: other.seen.append((ctx.step, ctx.steps))
    with probes.Monitor(None, every=10, callbacks=(one, other), sync=sync) as monitor:
        for step in range(31):
            monitor(step, loss=1.0)
    assert one.seen == [(0, 1), (10, 10), (11, 1), (12, 1), (20, 8), (30, 10)] and monitor.failures == {}
    assert other.seen == [(0, 1), (10, 10), (20, 10), (30, 10)]


# --- how much the rows of a batch differ ------------------------------------------------------------------------


def measured(*batches, **settings):
    """The record of each batch, without a model."""
    writer = MemoryWriter()
    with probes.Monitor(writer, every=1, callbacks=(BatchProbe(),), sync=True, **settings) as monitor:
        for step, data in enumerate(batches):
            monitor(step, loss=1.0, batch=data)
    assert monitor.failures == {} and monitor.alerts == ()
    return writer.records


ROWS = np.random.default_rng(1).normal(3, 1, size=(16, 5)).astype(np.float32)


@pytest.mark.parametrize("where", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_spread_is_the_largest_difference_between_rows_over_the_largest_magnitude(where, dtype):
    x = where(ROWS.astype(jnp.dtype(dtype)))
    (record,) = measured({"x": x})
    oracle = np.ptp(np.asarray(x).astype(np.float64), axis=0).max() / np.abs(np.asarray(x).astype(np.float64)).max()
    assert record.values["batch.spread"] == pytest.approx([oracle]) and record.leaves["batch"].paths == ("x",)


@pytest.mark.parametrize(
    ("x", "spread"),
    [
        (np.full((4, 3), 7.0, np.float32), 0.0),
        (np.tile(np.arange(3, dtype=np.float32), (4, 1)), 0.0),
        (np.zeros((4, 3), np.float32), 0.0),
        (np.array([-2.0, 1.0, 2.0], np.float32), 2.0),
        (np.array([[[1.0, 1.0]], [[1.0, 4.0]]], np.float32), 0.75),
        (np.arange(6, dtype=np.int32).reshape(3, 2), np.nan),
        (np.ones((1, 3), np.float32), np.nan),
        (np.float32(2.0), np.nan),
        (2.0, np.nan),
        (np.array([True, False]), np.nan),
        (np.zeros((0, 3), np.float32), np.nan),
    ],
)
@pytest.mark.parametrize("where", [lambda x: x, jnp.asarray])
def test_the_spread_of_simple_batches(x, spread, where):
    (record,) = measured([where(x)])
    np.testing.assert_array_equal(record.values["batch.spread"], [spread])


def test_every_array_has_its_own_spread():
    (record,) = measured({"a": jnp.asarray(ROWS), "b": np.arange(16), "c": np.ones((16, 2), np.float32), "d": "text"})
    assert record.leaves["batch"].paths == ("a", "b", "c") and record.values["batch.max_int"] == 15
    oracle = np.ptp(ROWS, axis=0).max() / np.abs(ROWS).max()
    np.testing.assert_allclose(record.values["batch.spread"], [oracle, np.nan, 0.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_of_which_one_is_not_finite_are_not_alike(bad):
    writer = MemoryWriter()
    with probes.Monitor(writer, every=1, callbacks=(BatchProbe(),), sync=True) as monitor:
        monitor(0, loss=1.0, batch=np.array([[1.0], [bad]], np.float32))
    assert monitor.failures == {} and writer.records[0].values["batch.spread"][0] != 0


@pytest.mark.parametrize("where", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    ("shape", "rows"),
    [((5, 3), 5), ((4, 1 << 16), 1), ((100, 1 << 12), 16), ((3, 1 << 17), 1), ((1 << 17,), 1 << 16)],
)
def test_at_most_65536_elements_are_copied_but_one_row_at_least(shape, rows, where):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = queue_rows(where(x)).read()
    assert isinstance(found, np.ndarray) and np.array_equal(found, x[:rows])


@pytest.mark.parametrize("x", [None, "text", 3.0, np.float32(3), jnp.float32(3), np.zeros((0, 3)), jnp.zeros((3, 0))])
def test_what_has_no_rows_has_no_first_ones(x):
    assert queue_rows(x) is None


# --- batches that cannot be read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [None, {}, (), [None], "text", {"a": "text"}, [np.zeros((0, 3), np.float32)], np.array(["a", "b"]), object(), 3],
)
def test_an_odd_batch_is_no_failure(data):
    assert all(record.get("batch.run", 1) <= 6 for record in measured(data, data))


def test_a_batch_that_was_donated_or_deleted_is_no_failure_and_no_repetition():
    take = jax.jit(lambda data: jax.tree.map(lambda x: x + 1, data), donate_argnums=0)

    def batches():
        for step in range(8):
            data = make(0)
            _ = take(data) if step % 2 else [x.delete() for x in data]
            yield data

    given = list(batches())
    assert all(x.is_deleted() for data in given for x in data)
    writer = MemoryWriter()
    with probes.Monitor(writer, every=1, callbacks=(BatchProbe(),), sync=True) as monitor:
        for step, data in enumerate(given):
            monitor(step, loss=1.0, batch=data)
    assert monitor.failures == {} and monitor.alerts == ()
    assert all(record.get("batch.run", 1) == 1 for record in writer.records)


@pytest.mark.parametrize("sync", [True, False])
def test_a_batch_that_is_deleted_after_the_hook_is_no_failure(sync):
    with probes.Monitor(None, every=1, callbacks=(BatchProbe(),), sync=sync) as monitor:
        for step in range(4):
            data = make(step)
            monitor(step, loss=1.0, batch=data)
            for x in data:
                x.delete()
    assert monitor.failures == {} and monitor.alerts == ()


def test_a_batch_whose_arrays_change_their_shape_or_number_is_another_one():
    batches = [{"x": np.ones((n, 2), np.float32), **({"y": np.ones(n)} if n % 2 else {})} for n in (4, 3, 5, 8, 8)]
    assert [record.values["batch.run"] for record in measured(*batches)] == [1, 1, 1, 1, 2]


def test_one_array_that_stands_in_two_places_is_no_failure():
    x = jnp.asarray(ROWS)
    (record,) = measured({"inputs": x, "targets": x})
    assert len(record.values.get("batch.spread", [0] * len(record.leaves["batch"]))) == len(record.leaves["batch"])
