"""Gradients from elsewhere than a watched optimizer: handed over, out of `step_stats`, or computed anew."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import BATCH, Net, batch, build, compiled_once, jitted, mse, nothing_fails_inside  # noqa: F401

import nnx_probes as probes

BATCHES = [batch(seed) for seed in range(8)]
RATE = 0.25


class Cut(Net):
    """The loss does not reach the first layer."""

    def __call__(self, x):
        return self.b(jax.lax.stop_gradient(nnx.tanh(self.a(x))))


class Faded(nnx.Module):
    """The first layer adds a millionth of its output: its gradient is as small."""

    def __init__(self, rngs):
        self.a = nnx.Linear(3, 3, rngs=rngs)
        self.b = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(x + 1e-6 * nnx.tanh(self.a(x)))


class Normed(Net):
    """State that a forward pass changes: running statistics and random counts."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.tanh(self.norm(self.a(x)))))


class Loop:
    """The functional loop with plain jax.jit: the state is carried, the monitor has getters."""

    def __init__(self, model=Net, rate=RATE):
        self.graphdef, self.params, self.rest = nnx.split(model(nnx.Rngs(0)), nnx.Param, ...)
        self.tx = optax.sgd(rate)
        self.state = self.tx.init(self.params)
        self._step = jax.jit(self._run, donate_argnums=(0, 1))

    def _run(self, params, state, data):
        def loss_of(params):
            return mse(nnx.merge(self.graphdef, params, self.rest), data)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = self.tx.update(grads, state, params)
        stats = probes.step_stats(grads=grads, updates=updates, params=params)
        return optax.apply_updates(params, updates), state, (loss, grads, updates, stats)

    def step(self, data):
        """Returns (loss, grads, updates, stats) of one step, on arrays that the step has donated since."""
        self.params, self.state, out = self._step(self.params, self.state, data)
        return out

    def gradient(self, data):
        """The gradient at the present parameters, with nothing of ours."""
        return _gradient(self.graphdef, self.params, self.rest, data)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(graphdef, params, rest, data):
    return jax.grad(lambda params: mse(nnx.merge(graphdef, params, rest), data))(params)


HOW = {
    "handed": lambda out, data: dict(grads=out[1], updates=out[2]),
    "step-stats": lambda out, data: dict(metrics=out[3]),
    "nested-step-stats": lambda out, data: dict(metrics={"accuracy": 0.5, "probes": out[3]}),
    "loss-fn": lambda out, data: dict(batch=data),
}
EVERY_WAY = pytest.mark.parametrize("how", HOW)
WITH_UPDATES = pytest.mark.parametrize("how", [how for how in HOW if how != "loss-fn"])


def run(how, model=Net, *, steps=4, rate=RATE):
    """Trains under a monitor; returns records with gradients, alerts, and the arrays each record is about."""
    loop, writer, about = Loop(model, rate), probes.writers.MemoryWriter(), {}
    callbacks = [
        probes.ParamProbe(),
        probes.OptimizerProbe(),
        probes.LossProbe(),
        probes.GradientProbe(loss_fn=mse if how == "loss-fn" else None),
    ]
    getters = dict(model=lambda: nnx.merge(loop.graphdef, loop.params, loop.rest), optimizer=lambda: loop.state)
    with probes.Monitor(writer, **getters, every=1, callbacks=callbacks) as monitor:
        for i in range(steps):
            data = BATCHES[i % 8]
            params = jax.tree.map(np.asarray, nnx.to_pure_dict(loop.params))
            before = jax.tree.map(np.asarray, nnx.to_pure_dict(loop.gradient(data)))
            out = loop.step(data)
            after = jax.tree.map(np.asarray, nnx.to_pure_dict(loop.gradient(data)))
            about[i] = SimpleNamespace(params=params, grads=after if how == "loss-fn" else before)
            monitor(i, loss=out[0], **HOW[how](out, data))
    assert monitor.failures == {}
    return SimpleNamespace(records=writer.records, alerts=list(monitor.alerts), about=about)


def rows(record, name):
    return dict(zip(record.leaves[name.partition(".")[0]].paths, record.values[name].tolist(), strict=True))


def direct(tree, of):
    """Returns ``"layer.name"`` -> `of` the array, for a pure dict of two levels."""
    return {
        f"{layer}.{name}": float(of(x.astype(np.float64))) for layer, inner in tree.items() for name, x in inner.items()
    }


def close(values):
    return pytest.approx(values, rel=2e-5, abs=1e-7)


@EVERY_WAY
def test_gradients_are_the_ones_a_direct_computation_gives(how):
    found = run(how)
    assert [r.step for r in found.records if "grads.norm" in r] == [0, 1, 2, 3]
    for record in found.records:
        grads = found.about[record.step].grads
        assert rows(record, "grads.norm") == close(direct(grads, np.linalg.norm))
        assert rows(record, "grads.max_abs") == close(direct(grads, lambda x: np.max(np.abs(x))))
        assert rows(record, "grads.zeros") == close(direct(grads, lambda x: np.mean(x == 0)))
        assert not record.values["grads.nonfinite"].any()


@WITH_UPDATES
def test_updates_are_the_ones_the_transformation_returned(how):
    found = run(how)
    for record in found.records:
        about = found.about[record.step]
        norms = {path: RATE * norm for path, norm in direct(about.grads, np.linalg.norm).items()}
        assert rows(record, "updates.norm") == close(norms)
        assert not record.values["updates.nonfinite"].any()
        assert not record.values["updates.absorbed"].any()


@pytest.mark.parametrize("how", ["step-stats", "nested-step-stats"])
def test_update_ratios_out_of_the_step_are_about_the_parameters_before_it(how):
    for record in (found := run(how)).records[1:]:
        about = found.about[record.step]
        params = direct(about.params, np.linalg.norm)
        updates = {path: RATE * norm for path, norm in direct(about.grads, np.linalg.norm).items()}
        assert rows(record, "updates.ratio") == close({path: updates[path] / params[path] for path in params})


def test_update_ratios_of_handed_updates_are_about_the_parameters_after_the_step():
    found = run("handed")
    for record, following in zip(found.records, list(found.about.values())[1:], strict=False):
        params = direct(following.params, np.linalg.norm)
        norms = rows(record, "updates.norm")
        assert rows(record, "updates.ratio") == close({path: norms[path] / params[path] for path in params})


def test_computed_anew_there_are_gradients_and_no_updates():
    assert not any(name.startswith("updates.") for r in run("loss-fn").records for name in r.values)


@EVERY_WAY
def test_elements_that_are_not_finite_are_counted_whatever_they_come_through(how):
    model, optimizer = build()
    grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    grads["a"]["kernel"].set_value(grads["a"]["kernel"][...].at[0, :2].set(jnp.nan).at[1, 0].set(-jnp.inf))

    def spoil(model, data):
        """Its gradient by the first kernel is not finite in 3 places."""
        factor = jnp.zeros((3, 4)).at[0, :2].set(jnp.nan).at[1, 0].set(-jnp.inf)
        return jnp.sum(jnp.where(jnp.isfinite(factor), 0.0, factor * model.a.kernel[...]))

    stats = probes.step_stats(grads=grads)
    out = (None, grads, None, stats)
    writer = probes.writers.MemoryWriter()
    probe = probes.GradientProbe(loss_fn=spoil if how == "loss-fn" else None)
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=1, callbacks=[probe], rules=[]) as monitor:
        monitor(0, **HOW[how](out, BATCH))
    assert monitor.failures == {}
    assert rows(writer.records[0], "grads.nonfinite") == {"a.bias": 0, "a.kernel": 3, "b.bias": 0, "b.kernel": 0}


def test_shares_of_step_stats_lie_between_0_and_1():
    ones = [jnp.ones((n,)) for n in (3, 12, 27)]
    tiny = [1e-9 * x for x in ones]
    stats = jax.jit(lambda: probes.step_stats(grads=ones, updates=tiny, params=ones))()
    assert not stats["probes/grads_zeros"].any()
    assert (stats["probes/absorbed"] == 1).all()


# --- what the rules make of it ------------------------------------------------------------------------------


@EVERY_WAY
def test_a_layer_behind_stop_gradient_is_found(how):
    found = run(how, Cut, steps=12)
    (alert,) = [a for a in found.alerts if a.rule == "zero_gradients"]
    assert (alert.level.name, sorted(alert.paths)) == ("WARN", ["a.bias", "a.kernel"])
    assert alert.causes[0].slug == "gradient_cut"
    assert 7 <= alert.step <= 8  # 8 updates; plain SGD keeps no count that could show when the first took place


@EVERY_WAY
def test_a_loss_that_reaches_no_parameter_is_an_error(how):
    class Detached(Net):
        def __call__(self, x):
            return jax.lax.stop_gradient(super().__call__(x))

    found = run(how, Detached, steps=5)
    (alert,) = [a for a in found.alerts if a.rule == "zero_gradients"]
    assert (alert.level.name, len(alert.paths), alert.causes[0].slug) == ("ERROR", 4, "gradient_cut")
    assert 1 <= alert.step <= 3


@WITH_UPDATES
def test_a_gradient_that_fades_on_its_way_is_found(how):
    found = run(how, Faded, steps=40, rate=1e-2)
    (alert,) = [a for a in found.alerts if a.rule == "vanishing_gradients"]
    assert (alert.level.name, alert.paths) == ("WARN", ("a.kernel",))
    assert 31 <= alert.step <= 36  # 32 updates, counted as above
    assert [c.slug for c in alert.causes] == ["saturated_activations", "bad_initialization"]


@EVERY_WAY
def test_a_sound_run_is_quiet(how):
    assert [a for a in run(how, steps=40).alerts if a.level.name != "INFO"] == []


def test_what_is_handed_over_goes_before_step_stats_and_those_before_computing_anew():
    model, optimizer = build()
    ones = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    twos = jax.tree.map(lambda x: 2 * x, ones)
    writer, calls = probes.writers.MemoryWriter(), []

    def loss_fn(model, data):
        calls.append(1)
        return mse(model, data)

    stats = probes.step_stats(grads=twos)
    probe = probes.GradientProbe(loss_fn=loss_fn)
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=1, callbacks=[probe], rules=[]) as monitor:
        monitor(0, grads=ones, metrics=stats, batch=BATCH)
        monitor(1, metrics=stats, batch=BATCH)
        assert calls == []
        monitor(2, batch=BATCH)
        monitor(3)
    assert monitor.failures == {} and calls
    largest = [r.values["grads.max_abs"].tolist() for r in writer.records[:2]]
    assert largest == [[1.0] * 4, [2.0] * 4]
    assert ["grads.norm" in r for r in writer.records] == [True, True, True, False]


@pytest.mark.parametrize("graph", [True, False], ids=["state", "module"])
def test_gradients_may_be_what_either_mode_of_flax_returns(graph):
    model, optimizer = build()
    grads = nnx.grad(mse, graph=graph)(model, BATCH)
    writer = probes.writers.MemoryWriter()
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=1) as monitor:
        monitor(0, grads=grads)
    assert monitor.failures == {}
    want = direct(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(grads))), np.linalg.norm)
    assert rows(writer.records[0], "grads.norm") == close(want)


def test_gradients_of_plain_pytrees_are_named_by_their_own_paths():
    grads = {"w": [jnp.ones((2, 3)), jnp.zeros((3,))], "b": jnp.full((4,), 2.0)}
    writer = probes.writers.MemoryWriter()
    with probes.Monitor(writer, model=lambda: grads, every=1) as monitor:
        monitor(0, grads=grads)
    assert monitor.failures == {}
    assert rows(writer.records[0], "grads.norm") == close({"b": 4.0, "w.0": np.sqrt(6.0), "w.1": 0.0})


# --- computing anew changes nothing -------------------------------------------------------------------------


@pytest.mark.parametrize("returns", ["loss", "tuple"])
def test_loss_fn_leaves_the_model_bit_identical(returns):
    model, optimizer = build(model=Normed(nnx.Rngs(0)))
    writer = probes.writers.MemoryWriter()

    def loss_fn(model, data):
        loss = mse(model, data)
        return loss if returns == "loss" else (loss, {"n": jnp.ones(())})

    probe = probes.GradientProbe(loss_fn=loss_fn)
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=1, callbacks=[probe], rules=[]) as monitor:
        for step in range(3):
            jitted(model, optimizer, BATCH)
            before = probes.fingerprint(model), probes.fingerprint(optimizer)
            monitor(step, batch=BATCH)
            monitor.flush()
            assert (probes.fingerprint(model), probes.fingerprint(optimizer)) == before
    assert monitor.failures == {}
    assert {"norm.mean", "norm.var", "drop.rngs.count"} <= before[0].keys()
    assert [set(r.leaves["grads"].paths) for r in writer.records] == [
        {"a.bias", "a.kernel", "b.bias", "b.kernel", "norm.bias", "norm.scale"}
    ] * 3


def test_training_beside_loss_fn_gives_the_same_losses_bit_for_bit():
    def losses(callbacks):
        model, optimizer = build(model=Normed(nnx.Rngs(0)))
        found = []
        with probes.Monitor(None, model=model, optimizer=optimizer, every=2, callbacks=callbacks, rules=[]) as monitor:
            for step in range(10):
                found.append(jitted(model, optimizer, BATCHES[step % 8]))
                monitor(step, loss=found[-1], batch=BATCHES[step % 8])
        assert monitor.failures == {}
        return [np.asarray(x).tobytes() for x in found]

    assert losses([probes.GradientProbe(loss_fn=mse)]) == losses([])


# --- arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (dict(loss_fn=3), "ArgumentTypeError", r"GradientProbe\(loss_fn=3\): expected a function .* got int"),
        (dict(loss_fn="mse"), "ArgumentTypeError", r"expected a function of the model and a batch, got str"),
        (dict(every=0), "ArgumentError", r"GradientProbe\(every=0\): expected at least 1"),
        (dict(every=True), "ArgumentTypeError", r"GradientProbe\(every=True\): expected a whole number of steps"),
        (dict(every=2.0), "ArgumentTypeError", r"whole number of steps or .auto., got float"),
        (dict(every="often"), "ArgumentTypeError", r"expected a whole number of steps or 'auto', got str"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_construction(arguments, error, text):
    with pytest.raises(getattr(probes.errors, error), match=text):
        probes.GradientProbe(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (dict(), "ArgumentTypeError", r"step_stats\(\) got nothing"),
        (dict(grads={}), "ArgumentTypeError", r"step_stats\(grads=dict\): expected a pytree of arrays"),
        (dict(grads=[1.0]), "ArgumentTypeError", r"expected a pytree of arrays"),
        (
            dict(grads={"w": np.ones((2,))}, params={"w": np.ones((3,))}),
            "ArgumentError",
            r"params has leaves of shapes \[\(3,\)\].*grads of \[\(2,\)\]",
        ),
    ],
)
def test_step_stats_refuses_what_it_cannot_measure(arguments, error, text):
    with pytest.raises(getattr(probes.errors, error), match=text):
        probes.step_stats(**arguments)


def test_a_batch_that_holds_more_than_arrays_is_no_obstacle():
    model, optimizer = build()
    writer = probes.writers.MemoryWriter()
    probe = probes.GradientProbe(loss_fn=lambda model, data: mse(model, data["xy"]))
    activations = probes.ActivationProbe(lambda model, data: model(data["xy"][0]))
    batch = {"xy": BATCH, "names": ["a", None, "b"], "count": 3}
    callbacks = [probe, activations]
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=1, callbacks=callbacks, rules=[]) as monitor:
        monitor(0, batch=batch)
        monitor(1, batch={**batch, "names": ["c", None, "d"]})
    assert monitor.failures == {}
    assert all("grads.norm" in r and "activations.rms" in r for r in writer.records)
