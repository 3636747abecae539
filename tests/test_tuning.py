"""What each interval costs: measured on copies, as a table and as JSON."""

from __future__ import annotations

import json
import textwrap
import time

import numpy as np
import pytest
from flax import nnx

import nnx_probes as probes
from nnx_probes import cli
from nnx_probes.callbacks import Callback
from nnx_probes.errors import ArgumentError, ArgumentTypeError
from nnx_probes.host.pace import LADDER
from nnx_probes.tuning import Cost, Tuning, load, tune

FOUND = Tuning(
    step_s=0.01, budget=0.01, callbacks=(Cost("ParamProbe", 0.004, 100), Cost("LossProbe", 1e-5, 1)), rest_s=0.00199
)


class Slow(Callback):
    provides = ("slow.seen",)

    def on_step_end(self, ctx):
        time.sleep(0.02)


class SlowAhead(Callback):
    """Whatever it prepares makes the next step longer."""

    def before_due(self, ctx):
        self.asked = True


def state_of(training):
    import jax

    return [
        np.asarray(x).tobytes() for x in jax.tree.leaves((nnx.state(training.model), nnx.state(training.optimizer)))
    ]


def found_in(training, **settings):
    return tune(
        lambda model, optimizer, batch: type(training).step(
            type("", (), {"model": model, "optimizer": optimizer}), batch
        ),
        training.model,
        training.optimizer,
        (training.batch() for _ in range(9)),
        probes=3,
        **settings,
    )


def test_it_names_each_callback_and_leaves_the_user_s_objects_as_they_are(training):
    before = state_of(training)
    found = found_in(training)
    assert state_of(training) == before
    assert {cost.name for cost in found.callbacks} >= {"ParamProbe", "OptimizerProbe", "LossProbe"}
    assert found.step_s > 0 and all(cost.probe_s > 0 for cost in found.callbacks)
    assert found.overhead(1) == pytest.approx(found.probe_s / found.step_s)


def test_a_dear_callback_is_seen(training):
    found = found_in(training, callbacks=[probes.LossProbe(), Slow(), Slow()])
    loss, first, second = found.callbacks
    assert (loss.name, first.name, second.name) == ("LossProbe", "Slow", "Slow 2")
    assert first.probe_s >= 0.02 and second.probe_s >= 0.02 and found.probe_s >= 0.04
    assert first.every is None or first.every > (loss.every or 0)


def test_a_longer_measured_step_is_billed_to_those_that_prepare_it(training):
    slow = SlowAhead()
    step = 0

    def train_step(model, optimizer, batch):
        nonlocal step
        time.sleep(0.001 + 0.05 * (step > 0 and step % 3 == 0))  # the due ones
        step += 1
        return np.float32(0)

    found = tune(train_step, training.model, training.optimizer, [1], callbacks=[probes.LossProbe(), slow], probes=3)
    loss, ahead = found.callbacks
    assert ahead.probe_s >= 0.03 > loss.probe_s


def test_a_watched_optimizer_and_a_dict_of_results(training):
    optimizer = probes.watch(training.optimizer, training.model)

    def train_step(model, optimizer, batch):
        loss = type(training).step(type("", (), {"model": model, "optimizer": optimizer}), batch)
        return {"loss": loss, "accuracy": loss * 2}

    found = tune(train_step, training.model, optimizer, [training.batch()], probes=2)
    assert "GradientProbe" in {cost.name for cost in found.callbacks}


def test_the_recommendation_is_the_smallest_interval_within_the_budget():
    assert FOUND.probe_s == pytest.approx(0.006)
    assert FOUND.overhead(100) == pytest.approx(0.006)
    assert FOUND.every == 100  # 50 would take 1.2 %
    assert Tuning(0.01, 1e-9, FOUND.callbacks, 0.002).every is None


def test_the_text():
    lines = str(FOUND).splitlines()
    assert lines[0] == "a step takes 10 ms, a probe 6 ms"
    assert "ParamProbe                     4 ms  every=100" in lines
    assert "LossProbe                     10 µs  every=1" in lines
    assert "(rules and writers)         1.99 ms" in lines
    assert "     1    60.00%      1 step (10 ms)" in lines
    assert "   100     0.60%   100 steps (1 s)  <- recommended" in lines
    assert lines[-1] == "Monitor(..., every=100), or every='auto' with budget=0.01"
    none = Tuning(0.01, 1e-9, (Cost("ParamProbe", 0.004, None),), 0.002)
    assert str(none).splitlines()[-1].startswith("No interval up to 5000 keeps to the budget: leave out")
    assert "no interval" in str(none)


def test_the_json():
    found = json.loads(json.dumps(FOUND.as_json()))
    assert (found["every"], found["step_s"], found["budget"]) == (100, 0.01, 0.01)
    assert found["callbacks"][0] == {"name": "ParamProbe", "probe_s": 0.004, "every": 100}
    assert [row["every"] for row in found["intervals"]] == list(LADDER)
    assert found["intervals"][3] == {"every": 10, "overhead": pytest.approx(0.06), "delay_steps": 10, "delay_s": 0.1}


@pytest.mark.parametrize(
    ("arguments", "settings", "kind", "text"),
    [
        ((1, "model", "optimizer", [1]), {}, ArgumentTypeError, r"tune\(train_step=1\): expected a function"),
        ((len, 3, "optimizer", [1]), {}, ArgumentTypeError, "got a int and a Adam: expected an nnx.Module"),
        ((len, "model", "optimizer", []), {}, ArgumentError, "there is no batch in it"),
        ((len, "model", "optimizer", [1]), {"probes": 0}, ArgumentError, r"probes=0\): expected a whole number"),
        ((len, "model", "optimizer", [1]), {"budget": 2}, ArgumentError, r"budget=2\): expected a share"),
    ],
)
def test_what_cannot_work_is_said_at_once(training, arguments, settings, kind, text):
    known = {"model": training.model, "optimizer": training.optimizer}
    given = [known.get(a, a) if isinstance(a, str) else a for a in arguments]
    with pytest.raises(kind, match=text.replace("Adam", "Optimizer")):
        tune(*given, **settings)


def test_a_callback_that_fails_has_no_cost_that_could_be_told(training):
    class Broken(Callback):
        def on_step_end(self, ctx):
            raise RuntimeError("broken")

    with pytest.raises(ArgumentError, match=r"Broken\.on_step_end failed"):
        found_in(training, callbacks=[Broken()])


# --- the command ------------------------------------------------------------------------------------------

SCRIPT = """
    import jax.numpy as jnp
    import optax
    from flax import nnx

    NUMBER = 3

    def make():
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def train_step(model, optimizer, batch):
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
            optimizer.update(model, grads)
            return loss

        return train_step, model, optimizer, [jnp.ones((4, 2))]

    def short():
        return 1, 2
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    import sys

    (tmp_path / "my_tuned_job.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "my_tuned_job.py"
    sys.modules.pop("my_tuned_job", None)


def test_the_command_reads_a_script_or_a_module(script, capsys):
    code = cli.main(["tune", f"{script}:make", "--budget", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == int(found["every"] is None)
    assert len(found["intervals"]) == len(LADDER)
    assert load("my_tuned_job:short")() == (1, 2)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("my_tuned_job.py", "expected FILE.py:function or package.module:function"),
        ("my_tuned_job.py:", "expected FILE.py:function"),
        ("my_tuned_job.py:makes", "has no function 'makes'. Did you mean 'make'?"),
        ("my_tuned_job.py:NUMBER", "NUMBER is a int, expected a function"),
        ("my_tuned_job.py:short", "returned no (train_step, model, optimizer, batches), but (1, 2)"),
        ("nowhere.py:make", "nowhere.py: there is no such file"),
        ("nowhere.at_all:make", "nowhere.at_all: there is no module of that name"),
    ],
)
def test_a_target_that_is_not_there_is_wrong_usage(script, capsys, target, text):
    assert cli.main(["tune", target]) == 2
    assert text in capsys.readouterr().err
