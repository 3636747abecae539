"""What a monitor counts as its own time, and that one failure costs one thing only."""

from __future__ import annotations

import os
import types

import numpy as np
import pytest
from flax import nnx

import nnx_probes as probes
from nnx_probes import meter as meter_module
from nnx_probes.callbacks import Callback
from nnx_probes.callbacks.base import Context, Later
from nnx_probes.inflight import InFlight
from nnx_probes.meter import Meter
from nnx_probes.writers import MemoryWriter
from nnx_probes.writers.background import Background


class Clock:
    """Time that goes on by what the test says, in place of the real one."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(meter_module, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(meter_module, "seconds_until_ready", self.wait)
        self.left = 0.0

    def wait(self, arrays):
        waited, self.left = self.left, 0.0
        self.now += waited
        return waited


def test_waiting_in_a_lap_is_the_step_s_time_once(monkeypatch):
    clock, meter = Clock(monkeypatch), Meter()
    meter.begin(clock.now)
    for _ in range(4):
        meter.calls += 1
        meter.waiting_s = 0.0
        clock.left = 2.0  # an asynchronous step
        began = clock.now
        meter.lap(None, None, measured=False)
        assert meter.step_s(clock.now) == pytest.approx(2.0)
        meter.ended(began)
    assert meter.spent_s == pytest.approx(0.0)
    assert meter.share == pytest.approx(0.0)


def test_naming_a_large_model_is_no_part_of_a_lap(monkeypatch):
    clock, meter = Clock(monkeypatch), Meter()

    class SlowTree:
        def __init__(self, *_, **__):
            clock.now += 6.0

        def read(self):
            return []

    monkeypatch.setattr(meter_module, "Tree", SlowTree)
    meter.rest()
    clock.now += 1.0
    clock.left = 2.0
    meter.lap(np.float32(1), object(), measured=False)
    assert meter.plain_s == pytest.approx(3.0)


def test_what_a_measured_step_takes_longer_is_seen_beside_a_callback_of_each_step(training):
    class Each(Callback):
        every = 1
        provides = ("each.seen",)

    monitor = probes.Monitor(
        None, model=training.model, optimizer=training.optimizer, every="auto", callbacks=[Each(), probes.LossProbe()]
    )
    for step in range(40):
        monitor(step, loss=training.step())
    assert monitor._meter.plain_s > 0  # a lap of a step that measured nothing


def noted():
    found = []
    return found, lambda what, error: found.append((what, type(error).__name__))


def raising():
    raise RuntimeError("gone")


def test_a_measurement_that_fails_costs_itself_only():
    found, note = noted()
    ctx = Context(3, values={"a": 1})
    ctx.later += [
        Later(raising, lambda: ({"b": 2}, {})),
        Later(lambda: True, lambda: None),
        Later(lambda: True, lambda: ({"c": 3}, {})),
        Later(lambda: True, raising),
    ]
    pending = InFlight(ctx, 0.0)
    assert pending.ready()
    record = pending.read(note)
    assert record.values == {"a": 1, "b": 2, "c": 3}
    assert found == [("a measurement", "TypeError"), ("a measurement", "RuntimeError")]


def test_waiting_for_the_first_measurement_is_told(monkeypatch):
    from nnx_probes import inflight

    times = iter([0.0, 5.0, 5.0])
    monkeypatch.setattr(inflight, "time", types.SimpleNamespace(perf_counter=lambda: next(times)))
    ctx = Context(0)
    ctx.later += [Later(lambda: False, lambda: ({}, {})), Later(lambda: False, lambda: ({}, {}))]
    pending = InFlight(ctx, 0.0)
    assert not pending.ready()
    pending.read(lambda *_: None)
    assert pending.waited_s == 5.0


def test_an_old_probe_that_cannot_be_judged_does_not_cost_the_present_one(training, caplog):
    class Odd(Callback):
        provides = ("odd.value",)

        def on_step_end(self, ctx):
            ctx.values["odd.value"] = float(ctx.step)

    writer = MemoryWriter()
    monitor = probes.Monitor(writer, callbacks=[Odd()], every=1, sync=False)
    observe, calls = monitor._judge.observe, []

    def fails_once(record):
        calls.append(record.step)
        if len(calls) == 2:
            raise RuntimeError("no")
        return observe(record)

    monitor._judge.observe = fails_once
    for step in range(5):
        assert monitor(step)
    monitor.close()
    assert [record.step for record in writer.records] == [0, 2, 3, 4]
    assert monitor.failures == {"a record": 1}


def test_one_odd_metric_of_an_evaluation_costs_itself_only(caplog):
    writer = MemoryWriter()
    monitor = probes.Monitor(writer, callbacks=[probes.LossProbe()])
    monitor.on_eval(
        4, loss=0.5, metrics={"confusion": np.eye(3), "note": "fine", "top": {"1": 0.25, "5": 0.75}, "none": None}
    )
    monitor.close()
    values = writer.records[-1].values
    assert {name: values[name] for name in values if name.startswith("eval.")} == {
        "eval.loss": 0.5,
        "eval.top.1": 0.25,
        "eval.top.5": 0.75,
    }
    assert monitor.failures == {"on_eval: eval.confusion": 1, "on_eval: eval.note": 1}


def test_numpy_s_integers_take_the_short_way(training):
    asked = []

    def getter():
        asked.append(1)
        return training.model

    monitor = probes.Monitor(None, model=getter, every=50)
    built = len(asked)
    assert built <= 2
    for step in range(49):
        monitor(np.int64(step))
    assert len(asked) - built <= 4  # at the first step, the one that shows the stride, and the one before a probe


def test_a_mark_at_the_present_step_is_no_restart(training):
    probed = []
    monitor = probes.Monitor(None, model=training.model, every=10)
    for step in range(25):
        if monitor(step):
            probed.append(step)
        if step == 13:
            monitor.mark(step, "rate halved")
    assert probed == [0, 10, 20]
    monitor.mark(5, "restored")
    assert monitor(6)


def test_a_failing_mark_is_counted(caplog):
    monitor = probes.Monitor(None)
    monitor.mark("soon", "x")
    assert monitor.failures == {"mark": 1}


def test_writers_failures_are_among_the_monitor_s(caplog):
    class Broken(MemoryWriter):
        def write_record(self, record):
            raise OSError("disk full")

    monitor = probes.Monitor(Broken(), callbacks=[probes.LossProbe()], every=1)
    monitor(0, loss=1.0)
    monitor.close()
    assert monitor.failures == {"Broken": 1}


def test_the_beginning_is_told_with_the_live_objects(training):
    class Begins(Callback):
        def on_train_begin(self, ctx):
            self.model, self.optimizer = ctx.model, ctx.optimizer

    begins = Begins()
    monitor = probes.Monitor(None, model=lambda: training.model, callbacks=[begins])
    monitor(0, optimizer=training.optimizer)
    assert begins.model is training.model
    assert begins.optimizer is training.optimizer


def test_a_monitor_in_another_loop_takes_its_evaluations():
    writer = MemoryWriter()
    monitor = probes.Monitor(writer)
    monitor.on_eval_end(Context(3, loss=0.5, metrics={"accuracy": 0.25}))
    monitor.close()
    assert writer.records[-1].values["eval.loss"] == 0.5
    assert writer.records[-1].values["eval.accuracy"] == 0.25


def test_a_forked_child_leaves_the_writing_to_its_parent(monkeypatch):
    ran, background = [], Background(4)
    background.submit(lambda: ran.append(1))
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert background.orphaned
    assert background.stop(10) == 0  # at once: the thread is still waiting for tasks
    monkeypatch.undo()
    assert background._thread.is_alive()
    assert background.stop(10) == 0 and not background._thread.is_alive()


def test_a_run_after_tuning_with_the_same_optimizer_is_measured(training):
    optimizer = probes.watch(training.optimizer, training.model)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m, b: ((m(b[0]) - b[1]) ** 2).mean())(model, batch)
        optimizer.update(model, grads)
        return loss

    batches = [training.batch() for _ in range(4)]
    probes.tune(step, training.model, optimizer, batches, probes=1)
    copy = nnx.clone(optimizer)
    writer = MemoryWriter()
    for which in (optimizer, copy):
        with probes.Monitor(writer, model=training.model, optimizer=which, every=5) as monitor:
            for i in range(12):
                monitor(i, loss=step(training.model, which, batches[i % 4]))
            assert not monitor.alerts
    measured = [record.step for record in writer.records if "grads.norm" in record.values]
    assert measured == [5, 10, 0, 5, 10] or measured == [5, 10, 5, 10]
