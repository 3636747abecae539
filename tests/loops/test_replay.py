"""A stored run judged again gives the alerts of the live run, field by field."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import (  # noqa: F401  (the two fixtures work by being there)
    BATCH,
    Net,
    batch,
    build,
    compiled_once,
    jitted,
    nothing_fails_inside,
    train,
)

import nnx_probes as probes
from nnx_probes import rules
from nnx_probes.report import replay
from nnx_probes.writers.jsonl_values import alert_row


@dataclass(frozen=True)
class LossAbove(probes.Rule):
    limit: float

    slug = "loss_above"
    reads = ("loss",)

    def check(self, record, history):
        if record.get("loss") > self.limit:
            return probes.Alert(record.step, self.slug, probes.Level.WARN, "The loss is high", values={"nan": np.nan})


class Spike(LossAbove):
    """A user's rule with the name of a built-in one."""

    slug = "spike"


class Adds(probes.Callback):
    """Adds values to a record after it was observed; one of them was measured already."""

    def explain(self, record, history):
        return {"loss": 1e9, "late.number": np.array(2.0), "late.text": "x"}


@dataclass(frozen=True)
class SawLate(probes.Rule):
    slug = "saw_late"

    def check(self, record, history):
        n = len(history.series("late.number")[0])
        return probes.Alert(record.step, self.slug, probes.Level.INFO, "n", str(n)) if n else None


def loop(
    monitor, model, optimizer, *, steps, step_fn=jitted, data=lambda step: batch(step % 4), numbers=lambda step: step
):
    for step in range(steps):
        monitor(numbers(step), loss=step_fn(model, optimizer, data(step)), batch=data(step))


def losses(monitor, values):
    for step, value in enumerate(values):
        monitor(step, loss=value)


NAN_BATCH = (BATCH[0].at[0, 0].set(jnp.nan), BATCH[1])


def healthy(monitor, model, optimizer):
    loop(monitor, model, optimizer, steps=12, data=lambda step: batch(step % 3))


def nan_batch(monitor, model, optimizer):
    loop(monitor, model, optimizer, steps=6, data=lambda step: NAN_BATCH if step == 3 else batch(step % 4))


def plain_jit(monitor, model, optimizer):
    loop(monitor, model, optimizer, steps=6, step_fn=jax.jit(train))


def backwards(monitor, model, optimizer):
    loop(monitor, model, optimizer, steps=8, numbers=lambda step: step % 5)
    monitor("nine", loss=1.0)


def restored(monitor, model, optimizer):
    """Goes back to an earlier state, announced twice and then twice not."""
    kept = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
    for turn in range(5):
        loop(monitor, model, optimizer, steps=3, numbers=lambda step: 3 * turn + step)  # noqa: B023
        nnx.update((model, optimizer), jax.tree.map(jnp.copy, kept))
        if turn < 2:
            monitor.mark(np.int64(3 * turn + 2), "restore")


def evaluated(monitor, model, optimizer):
    for turn in range(4):
        loop(monitor, model, optimizer, steps=2, numbers=lambda step: 2 * turn + step)  # noqa: B023
        monitor.on_eval(jnp.int32(2 * turn + 1), loss=jnp.float32(0.5), metrics={"accuracy": np.float32("nan")})


def diverges(monitor, model, optimizer):
    losses(monitor, [*np.linspace(2.0, 1.0, 100), *[40.0] * 30, *[float("nan")] * 2])


def spikes(monitor, model, optimizer):
    usual = np.exp(np.random.default_rng(0).normal(0, 0.1, 120))
    losses(monitor, [*usual, 30.0, 1.0, 1.0, 30.0, *usual[:70], 500.0])


def skips(monitor, model, optimizer):
    loop(monitor, model, optimizer, steps=14, data=lambda step: NAN_BATCH if step > 2 else batch(step % 4))


def frozen_then_not(monitor, model, optimizer):
    """Half of the run without the optimizer: an episode of `frozen_params`, and its end."""
    for step in range(40):
        monitor(step, loss=0.5 if step < 20 else jitted(model, optimizer, BATCH))


LOSS_ONLY = dict(callbacks=[probes.LossProbe()])
RUNS = {
    "healthy": (healthy, {}, set()),
    "healthy, watched": (healthy, dict(watch=True), set()),
    "seldom": (nan_batch, dict(every=2), {"nonfinite"}),
    "nan batch": (nan_batch, dict(watch=True), {"nonfinite"}),
    "rate 0": (healthy, dict(tx=optax.adam(0.0), watch=True), {"frozen_params"}),
    "schedule ends": (healthy, dict(tx=optax.sgd(optax.linear_schedule(0.1, 0.0, 4)), every=1), {"frozen_params"}),
    "schedule ends as planned": (
        lambda m, model, o: loop(m, model, o, steps=7),
        dict(tx=optax.sgd(optax.linear_schedule(0.1, 0.0, 4)), total_steps=5),
        set(),
    ),
    "update not called": (
        lambda m, model, o: loop(m, model, o, steps=6, step_fn=lambda *_: 0.5),
        dict(watch=True),
        {"frozen_params"},
    ),
    "jax.jit": (plain_jit, dict(watch=True), {"lost_update"}),
    "jax.jit, not watched": (plain_jit, {}, {"frozen_params"}),
    "bfloat16": (
        lambda m, model, o: loop(m, model, o, steps=40),
        dict(tx=optax.adam(1e-6), dtype=jnp.bfloat16, watch=True),
        {"frozen_params", "absorbed_updates"},
    ),
    "skipped updates": (
        skips,
        dict(tx=optax.apply_if_finite(optax.sgd(0.1), 30), watch=True),
        {"nonfinite", "skipped_updates", "repeated_batch"},
    ),
    "diverging": (diverges, LOSS_ONLY, {"diverging", "nonfinite", "spike"}),
    "spikes": (spikes, LOSS_ONLY, {"spike"}),
    "restored": (restored, {}, {"lost_update", "optimizer_reset"}),
    "validation": (evaluated, dict(watch=True), {"nonfinite"}),
    "steps go backwards": (backwards, {}, {"usage"}),
    "own thresholds": (
        healthy,
        dict(rules=[rules.FrozenParams(whole=3), rules.Spike(jump=float("inf")), rules.Nonfinite(allow=("loss",))]),
        set(),
    ),
    "own thresholds that fire": (
        lambda m, model, o: loop(m, model, o, steps=12, step_fn=lambda *_: 0.5),
        dict(rules=rules.default(frozen_params=rules.FrozenParams(whole=7), spike=None)),
        {"frozen_params"},
    ),
    "own rule before the others": (
        nan_batch,
        dict(rules=[LossAbove(-1.0), *rules.default()]),
        {"loss_above", "nonfinite"},
    ),
    "own rule after the others": (
        nan_batch,
        dict(rules=[*rules.default(), LossAbove(-1.0)]),
        {"loss_above", "nonfinite"},
    ),
    "own rule with the name of another": (spikes, dict(rules=[Spike(100.0)], **LOSS_ONLY), {"spike"}),
    "what a callback adds later": (
        lambda m, model, o: loop(m, model, o, steps=6, step_fn=lambda *_: 0.5),
        dict(callbacks=[*probes.callbacks.default(), Adds()], rules=[*rules.default(), SawLate()]),
        {"frozen_params", "saw_late"},
    ),
    "dead units": (
        lambda m, model, o: loop(m, model, o, steps=6, data=lambda step: (BATCH[0] - 100, BATCH[1])),
        dict(
            callbacks=[
                *probes.callbacks.default(),
                probes.ActivationProbe(lambda model, data: nnx.relu(model(data[0])), window=3),
            ],
            tx=optax.sgd(1e-9),
            watch=True,
        ),
        {"dead_units", "repeated_batch"},
    ),
    "episodes": (frozen_then_not, {}, {"frozen_params"}),
}


def live(folder, run, *, tx=None, dtype=jnp.float32, watch=False, every=1, **settings):
    """Runs it with `folder` as destination; returns the monitor, closed."""
    model, optimizer = build(tx, model=Net(nnx.Rngs(0), dtype))
    if watch:
        optimizer = probes.watch(optimizer, model)
    with probes.Monitor(folder, model=model, optimizer=optimizer, every=every, **settings) as monitor:
        run(monitor, model, optimizer)
    assert monitor.failures == {}
    return monitor


@pytest.mark.parametrize("name", RUNS)
def test_a_run_judged_again_gives_the_same_alerts(name, tmp_path):
    run, settings, expected = RUNS[name]
    monitor = live(tmp_path, run, **settings)
    found = replay(tmp_path)
    (again,) = found.runs
    assert [alert_row(alert) for alert in again.alerts] == [alert_row(alert) for alert in monitor.alerts]
    assert again.differences == () and found.skipped == () and again.notes == ()
    assert {alert.rule for alert in monitor.alerts} == expected


def test_runs_that_write_into_one_file_at_the_same_time_stay_apart(tmp_path):
    model, optimizer = build()
    with (
        probes.Monitor(tmp_path, model=model, optimizer=optimizer, every=1) as first,
        probes.Monitor(tmp_path, model=model, optimizer=optimizer, every=2, rules=[rules.Nonfinite()]) as second,
    ):
        for step in range(6):
            loss = jitted(model, optimizer, NAN_BATCH if step == 3 else batch(step % 4))
            first(step, loss=loss)
            second(step, loss=loss)
    one, other = replay(tmp_path).runs
    assert (one.alerts, other.alerts) == (first.alerts, second.alerts) and first.alerts != second.alerts
    assert replay(tmp_path, run=other.run).runs == (other,)
    assert one.differences == other.differences == ()


def test_nothing_is_judged_after_the_end(tmp_path):
    monitor = live(tmp_path, healthy)
    monitor.on_eval(99, loss=float("nan"), metrics={})
    assert replay(tmp_path).runs[0].alerts == monitor.alerts == ()
