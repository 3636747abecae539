"""The monitor: what it refuses, what it returns, and that nothing of its own ever reaches the loop."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_probes as probes
from nnx_probes import rules
from nnx_probes.errors import ArgumentError, ArgumentTypeError, ProbesError, WriterError


class Plain(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))


# --- construction: golden texts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            dict(every=0),
            ArgumentError,
            "Monitor(every=0): expected at least 1, the number of steps from probe to probe.",
        ),
        (
            dict(every=2.5),
            ArgumentTypeError,
            "Monitor(every=2.5): expected a whole number of steps or 'auto', got float.",
        ),
        (
            dict(every=True),
            ArgumentTypeError,
            "Monitor(every=True): expected a whole number of steps or 'auto', got bool.",
        ),
        (
            dict(every="often"),
            ArgumentTypeError,
            "Monitor(every='often'): expected a whole number of steps or 'auto', got str.",
        ),
        (dict(budget=0), ArgumentError, "Monitor(budget=0): expected a share of loop time, above 0 and at most 1."),
        (
            dict(budget=float("nan")),
            ArgumentError,
            "Monitor(budget=nan): expected a share of loop time, above 0 and at most 1.",
        ),
        (dict(total_steps=0), ArgumentError, "Monitor(total_steps=0): expected at least 1 step."),
        (
            dict(stop_on="error"),
            ArgumentTypeError,
            "Monitor(stop_on='error'): expected one of Level.INFO, Level.WARN, Level.ERROR or None. Did you mean 'Level.ERROR'?",
        ),
        (
            dict(model=Plain),
            ArgumentTypeError,
            "Monitor(model=Plain) got the class: expected an instance, for example Plain(rngs=...).",
        ),
        (
            dict(model="model.pkl"),
            ArgumentTypeError,
            "found no array in the str: expected a Module, an Optimizer, a State, a pytree of arrays, or a function without "
            "arguments that returns one. Pass the object that your training step changes.",
        ),
        (
            dict(callbacks=[probes.ParamProbe]),
            ArgumentTypeError,
            "callbacks: <class 'nnx_probes.callbacks.params.ParamProbe'> is no Callback. Pass instances of (subclasses of) "
            "Callback.",
        ),
        (
            dict(rules=[rules.Nonfinite]),
            ArgumentTypeError,
            "rules: <class 'nnx_probes.host.rules.nonfinite.Nonfinite'> is no Rule. Pass instances, for example "
            "rules.Nonfinite().",
        ),
    ],
)
def test_a_bad_argument_is_told_in_full_at_construction(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        probes.Monitor(None, **arguments)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ArgumentError, match=re.escape("the model has no nnx.Param, only Variable. Wrap the arrays")):
        probes.Monitor(None, model=Plain())


def test_an_optimizer_of_another_model_is_refused(training):
    other = nnx.Optimizer(nnx.Linear(7, 5, rngs=nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param)
    text = (
        "the optimizer keeps state for another model: its 'opt_state.0.mu.bias' has shape (5,), and no leaf of the Net"
    )
    with pytest.raises(ArgumentError, match=re.escape(text)):
        probes.Monitor(None, model=training.model, optimizer=other)


def test_deleted_arrays_are_refused(training):
    training.model.a.kernel.get_value().delete()
    with pytest.raises(ArgumentError, match=re.escape("1 of 4 arrays are deleted, first 'a.kernel'")):
        probes.Monitor(None, model=training.model)


def test_building_a_monitor_inside_a_compiled_function_is_refused(training):
    @nnx.jit
    def build(model):
        probes.Monitor(None, model=model)

    with pytest.raises(ArgumentError, match="was built inside a compiled function"):
        build(training.model)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriterError, match="file"):
        probes.Monitor(tmp_path / "file")


def test_a_destination_of_a_wrong_type_is_refused():
    with pytest.raises(ArgumentTypeError):
        probes.Monitor(3)


def test_a_rule_that_nothing_serves_is_refused():
    @dataclass(frozen=True)
    class Mine(probes.Rule):
        slug = "mine"
        reads = ("params.norms",)

        def check(self, record, history):
            return None

    assert probes.Monitor(None, rules=[Mine()]).alerts == ()  # params.* may hold it
    with pytest.raises(ArgumentError, match=re.escape("'mine' reads 'params.norms', which no callback provides")):
        probes.Monitor(None, callbacks=[probes.LossProbe()], rules=[Mine()])


def test_every_error_is_a_builtin_and_has_one_root():
    for error in (ArgumentError, ArgumentTypeError, WriterError):
        assert issubclass(error, ProbesError)
    assert issubclass(ArgumentError, ValueError) and issubclass(ArgumentTypeError, TypeError)
    assert issubclass(WriterError, OSError)


# --- during a run: alerts instead of exceptions -------------------------------------------------------------


def usage(monitor):
    return [(a.level.name, a.title, a.message) for a in monitor.alerts if a.rule == "usage"]


def test_a_step_that_is_no_number_is_told_and_the_run_goes_on(training):
    with probes.Monitor(None, model=training.model, every=1) as monitor:
        assert monitor("3", loss=1.0) is False
        assert monitor(None) is False
        assert monitor(4, loss=training.step()) is True
    assert usage(monitor) == [
        (
            "WARN",
            "The step is not a number",
            "monitor(step) got '3' (str): expected a whole number, the index of the step just completed. This call was "
            "passed over; pass for example the counter of enumerate().",
        )
    ]


def test_steps_that_go_backwards_are_told_once(training):
    with probes.Monitor(None, model=training.model, optimizer=training.optimizer, every=5) as monitor:
        for step in (0, 1, 2, 0, 1, 2, 0):
            monitor(step, loss=training.step())
    assert [m for _, _, m in usage(monitor)] == [
        "monitor(step) got step 0 after step 2: expected steps that grow. Curves will fold back on themselves; count on "
        "across epochs, or call monitor.mark(step, 'restart') where a restart is meant."
    ]


def test_a_loss_of_two_elements_is_told(training):
    with probes.Monitor(None, model=training.model, every=1) as monitor:
        monitor(0, loss=jnp.ones(2))
    assert [m for _, _, m in usage(monitor)] == [
        "monitor(loss=...) got 2 elements: expected one number. The loss was not recorded; reduce it first, for example "
        "loss.mean()."
    ]


def test_a_call_inside_a_compiled_function_is_told_and_does_not_raise(training):
    with probes.Monitor(None, model=training.model, every=1) as monitor:

        @nnx.jit
        def step(model, x):
            loss = jnp.sum(model(x))
            monitor(0, loss=loss, model=model)
            return loss

        step(training.model, jnp.ones((1, 3)))
    assert [t for _, t, _ in usage(monitor)] == ["The monitor is called inside a compiled function"]


def test_a_step_that_is_a_tracer_is_told(training):
    monitor = probes.Monitor(None, model=training.model, every=1)
    jax.jit(lambda s: (monitor(s), s)[1])(jnp.int32(3))
    assert [t for _, t, _ in usage(monitor)] == ["The step is not a number"]


@pytest.mark.parametrize("step", [np.int64(4), np.uint8(4), jnp.int32(4)])
def test_other_integers_are_steps_too(training, step):
    monitor = probes.Monitor(None, model=training.model, every=2, sync=True)
    assert monitor(step) is True and usage(monitor) == []


def test_arrays_deleted_during_the_run_are_told_in_words(training):
    with probes.Monitor(None, model=training.model, every=1) as monitor:
        monitor(0)
        for leaf in jax.tree.leaves(nnx.state(training.model)):
            leaf.delete()
        monitor(1)
    assert [(a.rule, a.causes[0].slug) for a in monitor.alerts] == [("lost_update", "stale_view")]


# --- nothing of ours reaches the loop -----------------------------------------------------------------------


class Broken(probes.Callback):
    def on_step_end(self, ctx):
        raise RuntimeError("on purpose")

    on_train_begin = on_eval_end = on_alert = on_train_end = on_step_end


class BrokenRule(probes.Rule):
    slug = "broken"

    def check(self, record, history):
        raise RuntimeError("on purpose")


def test_a_broken_callback_and_a_broken_rule_are_counted_and_passed_over(training, caplog):
    callbacks = [Broken(), probes.ParamProbe(), probes.LossProbe()]
    monitor = probes.Monitor(None, model=training.model, callbacks=callbacks, rules=[BrokenRule()], every=1)
    for step in range(4):
        assert monitor(step, loss=training.step())
    monitor.close()
    assert monitor.failures["Broken.on_step_end"] == 4
    assert sum("on purpose" in r.message for r in caplog.records if "Broken.on_step_end" in r.message) == 1
    assert sum("rule broken failed" in r.getMessage() for r in caplog.records) == 1


def test_a_broken_writer_is_counted_and_passed_over(training, caplog):
    class Bad:
        def __getattr__(self, name):
            def fail(*args, **kwargs):
                raise OSError("no space left on device")

            return fail

    with probes.Monitor(Bad(), model=training.model, every=1) as monitor:
        for step in range(5):
            monitor(step, loss=training.step())
    assert sum("no space left" in r.getMessage() for r in caplog.records) == 1


def test_an_exception_of_the_user_passes_through_and_pending_results_are_kept(training):
    memory = probes.writers.MemoryWriter()
    with pytest.raises(ZeroDivisionError), probes.Monitor(memory, model=training.model, every=1) as monitor:
        monitor(0, loss=training.step())
        raise ZeroDivisionError
    assert [r.step for r in memory.records] == [0] and not memory.closed  # it is the caller's


# --- what it returns ----------------------------------------------------------------------------------------


def test_it_says_which_steps_were_probed(training):
    monitor = probes.Monitor(None, model=training.model, every=4)
    assert [s for s in range(12) if monitor(s)] == [0, 4, 8]


def test_steps_that_skip_are_probed_when_a_multiple_is_passed(training):
    monitor = probes.Monitor(None, model=training.model, every=10)
    assert [s for s in range(0, 50, 7) if monitor(s)] == [0, 14, 21, 35, 42]


def test_a_resumed_run_is_probed_at_its_first_step(training):
    monitor = probes.Monitor(None, model=training.model, every=100)
    assert [s for s in range(1234, 1500) if monitor(s)] == [1234, 1300, 1400]


def test_callbacks_have_intervals_of_their_own(training):
    memory = probes.writers.MemoryWriter()
    callbacks = [probes.LossProbe(every=2), probes.ParamProbe(every=6)]
    with probes.Monitor(memory, model=training.model, callbacks=callbacks) as monitor:
        for step in range(8):
            monitor(step, loss=training.step())
    assert [(r.step, "params.norm" in r) for r in memory.records] == [(0, True), (2, False), (4, False), (6, True)]


def test_should_stop_follows_the_level_and_never_goes_back(training):
    monitor = probes.Monitor(None, model=training.model, every=1, stop_on=probes.Level.ERROR, sync=True)
    monitor(0, loss=1.0)
    assert not monitor.should_stop
    monitor(1, loss=float("nan"))
    assert monitor.should_stop
    monitor(2, loss=1.0)
    assert monitor.should_stop and monitor.alerts[0].level is probes.Level.ERROR


def test_side_metrics_alone_are_a_warning(training):
    with probes.Monitor(None, model=training.model, every=1) as monitor:
        metrics = {"acc": jnp.float32("nan"), "deep": {"n": 3}, "note": "ok", "none": None, "list": [jnp.ones((1,))]}
        monitor(0, loss=training.step(), metrics=metrics)
    assert [(a.rule, a.level.name, a.paths) for a in monitor.alerts] == [("nonfinite", "WARN", ("metrics.acc",))]


def test_evaluation_results_are_recorded(training):
    memory = probes.writers.MemoryWriter()
    with probes.Monitor(memory, model=training.model) as monitor:
        monitor(0)
        monitor.on_eval(0, loss=jnp.float32(0.25), metrics={"accuracy": 0.5})
    assert memory.records[-1].values["eval.loss"] == 0.25 and memory.records[-1].values["eval.accuracy"] == 0.5


def test_closing_twice_is_fine_and_calls_after_it_are_passed_over(training):
    monitor = probes.Monitor(None, model=training.model, every=1)
    monitor(0)
    monitor.close()
    monitor.close()
    assert monitor(1) is False


def test_batches_pass_through_unchanged_and_are_remembered(training):
    memory = probes.writers.MemoryWriter()
    data = [training.batch() for _ in range(3)]
    with probes.Monitor(memory, model=training.model, every=1) as monitor:
        for step, batch in enumerate(monitor.batches(data)):
            assert batch is data[step]
            monitor(step)
    assert all("batch.nonfinite" in r for r in memory.records)


def test_the_overhead_is_a_share_of_the_loop(training):
    monitor = probes.Monitor(None, model=training.model, every=1)
    assert monitor.overhead == 0
    for step in range(5):
        monitor(step, loss=training.step())
    assert 0 < monitor.overhead < 1


def test_a_monitor_is_a_callback_of_another_loop(training):
    inner = probes.Monitor(None, every=1)
    callback: probes.Callback = inner
    from nnx_probes.callbacks import Context

    callback.on_step_end(Context(0, loss=float("nan"), model=training.model))
    callback.on_train_end(Context(0))
    assert [a.rule for a in inner.alerts] == ["nonfinite"]


def test_fit_runs_the_loop_and_stops_when_told():
    from conftest import Run

    run = Run()
    monitor = probes.Monitor(
        None, model=run.model, optimizer=run.optimizer, every=1, stop_on=probes.Level.ERROR, sync=True
    )
    bad = (
        run.batch() if i < 5 else (np.full((8, 3), np.nan, np.float32), np.zeros((8, 2), np.float32)) for i in range(99)
    )
    done = probes.fit(lambda m, o, b: run.step(b), run.model, run.optimizer, bad, steps=50, callbacks=[monitor])
    assert done == 6 and monitor.alerts[0].causes[0].slug == "nonfinite_batch"


def test_fit_refuses_what_cannot_work(training):
    with pytest.raises(ArgumentError, match=re.escape("fit(steps=0): expected at least 1.")):
        probes.fit(lambda *a: 0, training.model, training.optimizer, [], steps=0)
    with pytest.raises(ArgumentError, match="go together"):
        probes.fit(lambda *a: 0, training.model, training.optimizer, [], steps=1, eval_every=3)


def test_the_words_of_an_alert_are_plain(training):
    step = jax.jit(lambda model, optimizer, batch: optimizer.update(model, nnx.grad(_loss)(model, batch)) and None)
    with probes.Monitor(None, model=training.model, optimizer=training.optimizer, every=1) as monitor:
        for i in range(4):
            step(training.model, training.optimizer, training.batch())
            monitor(i, loss=0.5)
    (alert,) = monitor.alerts
    assert (alert.rule, alert.title) == ("frozen_params", "No parameter moves")
    assert alert.message == (
        "All 4 trained parameters are bit-equal over 3 updates (last change at or before step 0). optimizer.step is 0."
    )
    cause = alert.causes[0]
    assert cause.slug == "state_dropped" and cause.title == "The step works on copies and its new state is thrown away"
    assert cause.why == (
        "Parameters, optimizer state and optimizer.step (0) all stand still; the loss is bit-equal at 0.5."
    )
    assert cause.fix.startswith("Use @nnx.jit instead of @jax.jit on the step")


def _loss(model, batch):
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)
