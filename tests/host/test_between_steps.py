"""State that changes between two steps, batches out of range, experts that pause, optimizers that are made anew."""

import dataclasses

import numpy as np
import pytest
from builders import flow, leaves, params, run
from runs import guessing, judged

from nnx_probes.host.alert import Level
from nnx_probes.host.record import Record
from nnx_probes.host.rules import (
    BadBatch,
    ChanceLevel,
    Diverging,
    LostUpdate,
    OptimizerReset,
    StalledLoss,
    ZeroGradients,
)
from nnx_probes.host.windows import Windows

# --- parameters that enter a step as no step left them ------------------------------------------------------


def entering(step, norm, *, left=2.0, ratio=1e-3, count=None, steps=1, missed=False, **more):
    """A measured step that was entered with this norm of each parameter (they are (2, 2)), and left with `left`."""
    opt = dict(step=step + 1 if count is None else count, moments=f"m{step}")
    record = flow(step, opt=opt, steps=steps, **{"watch.missed": missed}, **more)
    record.values["params.norm"] = np.full(2, left, np.float32)
    record.values["updates.norm"] = np.full(2, norm * ratio, np.float32)
    record.values["updates.ratio"] = np.full(2, ratio, np.float32)
    return record


def lost(records):
    return run(records, rules=[LostUpdate()])[0]


def test_parameters_that_enter_with_another_norm_are_told():
    (alert,) = lost([entering(0, 2.0), entering(1, 2.0), entering(2, 2.01)])
    assert (alert.step, alert.level, alert.paths) == (2, Level.WARN, ("a", "b"))
    assert alert.title == "Parameters change between two steps"
    assert alert.message == (
        "2 of 2 parameters entered step 2 with another norm than they had after the step before; first a."
    )
    (cause,) = alert.causes
    assert (cause.slug, cause.score) == ("state_restored", 0.85)


@pytest.mark.parametrize(
    ("norm", "alerts"), [(2.0 * (1 + 0.8e-3), 0), (2.0 * (1 + 1.5e-3), 1), (2.0 * (1 - 1.5e-3), 1)]
)
def test_a_thousandth_is_the_limit(norm, alerts):
    assert len(lost([entering(0, 2.0), entering(1, norm)])) == alerts


@pytest.mark.parametrize(
    "second",
    [
        entering(1, 3.0, steps=2),  # steps between them were not looked at
        entering(1, 3.0, count=3),  # the step updates more than once
        entering(1, 3.0, missed=True),
        entering(1, 3.0, **{"grads.age": 1}),  # measured at an earlier step
        entering(1, 3.0, ratio=np.nan),  # a parameter that was 0
    ],
)
def test_what_was_not_seen_is_not_judged(second):
    assert lost([entering(0, 2.0), second]) == []


def test_an_announced_event_explains_it():
    from nnx_probes.host.judge import Judge

    judge = Judge([LostUpdate()])
    judge.observe(entering(0, 2.0))
    judge.mark(0)
    judge.observe(entering(1, 3.0))
    assert judge.verdicts(entering(1, 3.0)) == []


# --- an optimizer that is made anew -------------------------------------------------------------------------


def remade(n, *, count=1, moves=True):
    return [params(s, (f"a{s}" if moves else "a", "b"), opt=dict(step=count, moments=f"m{s}")) for s in range(n)]


@pytest.mark.parametrize(("n", "alerts"), [(2, 0), (3, 1)])
def test_moments_that_never_get_old_are_an_optimizer_made_anew(n, alerts):
    found = run(remade(n), rules=[OptimizerReset()])[0]
    assert [(a.step, a.level) for a in found] == [(2, Level.ERROR)] * alerts
    assert all(a.causes[0].slug == "optimizer_recreated" for a in found)


def test_it_is_none_while_the_parameters_stand_still_or_after_several_steps():
    assert run(remade(6, moves=False), rules=[OptimizerReset()])[0] == []
    assert run(remade(6, count=2), rules=[OptimizerReset()])[0] == []


def taken_over(change, *, at=6, n=12):
    """An optimizer whose step starts over, where `change` makes another record of the one that it is from then on."""
    for s in range(n):
        record = flow(s, opt=dict(step=s + 1 if s < at else s - at + 1, moments=f"m{s}"))
        yield change(record) if s >= at else record


def other_leaves(record):
    table = record.leaves["optimizer"]
    paths = tuple(path.replace("mu.a", "mu.b") for path in table.paths)
    return dataclasses.replace(record, leaves={**record.leaves, "optimizer": dataclasses.replace(table, paths=paths)})


def fewer_trained(record):
    table = dataclasses.replace(record.leaves["params"], trained=(False, True))
    return dataclasses.replace(record, leaves={**record.leaves, "params": table})


@pytest.mark.parametrize(("change", "words"), [(other_leaves, "of the optimizer"), (fewer_trained, "that are trained")])
def test_another_optimizer_that_takes_over_is_information_that_names_the_mark(change, words):
    (found,) = run(taken_over(change), rules=[OptimizerReset()])[0]
    assert (found.step, found.level) == (6, Level.INFO)
    assert words in found.message and "monitor.mark" in found.message
    assert [cause.slug for cause in found.causes] == ["optimizer_recreated"] and "monitor.mark" in found.causes[0].fix


def test_the_same_leaves_whose_step_goes_back_are_an_optimizer_that_was_reset():
    for change in (
        lambda record: record,
        lambda r: dataclasses.replace(r, leaves={k: dataclasses.replace(v) for k, v in r.leaves.items()}),
    ):
        (found,) = run(taken_over(change), rules=[OptimizerReset()])[0]
        assert (found.step, found.level) == (6, Level.ERROR)
    records = [*taken_over(other_leaves), *(other_leaves(flow(s, opt=dict(step=s - 11))) for s in range(12, 20))]
    assert [(a.step, a.level) for a in run(records, rules=[OptimizerReset()])[0]] == [
        (6, Level.INFO),
        (12, Level.ERROR),
    ]


# --- batches out of range -----------------------------------------------------------------------------------


def fed(step, top, *, dtype="float32", bad=0):
    table = leaves("batch", ("x",), dtypes=(dtype,), trained=(False,), kinds=("array",))
    values = {"batch.max_abs": np.array([top], np.float32), "batch.nonfinite": np.array([bad], np.int32)}
    return Record(step, 0.0, values, {"batch": table})


def fed_all(tops, **more):
    return run([fed(s, top, **more) for s, top in enumerate(tops)], rules=[BadBatch()])[0]


@pytest.mark.parametrize(("top", "alerts"), [(99.0, 0), (100.0, 1)])
def test_a_batch_a_hundred_times_larger_than_all_before_is_told(top, alerts):
    found = fed_all([0.5, 1.0] * 8 + [top])
    assert [(a.step, a.level, a.paths) for a in found] == [(16, Level.WARN, ("batch.x",))] * alerts


@pytest.mark.parametrize(("known", "alerts"), [(15, 0), (16, 1)])
def test_sixteen_batches_have_to_be_known(known, alerts):
    assert len(fed_all([1.0] * known + [1e4])) == alerts


def test_integers_nan_and_a_start_from_nothing_are_passed_over():
    assert fed_all([1.0] * 20 + [1e4], dtype="int32") == []
    assert fed_all([1.0] * 20 + [np.nan], bad=1) == []
    assert fed_all([0.0] * 20 + [1.0]) == []


def test_an_array_that_could_never_be_read_is_passed_over():
    table = leaves("batch", ("gone", "x"), trained=(False,) * 2, kinds=("array",) * 2)
    tops = [[np.nan, 1.0 if s < 20 else 1e4] for s in range(21)]
    records = [
        Record(s, 0.0, {"batch.max_abs": np.array(top, np.float32)}, {"batch": table}) for s, top in enumerate(tops)
    ]
    found, judge = run(records, rules=[BadBatch()])
    assert [(a.step, a.paths) for a in found] == [(20, ("batch.x",))] and judge.broken == {}


def test_the_words_of_a_batch_out_of_range():
    (alert,) = fed_all([1.0] * 16 + [250.0])
    assert alert.title == "The batch is out of range"
    assert alert.message == (
        "The batch of step 16 holds values up to 250 in x; in the 16 batches looked at before, the largest was 1."
    )
    cause = alert.causes[0]
    assert (cause.slug, cause.score, cause.why) == (
        "input_pipeline",
        0.93,
        "The batch's x is 250 times as large as usual.",
    )


# --- experts ------------------------------------------------------------------------------------------------


def routed(n, *, pauses):
    """Layers 0 and 1 get a gradient at every step, or 1 pauses now and then; layer 2 never gets one."""
    for s in range(n):
        yield flow(s, slices=dict(grads=(1.0, 0.0 if pauses and s % 5 == 2 else 1.0, 0.0)))


@pytest.mark.parametrize(("pauses", "level"), [(True, Level.INFO), (False, Level.WARN)])
def test_a_layer_beside_one_that_pauses_is_an_expert(pauses, level):
    found = run(routed(20, pauses=pauses), rules=[ZeroGradients()])[0]
    assert [(a.level, a.paths) for a in found] == [(level, ("stack.kernel[2]",))]


def test_pauses_are_remembered_longer_than_the_values():
    windows = Windows()
    for s, top in enumerate([0.0, 1.0, *[1.0] * 300]):
        windows.observe(flow(s, slices=dict(grads=(top, 1.0, 0.0))), 1)
    assert windows.came_back("slices.grads_max_abs").tolist() == [True, False, False]
    windows.forget()
    assert windows.came_back("slices.grads_max_abs").tolist() == []


# --- an early jump of the loss ------------------------------------------------------------------------------


def lossy(losses):
    return [Record(s, 0.0, {"loss": float(v)}) for s, v in enumerate(losses)]


@pytest.mark.parametrize(("peak", "level"), [(210.0, Level.WARN), (190.0, Level.INFO)])
def test_a_stall_after_a_jump_of_a_hundred_times_is_a_warning(peak, level):
    noise = np.random.default_rng(0).normal(0, 0.02, 900)
    found = run(lossy([2.0, peak, peak / 2, *(2.2 + noise)]), rules=[StalledLoss()])[0]
    assert [a.level for a in found] == [level]
    assert [a.causes[0].slug for a in found if level == Level.WARN] == ["learning_rate_too_high"] * (
        level == Level.WARN
    )


@pytest.mark.parametrize(("first", "alerts"), [(1.0, 1), (4.0, 0)])
def test_a_run_that_leaves_its_first_loss_at_once_is_measured_against_it(first, alerts):
    found = run(lossy([first, *[15.0] * 20]), rules=[Diverging()])[0]
    assert len(found) == alerts


# --- updates along their gradient ---------------------------------------------------------------------------

MATRICES = leaves(paths=("a", "b", "c", "bias"), shapes=((2, 2), (2, 2), (2, 2), (2,)))


def along(n, cosine, *, updates=1e-3, **more):
    return [flow(s, table=MATRICES, cosine=cosine, updates=updates, loss=1.0, **more) for s in range(n)]


def uphill(records):
    return run(records, rules=[Diverging()])[0]


@pytest.mark.parametrize(("n", "alerts"), [(32, 0), (33, 1)])
def test_updates_along_their_gradient_are_uphill_after_32_of_them(n, alerts):
    found = uphill(along(n, (0.4, 0.4, 0.4, -1.0)))
    assert [(a.level, a.title, a.paths) for a in found] == [(Level.WARN, "Updates go uphill", ("a", "b", "c"))] * alerts
    assert all(a.causes[0].slug == "ascent" for a in found)


@pytest.mark.parametrize(
    "cosine", [(0.4, 0.4, -0.4, 1.0), (0.2, 0.2, 0.2, 0.2), (-0.9, -0.9, -0.9, 0.9), (np.nan, np.nan, np.nan, np.nan)]
)
def test_one_matrix_against_its_gradient_is_enough_to_be_quiet(cosine):
    assert uphill(along(60, cosine)) == []


@pytest.mark.parametrize(("size", "alerts"), [(1.0, 1), (0.99, 0), (1.01, 0)])
def test_a_raw_gradient_added_to_one_matrix_is_told(size, alerts):
    found = uphill(along(40, (1.0, -0.5, -0.5, -0.5), updates=(size, 1e-3, 1e-3, 1e-3)))
    assert [a.paths for a in found] == [("a",)] * alerts


def test_the_words_of_an_ascent():
    (alert,) = uphill(along(40, (1.0, -0.5, -0.5, -0.5), updates=(1.0, 1e-3, 1e-3, 1e-3)))
    assert alert.message == (
        "Over the last 32 updates those of 1 of 3 matrices are their raw gradients, added; first a."
    )
    (alert,) = uphill(along(40, (0.9, 0.9, 0.9, 0.9)))
    assert alert.message == (
        "Over the last 32 updates those of 3 of 3 matrices go along their gradient instead of against it; first a."
    )


# --- worse than guessing ------------------------------------------------------------------------------------


def guess(level, *, first=2.3, entropy=2.0, **more):
    return judged(ChanceLevel(), guessing([first, *[level] * 600], entropy=entropy, **more))


@pytest.mark.parametrize(("level", "title"), [(2.31, "worse"), (2.29, None)])
def test_a_loss_that_is_fifteen_percent_above_guessing_is_worse(level, title):
    found = guess(level, count=9)  # ln 9 is 2.197: further than 2 % from both
    assert (found is not None) is (title is not None)


@pytest.mark.parametrize(
    "change", [dict(first=3.6), dict(entropy=0.05), dict(entropy=[2.0, 1.0], count=[10, 9], path=("y", "z"))]
)
def test_it_is_not_judged_where_the_loss_may_be_another_one(change):
    assert guess(5.0, **change) is None


@pytest.mark.parametrize(
    ("first", "level", "found"),
    [(2.9, 2.4, False), (3.3, 2.4, False), (2.7, 2.4, True), (1.8, 2.4, True), (2.9, 3.0, True), (0.5, 2.4, True)],
)
def test_a_squared_error_on_counts_that_has_fallen_to_their_variance_is_not_worse_than_guessing(first, level, found):
    """Among 10 classes a cross-entropy begins near 2.3 (1.84 to 2.76), or the loss is above where it began."""
    assert (guess(level, first=first, count=10) is not None) is found


def test_a_stall_of_a_squared_error_on_counts_is_information():
    records = guessing([3.0, *[2.4] * 900], entropy=1.9)
    found, _ = run(records, rules=[ChanceLevel(), StalledLoss()])
    assert [(a.rule, a.level.name) for a in found] == [("stalled_loss", "INFO")]


def test_the_words_of_a_loss_worse_than_guessing():
    found = guess(3.0)
    assert (found.level, found.title) == (Level.WARN, "The loss is worse than guessing")
    assert found.message == (
        "The median loss of the last 256 steps is 3 and does not fall; knowing only how often each class occurs in the "
        "batch's y scores 2. The first loss was 2.3."
    )
    assert found.causes[0].slug == "learning_rate_too_high"
    assert "labels_unpaired" not in [cause.slug for cause in found.causes]
