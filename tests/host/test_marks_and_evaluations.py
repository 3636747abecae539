"""What is announced, evaluated or beside the point must not be held against a run, nor hide what is wrong with it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from builders import flow, leaves, numbers, params, run

from nnx_probes.host.history import Facts, History
from nnx_probes.host.judge import Judge
from nnx_probes.host.record import Leaves, Record
from nnx_probes.host.rules import default
from nnx_probes.host.rules.frozen_params import FrozenParams
from nnx_probes.host.trend import converged


def alerts(records, facts=None, marks=()):
    judge, found = Judge(default(), facts or Facts()), []
    for record in records:
        if record.step in marks:
            judge.mark(record.step - 1)
        judge.observe(record)
        found += judge.verdicts(record)
    assert judge.broken == {}
    return [(a.step, a.rule, a.level.name) for a in found]


def noise(n, size=0.02):
    return size * np.random.default_rng(0).normal(size=n)


def evaluation(step, loss, **more):
    return Record(step, 0.0, {"eval.loss": loss, **more}, {})


@pytest.mark.parametrize("evaluated", [False, True])
def test_an_optimizer_made_anew_at_every_step_is_found_with_evaluations_between_the_probes(evaluated):
    records = []
    for step in range(6):
        records.append(flow(step, loss=1 - 0.01 * step, opt=dict(step=1, moments=f"m{step}")))
        records += [evaluation(step, 1.0)] if evaluated else []
    assert alerts(records) == [(2, "optimizer_reset", "ERROR")]


@pytest.mark.parametrize(("announced", "level"), [(True, "INFO"), (False, "WARN")])
def test_a_larger_loss_after_an_announced_switch_is_no_jump(announced, level):
    records = [flow(s, loss=(0.01 if s < 300 else 2.0) * (1 + x)) for s, x in enumerate(noise(1400))]
    found = alerts(records, marks=(300,) if announced else ())
    assert next(x for x in found if x[1] == "stalled_loss")[2] == level
    assert announced == ("diverging" not in {rule for _, rule, _ in found})


def test_a_smaller_loss_after_an_announced_switch_can_still_diverge():
    course = [1000.0] * 300 + [1.0] * 300 + [1.0 * 1.05 ** min(s, 60) for s in range(300)]
    records = [flow(s, loss=v * (1 + x)) for s, (v, x) in enumerate(zip(course, noise(900), strict=True))]
    assert "diverging" in {rule for _, rule, _ in alerts(records, marks=(300,))}


def test_information_is_no_corroboration_of_a_stall():
    def tail(dtype):
        for s, x in enumerate(noise(1200)):
            small = s >= 1100
            yield flow(
                s,
                loss=2.0 - 0.3 * min(1, s / 300) + x,
                updates=1e-6 if small else 1e-3,
                absorbed=0.6 if s >= 1160 else 0.0,
                **dtype,
            )

    found = alerts(tail({}), Facts(total_steps=1200))
    assert {(rule, level) for _, rule, level in found} == {("stalled_loss", "INFO"), ("absorbed_updates", "INFO")}


def restarted(announced, first=150, second=200):
    """A run that falls to a loss of 0.01, then starts over from step 21, which is announced as this step."""
    judge, found = Judge(default()), []
    for step, loss in [(s, 2 * 0.96**s + 0.01) for s in range(first)] + [(21 + s, 2.0) for s in range(second)]:
        if judge.history.records == first:
            judge.mark(announced)
        record = flow(step, loss=loss * (1 + 0.01 * (-1) ** step), opt=dict(step=step + 1, moments=f"{loss}"))
        judge.observe(record)
        found += judge.verdicts(record)
    assert judge.broken == {}
    return found, judge.history


@pytest.mark.parametrize("announced", [20, 149, 150])
def test_after_an_announced_restart_the_old_course_is_forgotten_however_its_steps_are_counted(announced):
    found, history = restarted(announced)
    assert {a.rule for a in found} & {"diverging", "spike"} == set()
    steps, losses = history.since_mark("loss")
    assert (len(losses), steps[0]) == (200, 21) and losses.min() > 1.9
    assert history.origin == 21


def test_an_event_may_be_announced_ahead():
    history = History()
    history.forget(6)
    for step in range(10):
        history.observe(numbers(step, loss=step))
        history.observe(evaluation(step // 3, 1.0))
    assert history.since_mark("loss")[0].tolist() == [6, 7, 8, 9] and history.origin == 6
    history.forget(50)
    for step in (3, 4, 60):
        history.observe(numbers(step, loss=step))
    assert history.since_mark("loss")[0].tolist() == [3, 4, 60]


def test_the_values_that_are_kept_since_a_mark_are_at_most_those_kept():
    history = History()
    history.forget(-1)
    for step in range(1100):
        history.observe(numbers(step, loss=step))
    assert len(history.since_mark("loss")[0]) == 1024


@pytest.mark.parametrize("announced", [None, 30])
def test_a_run_that_has_converged_stays_so_after_a_mark(announced):
    losses = [1.0] * 3 + [1e-8] * 60
    records = [
        flow(s, loss=v, grads=0.0 if s > 30 else 1.0, texts="ab" if s > 30 else None) for s, v in enumerate(losses)
    ]
    found = alerts(records, marks=() if announced is None else (announced,))
    assert found and {level for _, _, level in found} == {"INFO"}


def test_noise_of_a_tiny_loss_is_no_divergence_after_a_mark():
    losses = [1.0] * 100 + [1e-8] * 100 + [1e-7] * 100
    records = [flow(s, loss=v * (1 + x)) for s, (v, x) in enumerate(zip(losses, noise(300), strict=True))]
    assert "diverging" not in {rule for _, rule, _ in alerts(records, marks=(120,))}


def test_converged_is_measured_against_the_larger_of_the_two_first_losses():
    for before, after, last, done in ((1.0, 1e-3, 1e-6, True), (1e-3, 1.0, 1e-6, True), (1.0, 1e-3, 2e-6, False)):
        history = History()
        history.observe(numbers(0, loss=before))
        history.forget(0)
        history.observe(numbers(1, loss=after))
        history.observe(numbers(2, loss=last))
        assert converged(history) is done


def labelled(step, loss, name):
    table = Leaves("labels", (name,), ("array",), ((),), ("int64",), (False,))
    record = flow(step, loss=loss)
    values = {**record.values, "labels.entropy": np.array([0.302]), "labels.classes": np.array([2])}
    return dataclasses.replace(record, values=values, leaves={**record.leaves, "labels": table})


@pytest.mark.parametrize(("name", "found"), [("label", True), ("attention_mask", False), ("inputs.Mask", False)])
def test_a_loss_near_the_entropy_of_a_mask_is_not_that_of_guessing(name, found):
    losses = 0.302 + 3 * np.exp(-np.arange(700) / 40) + noise(700, 0.004)
    rules = {rule for _, rule, _ in alerts([labelled(s, float(v), name) for s, v in enumerate(losses)])}
    assert ("chance_level" in rules) == found


@pytest.mark.parametrize("each", [100, 400])
def test_overfitting_is_found_however_rare_the_evaluations(each):
    records = []
    for step in range(10 * each):
        records.append(flow(step, loss=2 * np.exp(-step / (10 * each) * 3) + 0.01))
        if (step + 1) % each == 0:
            turn = (step + 1) // each
            records.append(evaluation(step, 1.0 + 0.2 * max(0, turn - 2) + (0.3 if turn < 2 else 0.0)))
    assert (5 * each - 1, "overfitting", "WARN") in alerts(records)


def test_an_evaluation_that_is_not_finite_is_a_warning():
    records = [flow(0, loss=1.0), evaluation(0, float("nan")), flow(1, loss=1.0)]
    assert alerts(records) == [(0, "nonfinite", "WARN")]


TABLE = leaves(
    paths=("backbone", "bn.mean", "head"), trained=(True, False, True), kinds=("Param", "BatchStat", "Param")
)


@pytest.mark.parametrize(
    ("changed", "stepped", "level"),
    [
        (("backbone", "bn.mean", "head"), False, "INFO"),
        (("backbone", "bn.mean", "head"), True, "ERROR"),
        (("backbone", "bn.mean"), False, "ERROR"),
        (("backbone", "head"), False, "INFO"),
        (("backbone",), False, "WARN"),
        (("bn.mean",), False, "ERROR"),
    ],
)
def test_averages_swapped_in_for_an_evaluation_are_told_from_an_evaluation_that_changes_the_model(
    changed, stepped, level
):
    step = params(4, ("x1", "y1", "z1"), table=TABLE, loss=1.0)
    kinds = tuple(sorted({TABLE.kinds[TABLE.paths.index(p)] for p in changed}))
    record = evaluation(4, 1.0, **{"eval.changed": changed, "eval.kinds": kinds, "eval.stepped": stepped})
    assert alerts([step, record]) == [(4, "stale_state", level)]


def test_a_trial_is_asked_for_again_when_more_leaves_stand_still():
    table = leaves(paths=("a", "b", "c"))
    judge, asked = Judge((FrozenParams(),), Facts()), []
    for step in range(90):
        texts = ("a", f"b{min(step, 3)}", f"c{min(step, 20)}")
        record = params(step, texts, table=table, loss=1.0)
        if judge.observe(record):
            asked.append(step)
        judge.verdicts(record)
    assert asked == [8, 22]  # the one that never moved, and then all three


def test_leaves_left_out_by_design_do_not_hide_one_that_is_not():
    table = leaves(paths=("frozen", "lost", "head"))
    trial = {
        "params.trial_update": np.array([0.0, 1.0, 1.0], np.float32),
        "params.trial_absorbed": np.zeros(3, np.float32),
        "trial.later": 1.0,
        "trial.earlier": 1.0,
    }
    records = [params(s, ("a", "b", f"c{s}"), table=table, loss=1.0, **trial) for s in range(12)]
    ((found,), _) = run(records)
    assert (found.step, found.level.name, found.paths) == (8, "WARN", ("lost",))
    everything = dict(trial, **{"params.trial_update": np.array([0.0, 0.0, 1.0], np.float32)})
    ((found,), _) = run([params(s, ("a", "b", f"c{s}"), table=table, loss=1.0, **everything) for s in range(12)])
    assert (found.level.name, found.paths) == ("INFO", ("frozen", "lost"))
