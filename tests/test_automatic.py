"""Intervals that keep to a budget: the monitor's own, and a callback's."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest

import nnx_probes as probes
from nnx_probes.callbacks import Callback, Context
from nnx_probes.callbacks.base import Later
from nnx_probes.device.ready import seconds_until_ready
from nnx_probes.errors import ArgumentError
from nnx_probes.host.pace import LADDER
from nnx_probes.meter import Meter


class Slow(Callback):
    """20 ms a probe."""

    provides = ("slow.seen",)

    def __init__(self, every):
        self.every = every
        self.steps = []

    def on_step_end(self, ctx):
        time.sleep(0.02)
        self.steps.append(ctx.step)
        ctx.values["slow.seen"] = 1.0


def train(training, steps, **settings):
    memory = probes.writers.MemoryWriter()
    with probes.Monitor(memory, model=training.model, **settings) as monitor:
        for step in range(steps):
            time.sleep(0.002)
            monitor(step, loss=training.step())
    assert monitor.failures == {}
    return memory.records


def test_a_dear_callback_gets_a_longer_interval_of_its_own(training):
    slow = Slow("auto")
    records = train(training, 90, every=5, callbacks=[probes.LossProbe(), slow])
    assert [r.step for r in records if "loss" in r.values][:4] == [0, 5, 10, 15]
    # its first probe compiles, its second is the first that is timed, its third decides: 20 ms in a hundredth of the time
    assert slow.steps == [0, 10, 20]


def test_what_the_monitor_shares_with_a_dear_callback_gets_longer_too(training):
    slow = Slow(None)
    records = train(training, 90, every="auto", callbacks=[probes.LossProbe(), slow])
    assert slow.steps == [0, 10, 20]
    assert {r.values["probes.every"] for r in records} <= set(LADDER)
    assert records[-1].values["probes.every"] == 10  # of the third probe itself, written before it was billed


def test_callbacks_share_the_budget():
    from nnx_probes.checks import paces_of

    own, paces = paces_of("auto", 0.03, [Slow(None), Slow("auto"), Slow("auto"), Slow(7)])
    assert [pace.budget for pace in paces] == pytest.approx([0.01, 0.01, 0.01, None])
    assert own is paces[0] and paces[1] is not paces[2]
    own, paces = paces_of(5, 0.03, [Slow(None), Slow("auto")])
    assert (own.every, own.budget, paces[1].budget) == (5, None, 0.03)


def test_losses_are_the_same_bit_for_bit(training):
    seen = []
    with probes.Monitor(None, model=training.model, optimizer=training.optimizer, every="auto") as monitor:
        for step in range(45):
            seen.append(np.asarray(training.step()).tobytes())
            monitor(step)
    plain = type(training)()
    assert seen == [np.asarray(plain.step()).tobytes() for _ in range(45)]


class Waits(Callback):
    """Waits 50 ms for the user's step, as hashing does on the CPU backend."""

    provides = ("waits.seen",)

    def on_step_end(self, ctx):
        time.sleep(0.05)
        ctx.later.append(Later(lambda: True, lambda: ({"waits.seen": 1.0}, {}), waited_s=0.05))


@pytest.mark.parametrize("every", [1, "auto"])
def test_waiting_for_a_slow_step_is_no_overhead(every):
    monitor = probes.Monitor(None, callbacks=[Waits()], every=every)
    probes_made = sum(monitor(step) for step in range(31))
    assert probes_made >= 2
    assert monitor._meter.spent_s <= time.perf_counter() - monitor._meter.began_s - probes_made * 0.05


def test_a_group_tells_how_long_it_waited_for_its_arrays(training, monkeypatch):
    from nnx_probes.device import probe

    monkeypatch.setattr(probe, "seconds_until_ready", lambda arrays: len(list(arrays)) / 8)
    ctx = Context(0, loss=jax.numpy.ones(()), model=training.model)
    probes.ParamProbe().on_step_end(ctx)
    probes.ParamProbe(fingerprints=None).on_step_end(ctx)
    assert [later.waited_s for later in ctx.later] == [0.5, 0.0]


def test_waiting_passes_over_what_is_gone():
    gone = jax.numpy.ones(3)
    gone.delete()
    assert 0 <= seconds_until_ready([gone, 1.0, np.ones(2), jax.numpy.ones(2)]) < 60


def test_a_lap_is_the_time_of_one_step_and_a_measured_one_is_compared_with_it():
    meter = Meter()
    meter.lap(np.float32(0), None, measured=False)
    assert np.isnan(meter.plain_s)  # the device may have been busy before
    meter.rest()
    time.sleep(0.01)
    meter.lap(np.float32(0), None, measured=False)
    meter.rest()
    time.sleep(0.03)
    meter.lap(np.float32(0), None, measured=True)
    assert meter.plain_s >= 0.01
    assert meter.extra_s == pytest.approx(max(0.0, 0.03 - meter.plain_s), abs=meter.extra_s)
    meter.lap(np.float32(0), None, measured=True)
    assert meter.extra_s == 0


def test_a_plain_loop_of_callbacks_has_no_budget(training):
    with pytest.raises(ArgumentError, match=r"Slow\(every='auto'\) keeps to a monitor's budget: pass Monitor"):
        probes.fit(lambda *a: 0.0, training.model, training.optimizer, [1], steps=1, callbacks=[Slow("auto")])
