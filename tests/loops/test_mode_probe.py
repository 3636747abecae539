"""How layers are set, what an evaluation leaves behind, and running state that stands still, in real loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rig import compiled_once, nothing_fails_inside  # noqa: F401

import nnx_probes as probes
from nnx_probes.device.modes import Modes
from nnx_probes.writers import MemoryWriter

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.2):
        self.lin = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.lin(x)))))


def loss_of(model, x):
    return jnp.mean((model(x) - x[:, :1]) ** 2)


@nnx.jit
def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


@jax.jit
def parameters_only(graphdef, parameters, others, x):
    """The step of somebody who takes the parameters for all there is."""
    model, optimizer = nnx.merge(graphdef, parameters, others)
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss, nnx.state((model, optimizer), (nnx.Param, nnx.optimizer.OptState))


def thrown_away(model, optimizer, x):
    graphdef, parameters, others = nnx.split((model, optimizer), (nnx.Param, nnx.optimizer.OptState), ...)
    loss, new = parameters_only(graphdef, parameters, others, x)
    nnx.update((model, optimizer), new)
    return loss


def loop(step=train, *, before=lambda model: None, evaluate=None, steps=12, every=1, rate=0.2):
    """Returns (alerts above INFO, records)."""
    model = Net(nnx.Rngs(0), rate)
    optimizer, writer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), MemoryWriter()
    before(model)
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=every) as monitor:
        for i in range(steps):
            loss = step(model, optimizer, X + i)
            monitor(i, loss=loss)
            if evaluate is not None and i % 5 == 4:
                evaluate(model)
                monitor.on_eval(i, loss=1.0)
    assert monitor.failures == {}
    return [a for a in monitor.alerts if a.level > probes.Level.INFO], writer.records


def in_training_mode(model):
    model(X)


def on_a_view(model):
    nnx.view(model, deterministic=True, use_running_average=True)(X)


def and_forgotten(model):
    model.eval()
    model(X)


def and_set_back(model):
    and_forgotten(model)
    model.train()


def told(alerts):
    return [(a.rule, a.level.name, a.causes[0].slug) for a in alerts]


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("evaluate", [None, on_a_view, and_set_back])
def test_a_healthy_loop_is_quiet(evaluate, every):
    alerts, records = loop(evaluate=evaluate, every=every)
    assert told(alerts) == []
    assert {(r.values["mode.dropout_train"], r.values["mode.norm_train"]) for r in records if "loss" in r} == {(1, 1)}


def test_layers_set_to_evaluation_are_counted_and_named():
    _, records = loop(before=lambda m: m.eval(), steps=1)
    values = records[0].values
    assert {n: v for n, v in values.items() if n.startswith("mode.")} == {
        "mode.dropout_eval": 1,
        "mode.dropout_train": 0,
        "mode.norm_eval": 1,
        "mode.norm_train": 0,
        "mode.first": "drop",
    }


def test_a_dropout_whose_rate_is_0_is_no_switch():
    _, records = loop(steps=1, rate=0.0)
    assert (records[0].values["mode.dropout_train"], records[0].values["mode.norm_train"]) == (0, 1)


def test_a_call_to_train_that_was_forgotten_is_told():
    alerts, _ = loop(evaluate=and_forgotten, steps=14)
    assert told(alerts) == [("stale_state", "WARN", "eval_mode_left_on")]
    assert alerts[0].step == 7  # evaluation after step 4; 5, 6 and 7 are the three updates with nothing new
    assert {"norm.mean", "norm.var"} <= set(alerts[0].paths)


@pytest.mark.parametrize("every", [1, 2])
def test_running_state_that_is_thrown_away_is_told(every):
    alerts, _ = loop(thrown_away, steps=16, every=every)
    assert told(alerts) == [("stale_state", "WARN", "state_dropped")]
    assert {"norm.mean", "norm.var"} <= set(alerts[0].paths) and any("drop" in path for path in alerts[0].paths)
    assert [c.slug for c in alerts[0].causes].count("rng_not_advancing") == 1


def test_an_evaluation_in_training_mode_is_told_at_once():
    alerts, _ = loop(evaluate=in_training_mode, steps=6)
    assert told(alerts) == [("stale_state", "ERROR", "train_mode_in_eval")]
    assert alerts[0].step == 4 and {"norm.mean", "norm.var"} <= set(alerts[0].paths)
    assert not any(path.endswith("kernel") for path in alerts[0].paths)


def test_an_evaluation_that_trains_is_told():
    def trains(model):
        model.lin.kernel[...] += 1.0

    alerts, _ = loop(evaluate=trains, steps=6)
    assert [(a.rule, a.level.name, a.paths) for a in alerts if a.rule == "stale_state"] == [
        ("stale_state", "WARN", ("lin.kernel",))
    ]


def test_a_module_put_in_anothers_place_is_seen_in_the_end():
    model, modes = Net(nnx.Rngs(0)), Modes()
    assert [(s.path, s.dropout, s.evaluating) for s in modes.read(model)] == [
        ("drop", True, False),
        ("norm", False, False),
    ]
    model.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1), deterministic=True)
    assert any([s.evaluating for s in modes.read(model)] == [True, False] for _ in range(70))


def test_another_model_is_another_answer():
    modes = Modes()
    assert len(modes.read(Net(nnx.Rngs(0)))) == 2
    assert modes.read(nnx.Linear(2, 2, rngs=nnx.Rngs(0))) == []
    assert modes.read({"w": X}) is None


def test_a_model_in_the_place_of_one_that_is_gone_is_another(monkeypatch):
    monkeypatch.setattr("nnx_probes.device.modes.id", lambda x: 1, raising=False)  # as where an address is given again

    class Maybe(nnx.Module):
        def __init__(self, dropping):
            self.drop = nnx.Dropout(0.5 if dropping else 0.0, deterministic=True)

    modes = Modes()
    for i in (0, 1, 0, 1):
        assert len(modes.read(Maybe(i % 2))) == i % 2


def test_layers_that_leave_the_choice_to_the_call_do_not_count():
    class Own(nnx.Module):
        def __init__(self):
            self.use_running_average = None

    assert Modes().read(Own()) == []


@pytest.mark.parametrize("how", ["mix64", "watch"])
def test_an_evaluation_is_compared_by_the_method_that_the_probe_used(how):
    model, writer = Net(nnx.Rngs(0)), MemoryWriter()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    chosen = probes.callbacks.default()
    if how == "mix64":
        chosen = (probes.callbacks.ParamProbe(fingerprints="mix64"), *chosen[1:])
    else:
        optimizer = probes.watch(optimizer, model, fingerprints=True)
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=1, callbacks=chosen) as monitor:
        for i in range(2):
            monitor(i, loss=train(model, optimizer, X + i))
        in_training_mode(model)
        monitor.on_eval(1, loss=1.0)
        monitor(2, loss=train(model, optimizer, X))
        monitor.on_eval(2, loss=1.0)
    first, second = (r.values["eval.changed"] for r in writer.records if "eval.loss" in r)
    assert {"norm.mean", "norm.var"} <= set(first) and second == ()


def test_where_nothing_can_be_compared_nothing_is_claimed():
    model, writer = Net(nnx.Rngs(0)), MemoryWriter()
    state = nnx.state(model)
    with probes.Monitor(writer, model=lambda: state, every=1) as monitor:
        jax.tree.map(lambda x: x.delete(), state)
        monitor(0)
        state = nnx.state(Net(nnx.Rngs(0)))
        monitor.on_eval(0, loss=1.0)
    assert not any("eval.changed" in record for record in writer.records)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("every", [1, 100])
def test_what_was_trained_since_the_probed_step_is_not_held_against_the_evaluation(given, every):
    model, writer = Net(nnx.Rngs(0)), MemoryWriter()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with probes.Monitor(writer, model=model, optimizer=optimizer if given else None, every=every) as monitor:
        for i in range(10):
            loss = train(model, optimizer, X + i)
            if i % 100 == 0:  # and where every=1, the loop itself calls at some steps only
                monitor(i, loss=loss)
        monitor.on_eval(0, loss=1.0)  # counted in epochs
    assert not any(name in r for r in writer.records for name in ("eval.changed", "eval.kinds", "eval.stepped"))


@pytest.mark.parametrize("given", [True, False])
def test_an_evaluation_right_after_the_probed_step_is_compared(given):
    model, writer = Net(nnx.Rngs(0)), MemoryWriter()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with probes.Monitor(writer, model=model, optimizer=optimizer if given else None, every=100) as monitor:
        monitor(0, loss=train(model, optimizer, X))
        in_training_mode(model)
        monitor.on_eval(0, loss=1.0)
    (record,) = [r for r in writer.records if "eval.loss" in r]
    assert {"norm.mean", "norm.var"} <= set(record.values["eval.changed"])
    assert record.get("eval.stepped") is (False if given else None)


def test_an_evaluation_that_runs_the_training_step_is_told_where_each_step_is_probed():
    model, writer = Net(nnx.Rngs(0)), MemoryWriter()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with probes.Monitor(writer, model=model, optimizer=optimizer, every=1) as monitor:
        for i in range(3):
            monitor(i, loss=train(model, optimizer, X + i))
        train(model, optimizer, X)
        monitor.on_eval(2, loss=1.0)
    (record,) = [r for r in writer.records if "eval.loss" in r]
    assert "lin.kernel" in record.values["eval.changed"] and record.values["eval.stepped"] is True
