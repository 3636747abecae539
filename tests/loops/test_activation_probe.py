"""ActivationProbe: dead units are told at the end of their window, and the first module that makes a NaN is named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import Net, batch, build, compiled_once, mse, nothing_fails_inside, train  # noqa: F401

import nnx_probes as probes

WIDE = [
    (jax.random.normal(jax.random.key(seed), (64, 3)), jax.random.normal(jax.random.key(100 + seed), (64, 2)))
    for seed in range(4)
]
DONATED = nnx.jit(train, donate_argnums=(0, 1))
STEPS = {"plain": nnx.jit(train), "donated": DONATED}


class Rectified(nnx.Module):
    """One hidden ReLU layer whose units all get `bias` at the start."""

    def __init__(self, rngs, bias=0.0):
        self.a = nnx.Linear(3, 8, rngs=rngs)
        self.b = nnx.Linear(8, 2, rngs=rngs)
        self.a.bias[...] += bias

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def forward(model, data):
    return model(data[0])


def observe(model, *, steps, every=1, step=STEPS["plain"], tx=None, data=WIDE, rules=None, **settings):
    """Trains under a monitor with an ActivationProbe; returns (records that have activations, alerts)."""
    model, optimizer = build(optax.sgd(1e-3) if tx is None else tx, model=model)
    writer = probes.writers.MemoryWriter()
    callbacks = [*probes.callbacks.default(), probes.ActivationProbe(forward, **settings)]
    chosen = {} if rules is None else {"rules": rules}
    with probes.Monitor(
        writer, model=model, optimizer=optimizer, every=every, callbacks=callbacks, **chosen
    ) as monitor:
        for i in range(steps):
            one = data[i % len(data)]
            monitor(i, loss=step(model, optimizer, one), batch=one)
    assert monitor.failures == {}
    return [r for r in writer.records if "activations.rms" in r], list(monitor.alerts)


def at(record, path, name="dead"):
    return float(record.values[f"activations.{name}"][record.leaves["activations"].paths.index(path)])


# --- dead units ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("every", "window", "told_at"), [(1, 12, 11), (5, 12, 15)])
def test_a_dead_layer_is_an_error_at_the_end_of_the_window_and_not_before(step, every, window, told_at):
    model = Rectified(nnx.Rngs(0), bias=-1e3)
    records, alerts = observe(model, steps=told_at + 4, every=every, window=window, step=STEPS[step])
    (alert,) = [a for a in alerts if a.rule == "dead_units"]
    assert (alert.step, alert.level.name, alert.paths) == (told_at, "ERROR", ("a > relu",))
    assert alert.causes[0].slug == "dead_relu"
    assert f"for {window} steps" in alert.message
    assert [at(r, "a > relu") for r in records] == [float(r.step >= told_at) for r in records]
    assert all(at(r, "a > relu", "max_abs") == 0 for r in records)


def test_a_layer_of_which_nine_units_in_ten_are_dead_is_a_warning():
    model = Rectified(nnx.Rngs(0))
    model.a = nnx.Linear(3, 10, rngs=nnx.Rngs(0))
    model.b = nnx.Linear(10, 2, rngs=nnx.Rngs(1))
    model.a.bias[...] += jnp.where(jnp.arange(10) == 4, 1e3, -1e3)
    records, alerts = observe(model, steps=6, window=4, tx=optax.sgd(0.0), rules=[probes.rules.DeadUnits()])
    assert [(a.step, a.level.name, a.paths) for a in alerts] == [(3, "WARN", ("a > relu",))]
    assert at(records[-1], "a > relu") == pytest.approx(0.9)


def test_a_layer_of_zeros_whose_units_are_all_alive_is_quiet():
    model = Rectified(nnx.Rngs(0))
    scale = jnp.sqrt(jnp.sum(model.a.kernel[...] ** 2, axis=0))  # of each unit's input on standard normal samples
    model.a.bias[...] = -0.8416 * scale  # 80 % of a normal distribution lie below
    zeros = np.mean([np.asarray(nnx.relu(model.a(x)) == 0).mean() for x, _ in WIDE])
    assert 0.75 < zeros < 0.85
    records, alerts = observe(model, steps=20, window=4)
    assert alerts == []
    assert all(at(r, "a > relu") == 0 for r in records)


def test_a_unit_that_fires_once_in_a_window_is_alive():
    """It sees a positive input in one batch of four."""
    model = Rectified(nnx.Rngs(0))
    model.a.kernel[...] = jnp.zeros((3, 8)).at[0].set(1.0)
    negative = (jnp.full((4, 3), -1.0), jnp.zeros((4, 2)))
    positive = (jnp.full((4, 3), 1.0), jnp.zeros((4, 2)))
    data = [negative, negative, negative, positive]
    rules = [probes.rules.DeadUnits()]
    _, alerts = observe(model, steps=16, window=5, data=data, tx=optax.sgd(0.0), rules=rules)
    assert alerts == []
    _, alerts = observe(model, steps=16, window=5, data=data[:3], tx=optax.sgd(0.0), rules=rules)
    assert [(a.step, a.paths[0]) for a in alerts] == [(4, "a > relu")]


def test_outputs_are_measured_as_a_direct_forward_pass_gives_them():
    model = Rectified(nnx.Rngs(0))
    params = jax.tree.map(jnp.copy, nnx.state(model))
    records, _ = observe(model, steps=1)
    before = nnx.merge(nnx.graphdef(model), params)
    a = before.a(WIDE[0][0])
    want = {"a": a, "a > relu": nnx.relu(a), "b": before.b(nnx.relu(a)), "model": before.b(nnx.relu(a))}
    assert set(records[0].leaves["activations"].paths) >= {"a", "a > relu", "b"}
    for path in records[0].leaves["activations"].paths:
        x = np.asarray(want[path], np.float64)
        assert at(records[0], path, "rms") == pytest.approx(np.sqrt(np.mean(x**2)), rel=1e-5)
        assert at(records[0], path, "max_abs") == pytest.approx(np.abs(x).max(), rel=1e-6)


# --- where a NaN begins -------------------------------------------------------------------------------------


class Log(nnx.Module):
    """Holds for inputs below 50 only."""

    def __call__(self, x):
        return jnp.log(50.0 - x)


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.middle = nnx.List([nnx.Linear(4, 4, rngs=rngs), Log()])
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        h = self.first(x)
        for layer in self.middle:
            h = layer(h)
        return self.last(h)


def long_batches(bad):
    """Finite batches; the one at step `bad` is large enough to leave the domain of the logarithm."""
    data = [batch(seed) for seed in range(bad + 1)]
    return [*data[:bad], (data[bad][0] * 1e4, data[bad][1])]


def cause_of(alerts):
    alert = next(a for a in alerts if a.rule == "nonfinite")
    return alert, next(c for c in alert.causes if c.slug == "nonfinite_in_forward")


@pytest.mark.parametrize("step", STEPS)
def test_the_first_module_whose_output_is_not_finite_is_named(step):
    _, alerts = observe(Deep(nnx.Rngs(0)), steps=4, data=long_batches(3), step=STEPS[step])
    alert, cause = cause_of(alerts)
    assert alert.step == 3 and alert.causes[0] is cause
    assert "the first module whose output is not finite is middle.1." in cause.why


def test_without_a_copy_it_is_named_while_the_parameters_stay_finite():
    guarded = optax.apply_if_finite(optax.sgd(1e-3), 3)
    records, alerts = observe(Deep(nnx.Rngs(0)), steps=4, data=long_batches(3), tx=guarded, copy=False)
    alert, cause = cause_of(alerts)
    assert alert.step == 3
    assert "the first module whose output is not finite is middle.1." in cause.why
    assert not any(r.values["activations.before"] for r in records)


def test_without_a_copy_no_module_is_accused_once_the_parameters_are_nan():
    records, alerts = observe(Deep(nnx.Rngs(0)), steps=4, data=long_batches(3), copy=False)
    _, cause = cause_of(alerts)
    assert "the first module" not in cause.why
    assert records[-1].values["activations.nonfinite"].all()


def test_a_copy_is_of_the_parameters_before_the_step():
    records, _ = observe(Deep(nnx.Rngs(0)), steps=4, data=long_batches(3), step=DONATED)
    assert all(r.values["activations.before"] for r in records)
    paths, counts = records[-1].leaves["activations"].paths, records[-1].values["activations.nonfinite"]
    bad = [path for path, count in zip(paths, counts, strict=True) if count]
    assert not {"first", "middle.0"} & set(bad) and {"middle.1", "last"} <= set(bad)


# --- it changes nothing -------------------------------------------------------------------------------------


class Normed(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.norm(self.a(x)))))


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_training_beside_the_probe_gives_the_same_bits(step, copy):
    def run(callbacks):
        model, optimizer = build(model=Normed(nnx.Rngs(0)))
        losses = []
        with probes.Monitor(None, model=model, optimizer=optimizer, every=2, callbacks=callbacks, rules=[]) as monitor:
            for i in range(8):
                losses.append(np.asarray(STEPS[step](model, optimizer, WIDE[i % 4])).tobytes())
                monitor(i, batch=WIDE[i % 4])
        assert monitor.failures == {}
        return losses, probes.fingerprint(model), probes.fingerprint(optimizer)

    assert run([probes.ActivationProbe(forward, copy=copy)]) == run([])


def test_random_state_is_the_one_the_step_used():
    """With dropout the probe's forward pass gives the very loss of the step."""
    seen = []

    def noting(model, data):
        loss = mse(model, data)
        jax.debug.callback(lambda x: seen.append(float(x)), loss)
        return loss

    model, optimizer = build(model=Normed(nnx.Rngs(0)))
    callbacks, losses = [probes.ActivationProbe(noting)], []
    with probes.Monitor(None, model=model, optimizer=optimizer, every=1, callbacks=callbacks, rules=[]) as monitor:
        for i in range(4):
            losses.append(float(DONATED(model, optimizer, WIDE[i])))
            monitor(i, batch=WIDE[i])
    jax.effects_barrier()
    assert monitor.failures == {}
    assert seen == pytest.approx(losses, rel=1e-6)


def test_without_a_batch_nothing_is_measured():
    model, optimizer = build()
    writer = probes.writers.MemoryWriter()
    callbacks = [*probes.callbacks.default(), probes.ActivationProbe(forward)]
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=1, callbacks=callbacks) as monitor:
        monitor(0, loss=1.0)
    assert monitor.failures == {} and len(writer.records) == 1
    assert not any(name.startswith("activations.") for name in writer.records[0].values)


# --- arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "settings", "error", "text"),
    [
        (3, {}, "ArgumentTypeError", r"ActivationProbe\(forward=int\): expected a function of the model and a batch"),
        (Rectified(nnx.Rngs(0)), {}, "ArgumentTypeError", r"ActivationProbe\(forward=Rectified\): expected a function"),
        (forward, dict(window=0), "ArgumentError", r"ActivationProbe\(window=0\): expected a whole number of steps"),
        (forward, dict(window=True), "ArgumentError", r"ActivationProbe\(window=True\)"),
        (forward, dict(window=2.5), "ArgumentError", r"ActivationProbe\(window=2.5\)"),
        (forward, dict(every=0), "ArgumentError", r"ActivationProbe\(every=0\): expected at least 1"),
        (
            forward,
            dict(every="often"),
            "ArgumentTypeError",
            r"ActivationProbe\(every='often'\): expected a whole number",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_construction(forward, settings, error, text):
    with pytest.raises(getattr(probes.errors, error), match=text):
        probes.ActivationProbe(forward, **settings)


# --- the copy of the parameters -----------------------------------------------------------------------------


def kept_by(model):
    """Returns how many arrays of the size of the model's first kernel are alive."""
    shape = model.a.kernel[...].shape
    return sum(x.shape == shape for x in jax.live_arrays())


def test_the_copy_is_let_go_of_when_the_run_ends_before_the_due_step():
    model, optimizer = build(model=Rectified(nnx.Rngs(0)))
    probe = probes.ActivationProbe(forward)
    with probes.Monitor(None, model=model, optimizer=optimizer, every=4, callbacks=[probe]) as monitor:
        for i in range(4):
            monitor(i, loss=STEPS["plain"](model, optimizer, WIDE[0]), batch=WIDE[0])
        before = kept_by(model)
    assert kept_by(model) == before - 1


@pytest.mark.parametrize(
    ("steps", "before"), [((0, 1, 2, 3, 4), [True, True]), ((3, 1), [True, False]), ((3, 9), [True, False])]
)
def test_a_copy_is_used_for_the_step_after_it_only(steps, before):
    model, optimizer = build(model=Rectified(nnx.Rngs(0)))
    writer = probes.writers.MemoryWriter()
    callbacks = [probes.ActivationProbe(forward)]
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=4, callbacks=callbacks) as monitor:
        for i in steps:
            monitor(i, loss=STEPS["plain"](model, optimizer, WIDE[0]), batch=WIDE[0])
    assert [r.values["activations.before"] for r in writer.records if "activations.before" in r] == before
