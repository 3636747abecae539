"""Running statistics, dropout counters and evaluations: what `stale_state` says, and how it is explained."""

import numpy as np
import pytest
from builders import leaves, params, run

from nnx_probes.host.alert import Level
from nnx_probes.host.causes.stale import STALE
from nnx_probes.host.record import Record
from nnx_probes.host.rules import StaleState

TABLE = leaves(
    paths=("a", "bn.mean", "bn.var", "drop.count"),
    kinds=("Param", "BatchStat", "BatchStat", "RngCount"),
    trained=(True, False, False, False),
)
TRAINING = {"mode.dropout_train": 1, "mode.dropout_eval": 0, "mode.norm_train": 1, "mode.norm_eval": 0}
EVALUATING = {
    "mode.dropout_train": 0,
    "mode.dropout_eval": 1,
    "mode.norm_train": 0,
    "mode.norm_eval": 1,
    "mode.first": "bn",
}


def step(s, *, still=("mean", "var", "count"), a=True, norm=1.0, modes=TRAINING):
    texts = [f"a{s if a else 0}", *(f"{name}{0 if name in still else s}" for name in ("mean", "var", "count"))]
    record = params(s, texts, table=TABLE, **modes)
    record.values["params.norm"][1] = norm
    return record


def said(records):
    return run(records, rules=[StaleState()])[0]


def evaluated(s, *changed, kinds=("BatchStat",)):
    return Record(s, 0.0, {"eval.loss": 1.0, "eval.changed": changed, "eval.kinds": kinds})


def first_cause(alert):
    return alert.causes[0].slug


@pytest.mark.parametrize(("probes", "alerts"), [(3, 0), (4, 1)])
def test_three_updates_without_a_change_are_enough_and_two_are_not(probes, alerts):
    assert len(said([step(s) for s in range(probes)])) == alerts


def test_the_limit_is_an_argument():
    records = [step(s) for s in range(8)]
    assert run(records, rules=[StaleState(steps=6)])[0][0].step == 6


@pytest.mark.parametrize(
    ("still", "paths"),
    [
        (("mean", "var"), ("bn.mean", "bn.var")),
        (("count",), ("drop.count",)),
        (("mean", "var", "count"), ("bn.mean", "bn.var", "drop.count")),
        (("mean",), None),
        ((), None),
    ],
)
def test_all_leaves_of_a_kind_have_to_stand_still(still, paths):
    alerts = said([step(s, still=still) for s in range(8)])
    assert ([a.paths for a in alerts] or None) == ([paths] if paths else None)


def test_nothing_is_said_while_the_parameters_stand_still_too():
    assert said([step(s, a=False) for s in range(8)]) == []


def test_counters_without_an_active_dropout_may_rest():
    none = {**TRAINING, "mode.dropout_train": 0}
    assert said([step(s, still=("count",), modes=none) for s in range(8)]) == []


def test_a_pretrained_norm_that_is_in_evaluation_from_the_start_is_frozen_on_purpose():
    modes = {**EVALUATING, "mode.dropout_eval": 0, "mode.dropout_train": 1}
    (alert,) = said([step(s, still=("mean", "var"), modes=modes) for s in range(8)])
    assert (alert.level, alert.title) == (Level.INFO, "BatchNorm is frozen")


@pytest.mark.parametrize(
    "change",
    [
        dict(norm=0.0),  # the statistics of a fresh layer
        dict(modes={**EVALUATING, "mode.norm_train": 1}),
        dict(still=("mean", "var", "count")),
    ],
)
def test_it_is_not_on_purpose_otherwise(change):
    given = {"still": ("mean", "var"), "modes": EVALUATING, **change}
    (alert,) = said([step(s, **given) for s in range(8)])
    assert alert.level == Level.WARN


def test_statistics_that_moved_before_are_not_frozen_on_purpose():
    modes = {**EVALUATING, "mode.dropout_eval": 0, "mode.dropout_train": 1}
    records = [step(0, still=("count",), modes=TRAINING), step(1, still=("count",), modes=TRAINING)]
    records += [step(s, still=("mean", "var"), modes=modes) for s in range(2, 9)]
    assert [a.level for a in said(records)] == [Level.WARN]


@pytest.mark.parametrize(
    ("kinds", "level"),
    [
        (("BatchStat",), Level.ERROR),
        (("BatchStat", "RngCount"), Level.ERROR),
        (("RngCount",), Level.WARN),
        (("Param",), Level.WARN),
    ],
)
def test_an_evaluation_that_changes_the_model(kinds, level):
    (alert,) = said([step(0), evaluated(0, "bn.mean", kinds=kinds)])
    assert (alert.level, alert.paths, first_cause(alert)) == (level, ("bn.mean",), "train_mode_in_eval")


def test_an_evaluation_that_changes_nothing_is_quiet():
    assert said([step(0), evaluated(0)]) == []


@pytest.mark.parametrize(
    ("still", "modes", "cause"),
    [
        (("mean", "var"), {**EVALUATING, "mode.norm_eval": 1}, "eval_mode_left_on"),
        (("mean", "var"), TRAINING, "state_dropped"),
        (("count",), TRAINING, "rng_not_advancing"),
        (("mean", "var", "count"), TRAINING, "state_dropped"),
    ],
)
def test_the_first_cause(still, modes, cause):
    (alert,) = said([step(s, still=still, modes=modes, norm=0.0) for s in range(5)])
    assert first_cause(alert) == cause


# --- the very words ------------------------------------------------------------------------------------------


def test_the_words_of_a_standstill():
    (alert,) = said([step(s) for s in range(4)])
    assert alert.title == "Running statistics and dropout counters stand still"
    assert alert.message == (
        "3 running statistics and dropout counters are bit-equal over 3 updates in which the parameters moved; "
        "first bn.mean."
    )


def test_the_words_of_an_evaluation():
    (alert,) = said([step(6), evaluated(6, "bn.mean", "bn.var")])
    assert alert.title == "The evaluation changed the model"
    assert alert.message == (
        "2 arrays of the model (BatchStat) are not what they were after step 6, before the evaluation; first bn.mean."
    )


def test_the_words_of_the_causes():
    found = {}
    for records in (
        [step(s, modes=EVALUATING, norm=0.0) for s in range(5)],
        [step(s) for s in range(5)],
        [step(s, still=("count",)) for s in range(5)],
        [step(0), evaluated(0, "bn.mean")],
    ):
        cause = said(records)[0].causes[0]
        found[cause.slug] = (cause.title, cause.why, cause.fix, cause.check)
    assert found == {
        "eval_mode_left_on": (
            "The model is in evaluation mode while it trains",
            "2 of 2 Dropout and BatchNorm layers are set to evaluation, first bn.",
            "Call model.train() after each evaluation, or evaluate on nnx.view(model, deterministic=True, ...) instead.",
            "Print use_running_average and deterministic of one layer just before the step.",
        ),
        "state_dropped": (
            "The step computes new running state and it is thrown away",
            "The layers are set to training, so the step makes new values; they do not reach this model.",
            "Return all of nnx.state(model) from the step, not nnx.Param only, and nnx.update(model, ...) it; or use @nnx.jit.",
            "Compare nnx.state(model, nnx.BatchStat) inside the step, at its end, with the live one after it.",
        ),
        "rng_not_advancing": (
            "Dropout draws the same mask at every step",
            "The counters of the model's random streams do not move.",
            "Let the step return the random state (nnx.RngState) with the rest, or use @nnx.jit on the live model.",
            "Call the model twice on one input in training mode: two different results are expected.",
        ),
        "train_mode_in_eval": (
            "The evaluation runs in training mode",
            "BatchStat changed between the step and monitor.on_eval; an evaluation should change nothing.",
            "Evaluate on nnx.view(model, deterministic=True, use_running_average=True), or model.eval() and then model.train().",
            "Evaluate twice: the results must be equal to the last bit.",
        ),
    }
    assert {entry.slug for entry in STALE} == set(found)


def test_the_scores_tell_the_causes_apart():
    (alert,) = said([step(s) for s in range(5)])
    assert {cause.slug: cause.score for cause in alert.causes} == {"state_dropped": 0.85, "rng_not_advancing": 0.7}
    (alert,) = said([step(s, still=("count",)) for s in range(5)])
    assert {cause.slug: cause.score for cause in alert.causes} == {"rng_not_advancing": 0.9, "state_dropped": 0.75}
    (alert,) = said([step(0), evaluated(0, "bn.mean")])
    assert {cause.slug: cause.score for cause in alert.causes} == {"train_mode_in_eval": 0.85}
    assert np.isclose(said([step(s, modes=EVALUATING, norm=0.0) for s in range(5)])[0].causes[0].score, 0.9)
