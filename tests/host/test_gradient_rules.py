"""Rules about gradients, updates and activations: each has a run that must alert and near misses that must not."""

from __future__ import annotations

import numpy as np
import pytest
from builders import flow, leaves, micro, numbers, params, run

from nnx_probes.host.alert import Level
from nnx_probes.host.judge import Judge
from nnx_probes.host.record import Record
from nnx_probes.host.rules import (
    AbsorbedUpdates,
    Clipping,
    DeadUnits,
    Diverging,
    LostUpdate,
    Nonfinite,
    SkippedUpdates,
    Spike,
    Usage,
    VanishingGradients,
    ZeroGradients,
    default,
)
from nnx_probes.host.rules import UpdateRatio as Ratio
from nnx_probes.host.rules.nonfinite import PHASES

LAYERS = leaves(paths=("a.kernel", "b.kernel", "b.bias"), shapes=((4, 4), (4, 2), (2,)))
NAN = float("nan")


def slugs(alerts):
    return [(a.step, a.rule, a.level.name) for a in alerts]


def levels(alerts):
    return [(a.step, a.level.name) for a in alerts]


def first_causes(alerts):
    return [a.causes[0].slug if a.causes else None for a in alerts]


def layers(step, **more):
    return flow(step, table=LAYERS, **more)


def only(rule, records):
    """The alerts of this rule alone."""
    return run(records, rules=(rule,))[0]


def marked(rule, before, at, after):
    """The alerts of a run in which ``monitor.mark`` was called between two parts."""
    judge, alerts = Judge((rule,)), []
    for part in (before, after):
        for record in part:
            judge.observe(record)
            alerts += judge.verdicts(record)
        judge.mark(at)
    return alerts


def converging(step):
    return 1.0 if step == 0 else 1e-7


def test_a_healthy_run_is_quiet_under_all_rules():
    rng = np.random.default_rng(0)
    healthy = [
        layers(
            s,
            grads=rng.lognormal(0, 0.3, 3),
            updates=1e-3 * rng.lognormal(0, 0.3, 3),
            loss=3 * 0.99**s,
            slices=dict(grads=rng.lognormal(0, 0.3, 4)),
            activations=dict(dead=0.5),
            **{"grads.clip_norm": 1e3},
        )
        for s in range(300)
    ]
    assert run(healthy)[0] == []


# --- zero_gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [2, 3, 20])
def test_a_whole_tree_of_zeros_is_an_error_after_two_updates(whole):
    found = only(ZeroGradients(whole=whole, leaf=99), [layers(s, grads=0.0, texts="abc") for s in range(40)])
    assert levels(found) == [(whole, "ERROR")] and first_causes(found) == ["gradient_cut"]
    assert found[0].paths == LAYERS.paths and found[0].values["updates"] == whole
    assert found[0].title == "Every gradient is exactly 0" and "0 for all 3 trained leaves" in found[0].message
    assert (ZeroGradients().whole, ZeroGradients().leaf, ZeroGradients().used_leaf) == (2, 8, 64)


@pytest.mark.parametrize("leaf", [8, 9, 30])
def test_one_leaf_that_never_had_a_gradient_is_told_after_eight_updates(leaf):
    found = only(ZeroGradients(leaf=leaf), [layers(s, grads=(0.0, 1.0, 1.0)) for s in range(40)])
    assert levels(found) == [(leaf, "WARN")] and found[0].paths == ("a.kernel",)
    assert first_causes(found) == ["gradient_cut"] and found[0].title == "The gradient of a.kernel is exactly 0"
    assert "0 for 1 of 3 trained leaves" in found[0].message


@pytest.mark.parametrize("used", [64, 65, 100])
def test_one_leaf_that_once_had_a_gradient_gets_sixty_four_updates(used):
    records = [layers(s, grads=(0.0 if s else 1e-30, 1.0, 1.0)) for s in range(120)]
    assert levels(only(ZeroGradients(used_leaf=used), records)) == [(used, "WARN")]


def test_one_layer_of_a_stacked_leaf_is_named():
    found = only(ZeroGradients(), [layers(s, slices=dict(grads=(1.0, 1.0, 0.0))) for s in range(20)])
    assert levels(found) == [(8, "WARN")] and found[0].paths == ("stack.kernel[2]",)
    assert first_causes(found) == ["gradient_cut"] and "stack.kernel[2]" in found[0].message
    used = [layers(s, slices=dict(grads=(1.0, 1.0, 0.0 if s else 1.0))) for s in range(80)]
    assert levels(only(ZeroGradients(), used)) == [(64, "WARN")]


def test_the_layers_of_a_leaf_that_is_told_as_a_whole_are_not_told_as_well():
    own = dict(of="a.kernel", grads=(0.0, 0.0))
    found = only(ZeroGradients(), [layers(s, grads=(0.0, 1.0, 1.0), slices=own) for s in range(20)])
    assert [a.paths for a in found] == [("a.kernel",)]


def test_leaves_that_join_later_are_told_again():
    records = [layers(s, grads=(0.0, 1.0, 0.0 if s > 20 else 1.0)) for s in range(100)]
    found = only(ZeroGradients(), records)
    assert levels(found) == [(8, "WARN"), (84, "WARN")] and found[1].paths == ("b.bias", "a.kernel")
    assert found[1].title == "2 parameters get a gradient of exactly 0"


@pytest.mark.parametrize("grads", [(1e-38, 1.0, 1.0), (NAN, 1.0, 1.0), (float("inf"), 1.0, 1.0)])
def test_small_and_bad_gradients_are_not_zero(grads):
    assert only(ZeroGradients(), [layers(s, grads=grads) for s in range(200)]) == []


def test_a_leaf_with_pauses_is_quiet():
    records = [layers(s, grads=(1.0 if s % 60 == 0 else 0.0, 1.0, 1.0)) for s in range(600)]
    assert only(ZeroGradients(), records) == []


def test_leaves_that_are_not_trained_or_have_no_elements_need_no_gradient():
    table = leaves(paths=("frozen", "empty", "w"), shapes=((2,), (0, 4), (2, 2)), trained=(False, True, True))
    assert only(ZeroGradients(), [flow(s, table=table, grads=(0.0, 1.0)) for s in range(40)]) == []
    found = only(ZeroGradients(), [flow(s, table=table, grads=(0.0, 0.0)) for s in range(4)])
    assert levels(found) == [(2, "ERROR")]


@pytest.mark.parametrize("grads", [0.0, (0.0, 1.0, 1.0)])
def test_zero_gradients_at_the_end_of_convergence_are_only_information(grads):
    found = only(ZeroGradients(), [layers(s, grads=grads, loss=converging(s)) for s in range(40)])
    assert [a.level for a in found] == [Level.INFO] and first_causes(found) == ["converged"]


def test_a_loss_just_above_a_millionth_of_its_first_value_has_not_converged():
    records = [layers(s, grads=0.0, texts="abc", loss=1.0 if s == 0 else 1.1e-6) for s in range(5)]
    found = only(ZeroGradients(), records)
    assert [a.level for a in found] == [Level.ERROR] and "converged" not in [c.slug for c in found[0].causes]


@pytest.mark.parametrize(("grads", "step"), [(0.0, 7), ((0.0, 1.0, 1.0), 31)])
def test_micro_steps_are_no_updates(grads, step):
    found = only(ZeroGradients(), [layers(s, grads=grads, opt=micro(s, 4)) for s in range(60)])
    assert [a.step for a in found] == [step]


@pytest.mark.parametrize("grads", [0.0, (0.0, 1.0, 1.0)])
def test_a_hundred_steps_between_probes_count_as_a_hundred_updates(grads):
    records = [layers(s * 100, grads=grads, texts="abc", steps=100) for s in range(5)]
    found = only(ZeroGradients(), records)
    assert [a.step for a in found] == [100] and found[0].values["updates"] == 100


def test_the_first_probe_without_a_gradient_stands_for_one_update_only():
    """At step 100 the leaf has had none for one update, not for the hundred since the probe before."""
    records = [layers(s * 100, grads=(0.0 if s else 1.0, 1.0, 1.0), steps=100) for s in range(20)]
    (found,) = only(ZeroGradients(), records)
    assert found.step >= 200 and found.values["updates"] == found.step - 99


@pytest.mark.parametrize(
    ("grads", "more", "cause"),
    [
        ((0.0, 1.0, 1.0), {}, "gradient_cut"),
        ((1.0, 0.0, 1.0), {}, "dead_relu"),
        ((0.0, 0.0, 1.0), {}, "dead_relu"),
        ((1.0, 0.0, 0.0), {}, "gradient_cut"),
        ((1.0, 0.0, 0.0), dict(activations=dict(dead=(0.0, 0.95))), "dead_relu"),
        ((1.0, 0.0, 0.0), dict(activations=dict(dead=(0.5, NAN))), "gradient_cut"),
        (0.0, {}, "weight_decay_only"),
        (0.0, dict(texts="abc"), "gradient_cut"),
    ],
)
def test_why_a_gradient_is_zero(grads, more, cause):
    """A kernel without a gradient whose own bias has one is fed zeros; parameters that move without one decay."""
    assert first_causes(only(ZeroGradients(), [layers(s, grads=grads, **more) for s in range(20)])) == [cause]


# --- frozen_params behind zero_gradients --------------------------------------------------------------------


@pytest.mark.parametrize(("gradient", "rules"), [(0.0, ["zero_gradients"]), (1.0, ["frozen_params"])])
def test_a_leaf_at_rest_is_told_by_its_gradient_where_that_is_zero(gradient, rules):
    records = [layers(s, grads=(gradient, 1.0, 1.0), texts=("rest", f"b{s}", f"c{s}")) for s in range(40)]
    assert [a.rule for a in run(records)[0]] == rules


def test_another_leaf_at_rest_is_still_told():
    records = [layers(s, grads=(0.0, 1.0, 1.0), texts=("rest", "rest", f"c{s}")) for s in range(40)]
    found = run(records)[0]
    assert slugs(found) == [(8, "zero_gradients", "WARN"), (8, "frozen_params", "WARN")]
    assert [a.paths for a in found] == [("a.kernel",), ("b.kernel",)]


# --- absorbed_updates ---------------------------------------------------------------------------------------


def absorbing(share, steps=40, dtypes=("bfloat16",) * 3, **more):
    table = leaves(paths=LAYERS.paths, shapes=LAYERS.shapes, dtypes=dtypes)
    return [flow(s, table=table, absorbed=share, **more) for s in range(steps)]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.49, []),
        (0.5, ["INFO"]),
        (0.79, ["INFO"]),
        (0.8, ["WARN"]),
        (0.94, ["WARN"]),
        (0.95, ["ERROR"]),
        (1.0, ["ERROR"]),
    ],
)
def test_the_share_of_absorbed_elements_sets_the_level(share, expected):
    found = only(AbsorbedUpdates(), absorbing(share))
    assert levels(found) == [(16, level) for level in expected]
    assert first_causes(found) == ["absorbed_by_dtype"] * len(expected)


@pytest.mark.parametrize(
    ("rule", "share", "expected"),
    [
        (AbsorbedUpdates(note=0.7), 0.69, []),
        (AbsorbedUpdates(note=0.7), 0.7, [(16, "INFO")]),
        (AbsorbedUpdates(warn=0.6), 0.59, [(16, "INFO")]),
        (AbsorbedUpdates(warn=0.6), 0.6, [(16, "WARN")]),
        (AbsorbedUpdates(error=0.9), 0.89, [(16, "WARN")]),
        (AbsorbedUpdates(error=0.9), 0.9, [(16, "ERROR")]),
        (AbsorbedUpdates(updates=17), 1.0, [(17, "ERROR")]),
        (AbsorbedUpdates(updates=40), 1.0, []),
        (AbsorbedUpdates(updates=39), 1.0, [(39, "ERROR")]),
    ],
)
def test_the_limits_of_absorbed_updates_may_be_chosen(rule, share, expected):
    assert levels(only(rule, absorbing(share))) == expected


@pytest.mark.parametrize(
    ("share", "level", "paths"),
    [
        ((1.0, 0.0, 0.0), "WARN", ("a.kernel",)),
        ((1.0, 1.0, 0.0), "ERROR", ("a.kernel", "b.kernel")),
        ((1.0, 0.9, 0.9), "WARN", LAYERS.paths),
        ((1.0, 0.6, 0.6), "WARN", ("a.kernel",)),
        ((0.6, 0.0, 0.6), "INFO", ("a.kernel", "b.bias")),
    ],
)
def test_an_error_takes_most_of_most_leaves(share, level, paths):
    found = only(AbsorbedUpdates(), absorbing(share))
    assert levels(found) == [(16, level)] and found[0].paths == paths


@pytest.mark.parametrize(
    ("dtype", "level"),
    [
        ("bfloat16", "ERROR"),
        ("float16", "ERROR"),
        ("float8_e4m3fn", "ERROR"),
        ("float32", "INFO"),
        ("float64", "INFO"),
    ],
)
def test_only_narrow_types_are_worth_a_warning(dtype, level):
    assert levels(only(AbsorbedUpdates(), absorbing(1.0, dtypes=(dtype,) * 3))) == [(16, level)]


def test_narrow_leaves_among_wide_ones_are_a_warning_when_they_are_affected():
    mixed = ("float32", "bfloat16", "float32")
    assert levels(only(AbsorbedUpdates(), absorbing((0.0, 1.0, 0.0), dtypes=mixed))) == [(16, "WARN")]
    assert levels(only(AbsorbedUpdates(), absorbing((1.0, 0.0, 1.0), dtypes=mixed))) == [(16, "INFO")]
    (found,) = only(AbsorbedUpdates(), absorbing(1.0, dtypes=mixed))
    assert found.level is Level.WARN and found.paths == ("b.kernel",)


@pytest.mark.parametrize(("affected", "of", "level"), [(1, 2, "ERROR"), (2, 5, "WARN"), (3, 5, "ERROR")])
def test_half_of_the_leaves_are_most(affected, of, level):
    table = leaves(paths="abcde"[:of], dtypes=("bfloat16",) * of)
    share = [1.0] * affected + [0.0] * (of - affected)
    found = only(AbsorbedUpdates(), [flow(s, table=table, absorbed=share) for s in range(20)])
    assert levels(found) == [(16, level)] and f"{affected} of {of} trained leaves" in found[0].message


@pytest.mark.parametrize(("now", "level"), [(0.9e-3, "INFO"), (1.1e-3, "ERROR")])
def test_updates_a_hundredth_of_their_largest_are_the_tail_of_a_schedule(now, level):
    records = [*absorbing(0.0, 1, updates=0.1), *absorbing(1.0, updates=now)[1:]]
    assert levels(only(AbsorbedUpdates(), records)) == [(16, level)]


def test_absorbed_updates_at_the_end_of_convergence_are_only_information():
    records = [absorbing(1.0, loss=converging(s))[s] for s in range(20)]
    found = only(AbsorbedUpdates(), records)
    assert levels(found) == [(16, "INFO")] and first_causes(found) == ["converged"]


def test_one_update_that_moves_starts_the_count_anew():
    records = absorbing(1.0, 32)
    records[15] = absorbing(0.2, 16)[15]
    assert only(AbsorbedUpdates(), records[:31]) == []
    assert levels(only(AbsorbedUpdates(), records)) == [(31, "ERROR")]


def test_micro_steps_do_not_break_the_streak_of_absorbed_updates():
    def at(s):
        real = s % 4 == 3
        return absorbing(float(real), s + 1, updates=1e-3 * real, opt=micro(s, 4))[s]

    assert levels(only(AbsorbedUpdates(), [at(s) for s in range(80)])) == [(63, "ERROR")]


# --- update_ratio -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "ratio", "expected"),
    [
        (Ratio(), 0.3, []),
        (Ratio(), 0.31, [(32, "learning_rate_too_high")]),
        (Ratio(), 1e-7, []),
        (Ratio(), 0.99e-7, [(32, "learning_rate_too_low")]),
        (Ratio(), 0.0, []),
        (Ratio(), NAN, []),
        (Ratio(high=0.1), 0.11, [(32, "learning_rate_too_high")]),
        (Ratio(low=1e-4), 0.9e-4, [(32, "learning_rate_too_low")]),
        (Ratio(updates=33), 1.0, [(33, "learning_rate_too_high")]),
        (Ratio(updates=40), 1.0, []),
        (Ratio(updates=40), 1e-9, []),
        (Ratio(updates=39), 1e-9, [(39, "learning_rate_too_low")]),
    ],
)
def test_matrices_whose_updates_are_out_of_proportion_are_told(rule, ratio, expected):
    found = only(rule, [layers(s, ratio=(1e-3, ratio, 1e-3)) for s in range(40)])
    assert [(a.step, c) for a, c in zip(found, first_causes(found), strict=True)] == expected
    assert all(a.level is Level.WARN and a.paths == ("b.kernel",) for a in found)


@pytest.mark.parametrize("ratio", [10.0, 1e-9])
def test_vectors_may_have_any_ratio(ratio):
    assert only(Ratio(), [layers(s, ratio=(1e-3, 1e-3, ratio)) for s in range(100)]) == []


@pytest.mark.parametrize(("ever", "quiet"), [(1e-3, True), (5.1e-6, True), (4.9e-6, False)])
def test_a_ratio_that_has_shrunk_with_its_schedule_is_no_finding(ever, quiet):
    records = [layers(s, ratio=5e-8 if s else ever) for s in range(60)]
    assert (only(Ratio(), records) == []) is quiet


def test_a_decaying_schedule_is_quiet_to_its_end():
    assert only(Ratio(), [layers(s, ratio=1e-3 * 0.95**s) for s in range(400)]) == []


@pytest.mark.parametrize(("ratio", "quiet"), [(1e-9, True), (1.0, False)])
def test_after_convergence_updates_may_be_small_but_not_large(ratio, quiet):
    found = only(Ratio(), [layers(s, ratio=ratio, loss=converging(s)) for s in range(40)])
    assert (found == []) is quiet


def test_a_few_large_updates_at_the_start_are_quiet():
    assert only(Ratio(), [layers(s, ratio=1 / (s + 1)) for s in range(200)]) == []
    broken = [layers(s, ratio=0.1 if s == 31 else 1.0) for s in range(63)]
    assert only(Ratio(), broken) == []


@pytest.mark.parametrize("ratio", [1.0, 1e-9])
def test_micro_steps_do_not_break_the_streak_of_ratios(ratio):
    records = [layers(s, ratio=ratio * (s % 3 == 2), opt=micro(s, 3)) for s in range(120)]
    assert [a.step for a in only(Ratio(), records)] == [95]


# --- vanishing_gradients ------------------------------------------------------------------------------------

FADED = dict(grads=(1e-5, 1.0, 1.0), ratio=(1e-7, 1e-3, 1e-3))


@pytest.mark.parametrize(
    ("rule", "grads", "ratio", "step"),
    [
        (VanishingGradients(), 1e-5, 1e-7, 32),
        (VanishingGradients(), 0.99e-4, 0.99e-6, 32),
        (VanishingGradients(), 1.01e-4, 0.99e-6, None),
        (VanishingGradients(), 0.99e-4, 1e-6, None),
        (VanishingGradients(), 0.99e-4, 1e-3, None),
        (VanishingGradients(), 1.0, 1e-7, None),
        (VanishingGradients(), 0.0, 1e-7, None),
        (VanishingGradients(), 1e-5, 0.0, None),
        (VanishingGradients(), NAN, NAN, None),
        (VanishingGradients(share=1e-2), 0.99e-2, 1e-7, 32),
        (VanishingGradients(share=1e-2), 1.01e-2, 1e-7, None),
        (VanishingGradients(ratio=1e-4), 1e-5, 0.99e-4, 32),
        (VanishingGradients(ratio=1e-4), 1e-5, 1.01e-4, None),
        (VanishingGradients(updates=33), 1e-5, 1e-7, 33),
        (VanishingGradients(updates=39), 1e-5, 1e-7, 39),
        (VanishingGradients(updates=40), 1e-5, 1e-7, None),
    ],
)
def test_a_matrix_with_a_faded_gradient_that_hardly_moves_is_told(rule, grads, ratio, step):
    """Both must hold: a small gradient alone is Adam's daily bread, and exactly 0 is another rule's matter."""
    found = only(rule, [layers(s, grads=(grads, 1.0, 1.0), ratio=(ratio, 1e-3, 1e-3)) for s in range(40)])
    assert levels(found) == ([] if step is None else [(step, "WARN")])
    assert all(a.paths == ("a.kernel",) and "1 of 2 matrices" in a.message for a in found)
    assert first_causes(found) == ["saturated_activations"] * len(found)


@pytest.mark.parametrize("broken", [dict(grads=1.0), dict(ratio=1e-3)])
def test_one_update_without_either_condition_starts_the_count_of_faded_gradients_anew(broken):
    records = [layers(s, **{**FADED, **(broken if s == 31 else {})}) for s in range(64)]
    assert only(VanishingGradients(), records[:63]) == []
    assert [a.step for a in only(VanishingGradients(), records)] == [63]


def test_vectors_are_not_judged_and_are_no_measure_for_matrices():
    faded = dict(grads=(1.0, 1.0, 1e-9), ratio=(1e-3, 1e-3, 1e-9))
    assert only(VanishingGradients(), [layers(s, **faded) for s in range(60)]) == []
    large = dict(grads=(1.0, 1.0, 1e9), ratio=1e-9)
    assert only(VanishingGradients(), [layers(s, **large) for s in range(60)]) == []


def test_gradients_are_compared_element_by_element_not_by_the_size_of_their_leaf():
    table = leaves(paths=("small", "large"), shapes=((2, 2), (2000, 2000)))
    records = [flow(s, table=table, grads=(2e-4, 1.0), ratio=1e-9) for s in range(60)]
    assert only(VanishingGradients(), records) == []


def test_layers_of_a_stacked_matrix_are_judged_one_by_one():
    own = dict(grads=(1.0, 1e-5, 1.0), ratio=(1e-3, 1e-7, 1e-3))
    found = only(VanishingGradients(), [layers(s, slices=own) for s in range(40)])
    assert levels(found) == [(32, "WARN")] and found[0].paths == ("stack.kernel[1]",)
    vectors = dict(of="stack.bias", shape=(4,), **own)
    assert only(VanishingGradients(), [layers(s, slices=vectors) for s in range(40)]) == []


def test_a_measured_saturation_makes_the_cause_surer():
    plain = only(VanishingGradients(), [layers(s, **FADED) for s in range(40)])
    seen = [layers(s, **FADED, activations=dict(saturated=(0.0, 0.95))) for s in range(40)]
    measured = only(VanishingGradients(), seen)
    assert first_causes(measured) == ["saturated_activations"]
    assert measured[0].causes[0].score > plain[0].causes[0].score


def test_a_vanished_gradient_that_is_explained_otherwise_is_quiet():
    assert only(VanishingGradients(), [layers(s, **FADED, loss=converging(s)) for s in range(40)]) == []
    assert only(VanishingGradients(), [layers(s, grads=0.0, ratio=1e-9) for s in range(40)]) == []


def test_small_updates_of_faded_gradients_are_told_once():
    faded = dict(grads=(1e-5, 1.0, 1.0), ratio=(1e-9, 1e-3, 1e-3))
    assert slugs(run([layers(s, **faded) for s in range(60)])[0]) == [(32, "vanishing_gradients", "WARN")]


# --- dead_units ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "dead", "level"),
    [
        (DeadUnits(), 0.89, None),
        (DeadUnits(), 0.9, "WARN"),
        (DeadUnits(), 0.999, "WARN"),
        (DeadUnits(), 1.0, "ERROR"),
        (DeadUnits(), NAN, None),
        (DeadUnits(warn=0.5), 0.49, None),
        (DeadUnits(warn=0.5), 0.5, "WARN"),
        (DeadUnits(warn=1.0), 0.999, None),
    ],
)
def test_the_share_of_dead_units_of_a_place_sets_the_level(rule, dead, level):
    found = only(rule, [layers(s, activations=dict(dead=(0.2, dead))) for s in range(3)])
    assert levels(found) == ([] if level is None else [(0, level)])
    assert first_causes(found) == ["dead_relu"] * len(found) and all(a.paths == ("lin > relu",) for a in found)


def test_places_that_die_later_are_told_too():
    records = [layers(s, activations=dict(dead=(0.95, 0.95 if s >= 5 else 0.0))) for s in range(9)]
    assert levels(only(DeadUnits(), records)) == [(0, "WARN"), (5, "WARN")]


# --- clipping -----------------------------------------------------------------------------------------------


def clipped(share, probes, limit=1.0):
    """Gradients of one leaf over this many probes, of which a share is above 1."""
    above = np.arange(probes) % 128 < round(share * 128)
    return [numbers(s, grads=2.0 if up else 0.5) for s, up in enumerate(above)], {"grads.clip_norm": limit}


def clip_run(rule, share, probes, **more):
    records, extra = clipped(share, probes, **more)
    return only(rule, [Record(r.step, 0.0, {**r.values, **extra}, r.leaves) for r in records])


@pytest.mark.parametrize(
    ("rule", "share", "step"),
    [
        (Clipping(), 1.0, 127),
        (Clipping(), 116 / 128, 127),
        (Clipping(), 115 / 128, None),
        (Clipping(share=0.5), 65 / 128, 127),
        (Clipping(share=0.5), 64 / 128, None),
        (Clipping(probes=200), 1.0, 199),
        (Clipping(probes=20), 1.0, 19),
    ],
)
def test_clipping_of_nearly_every_update_is_information_after_128_probes(rule, share, step):
    found = clip_run(rule, share, 300)
    assert levels(found) == ([] if step is None else [(step, "INFO")]) and first_causes(found) == [None] * len(found)


def test_too_few_probes_and_gradients_at_the_limit_are_no_clipping():
    assert clip_run(Clipping(), 1.0, 127) == [] and clip_run(Clipping(), 1.0, 300, limit=2.0) == []
    assert len(clip_run(Clipping(), 1.0, 300, limit=1.99)) == 1


def test_clipping_before_a_mark_is_forgotten():
    records, extra = clipped(1.0, 227)
    records = [Record(r.step, 0.0, {**r.values, **extra}, r.leaves) for r in records]
    assert marked(Clipping(), records[:100], 99, records[100:]) == []


# --- skipped_updates ----------------------------------------------------------------------------------------


def skipping(step, row, total, limit=None):
    more = {} if limit is None else {"optimizer.skip_limit": float(limit)}
    return flow(step, opt=dict(step=step + 1, notfinite_count=row, total_notfinite=total), loss=1.0, **more)


@pytest.mark.parametrize(
    ("rule", "limit", "most"),
    [
        (SkippedUpdates(), None, 8),
        (SkippedUpdates(), 100, 8),
        (SkippedUpdates(), 17, 8),
        (SkippedUpdates(), 10, 5),
        (SkippedUpdates(), 5, 2),
        (SkippedUpdates(), 1, 1),
        (SkippedUpdates(in_a_row=3), None, 3),
        (SkippedUpdates(in_a_row=3), 10, 3),
        (SkippedUpdates(in_a_row=12), None, 12),
    ],
)
def test_more_than_eight_skips_in_a_row_or_half_of_the_limit_is_an_error(rule, limit, most):
    skips = [skipping(s, s, s, limit) for s in range(most + 3)]
    assert only(rule, skips[: most + 1]) == []
    found = only(rule, skips)
    assert levels(found) == [(most + 1, "ERROR")] and first_causes(found) == ["nan_gradient_op"]


@pytest.mark.parametrize(
    ("rule", "every", "total", "alerts"),
    [
        (SkippedUpdates(), 20, 12, False),
        (SkippedUpdates(), 19, 13, True),
        (SkippedUpdates(), 40, 30, False),
        (SkippedUpdates(share=0.02), 50, 5, False),
        (SkippedUpdates(share=0.02), 42, 6, True),
        (SkippedUpdates(window=100), 20, 5, False),
        (SkippedUpdates(window=100), 15, 6, True),
        (SkippedUpdates(window=512), 20, 25, False),
        (SkippedUpdates(window=512), 19, 26, True),
    ],
)
def test_more_than_five_percent_of_the_last_256_updates_is_an_error(rule, every, total, alerts):
    """One update in `every` is skipped, `total` of them in all."""
    counts = np.minimum(np.arange(every * total + 300) // every, total)
    found = only(rule, [skipping(s, 0, int(n)) for s, n in enumerate(counts)])
    assert [a.level for a in found[:1]] == ([Level.ERROR] if alerts else [])


@pytest.mark.parametrize(("window", "skips"), [(256, 13), (100, 6), (20, 2)])
@pytest.mark.parametrize(("apart", "alerts"), [(-1, True), (0, False)])
def test_a_skip_leaves_the_window_after_as_many_steps_as_that_is_long(window, skips, apart, alerts):
    """One skip, and as long as the window later the rest that would make it too many."""
    last = 10 + window + apart
    counts = [0] * 10 + [1] * (last - 10) + [skips]
    assert bool(only(SkippedUpdates(window=window), [skipping(s, 0, n) for s, n in enumerate(counts)])) is alerts


def test_the_window_may_reach_back_to_the_first_record():
    found = only(SkippedUpdates(), [skipping(s, 0, 100 + s) for s in range(40)])
    assert [a.step for a in found] == [13] and "(13 within the last 13 steps)" in found[0].message


def test_skips_from_before_the_first_record_are_not_held_against_the_run():
    assert only(SkippedUpdates(), [skipping(s, 0, 5000) for s in range(10)]) == []


def test_an_optimizer_that_cannot_skip_is_not_judged():
    assert only(SkippedUpdates(), [flow(s) for s in range(3)]) == []


# --- spike --------------------------------------------------------------------------------------------------


def level(n, spread, names=("grads",)):
    """A level whose logarithms lie `spread` above and below 0 in turn: its sigma is 1.4826 times that."""
    values = np.exp(np.resize([spread, -spread], n))
    return [numbers(s, **dict.fromkeys(names, v)) for s, v in enumerate(values)]


def jumping(to, *, before=128, spread=0.2, names=("grads",)):
    return [*level(before, spread, ("grads", "updates", "loss")), numbers(before, **dict.fromkeys(names, to))]


@pytest.mark.parametrize(
    ("rule", "spread", "to", "alerts"),
    [
        (Spike(), 0.2, np.exp(5.9 * 1.4826 * 0.2), False),
        (Spike(), 0.2, np.exp(6.1 * 1.4826 * 0.2), True),
        (Spike(), 0.1, 2.95, False),
        (Spike(), 0.1, 3.05, True),
        (Spike(), 1.0, 99.0, False),
        (Spike(), 1.0, 101.0, True),
        (Spike(z=4.0), 0.4, np.exp(3.9 * 1.4826 * 0.4), False),
        (Spike(z=4.0), 0.4, np.exp(4.1 * 1.4826 * 0.4), True),
        (Spike(ratio=5.0), 0.1, 4.9, False),
        (Spike(ratio=5.0), 0.1, 5.1, True),
        (Spike(jump=20.0), 1.0, 19.0, False),
        (Spike(jump=20.0), 1.0, 21.0, True),
        (Spike(), 0.1, 0.01, False),
        (Spike(), 0.1, float("inf"), False),
        (Spike(), 0.1, NAN, False),
    ],
)
def test_a_jump_takes_both_z_and_ratio_or_a_hundredfold(rule, spread, to, alerts):
    found = only(rule, jumping(to, spread=spread))
    assert levels(found) == ([(128, "WARN" if to >= rule.jump else "INFO")] if alerts else [])
    assert first_causes(found) == ["learning_rate_too_high"] * len(found)


@pytest.mark.parametrize(
    ("names", "to", "expected"),
    [
        (("grads",), 50.0, "INFO"),
        (("updates",), 50.0, "INFO"),
        (("grads", "updates", "loss"), 50.0, "INFO"),
        (("loss",), 50.0, "INFO"),
        (("loss",), 101.0, "INFO"),
        (("grads",), 101.0, "WARN"),
        (("updates",), 101.0, "INFO"),
        (("grads", "loss"), 101.0, "WARN"),
    ],
)
def test_one_jump_is_information_and_a_warning_when_it_is_a_hundredfold(names, to, expected):
    (found,) = only(Spike(), jumping(to, names=names))
    assert levels([found]) == [(128, expected)]
    word = {"grads": "gradient norm", "updates": "update norm", "loss": "loss"}[names[0]]
    assert found.title == f"The {word} jumps" and f"{to:.1f} times its usual value." in found.message
    assert ("The loss jumped too." in found.message) is (len(names) > 1 and "loss" in names)


@pytest.mark.parametrize(
    ("at", "loss", "expected"),
    [
        ((0, 1), False, [(0, "INFO"), (1, "WARN")]),
        ((0, 3), False, [(0, "INFO"), (3, "WARN")]),
        ((0, 4), False, [(0, "INFO")]),
        ((0, 4, 8, 12), False, [(0, "INFO")]),
        ((0, 1, 2), False, [(0, "INFO"), (1, "WARN"), (2, "ERROR")]),
        ((0, 1, 3), False, [(0, "INFO"), (1, "WARN"), (3, "ERROR")]),
        ((0, 2, 4), False, [(0, "INFO"), (2, "WARN")]),
        ((0, 3), True, [(0, "INFO"), (3, "ERROR")]),
        ((0, 4), True, [(0, "INFO")]),
    ],
)
def test_jumps_close_together_are_worse(at, loss, expected):
    values = np.ones(150)
    values[[128 + n for n in at]] = 50.0
    found = only(Spike(), [numbers(s, grads=v, loss=v if loss else 1.0) for s, v in enumerate(values)])
    assert levels(found) == [(128 + n, level) for n, level in expected]
    assert all(f"at {i} of the last 4 probes" in a.message for i, a in enumerate(found[1:], 2))


@pytest.mark.parametrize(("before", "alerts"), [(63, False), (64, True)])
def test_sixty_four_values_are_needed_to_know_what_is_usual(before, alerts):
    assert bool(only(Spike(), jumping(1e6, before=before))) is alerts


def test_a_jump_right_after_a_mark_is_quiet_and_one_long_after_is_not():
    calm, high = level(200, 0.1), [numbers(s, grads=30.0) for s in range(200, 300)]
    assert levels(only(Spike(), [*calm, *high]))[0] == (200, "INFO")
    assert marked(Spike(), calm, 199, high) == []
    late = [*high, numbers(300, grads=300.0)]
    assert levels(marked(Spike(), calm, 199, late)) == [(300, "INFO")]


LOG = {
    "grads": (0.242, 0.947, 2.390, 15.9, 145.0, 960.0),
    "loss": (2.199, 2.220, 2.595, 2.242, 2.345, 5.098),
}
"""Iterations 31214 to 31219 of the published log of a run with 176 billion parameters."""


@pytest.mark.parametrize("spread", [0.10, 0.12, 0.15])
@pytest.mark.parametrize("seed", range(5))
def test_the_log_of_a_large_run_is_told_three_iterations_before_its_loss_peaks(spread, seed):
    calm, rng = 300, np.random.default_rng(seed)
    norms = np.append(0.24 * rng.lognormal(0, spread, calm), LOG["grads"])
    losses = np.append(2.2 * rng.lognormal(0, 0.02, calm), LOG["loss"])
    steps = range(31214 - calm, 31220)
    found = only(Spike(), [numbers(s, grads=n, loss=v) for s, n, v in zip(steps, norms, losses, strict=True)])
    assert levels(found) == [(31215, "INFO"), (31216, "WARN"), (31217, "ERROR")]
    assert first_causes(found[:1]) == ["learning_rate_too_high"]


@pytest.mark.parametrize("seed", range(20))
def test_healthy_noise_has_no_spikes(seed):
    values = np.random.default_rng(seed).lognormal(0, np.linspace(0.05, 0.3, 20)[seed], 2000)
    assert only(Spike(), [numbers(s, grads=v) for s, v in enumerate(values)]) == []


@pytest.mark.parametrize("times", [50.0, 1 / 50])
def test_a_slow_drift_of_the_gradient_norm_is_no_spike_and_no_divergence(times):
    values = np.geomspace(1, times, 2000) * np.random.default_rng(0).lognormal(0, 0.1, 2000)
    records = [numbers(s, grads=v, loss=1.0) for s, v in enumerate(values)]
    assert run(records, rules=(Spike(), Diverging()))[0] == []


# --- diverging ----------------------------------------------------------------------------------------------


def rising(to, *, flat=100, high=40, norm=1.0, start=None, spread=0.0, scatter=0.0):
    """Losses that are 1, with a spread, and then stay at `to`; the first one is `start`. The gradient norm likewise."""
    losses = np.append(np.exp(np.resize([spread, -spread], flat)), np.full(high, to))
    losses[0] = losses[0] if start is None else start
    norms = np.append(np.exp(np.resize([scatter, -scatter], flat)), np.full(high, norm))
    return [numbers(s, loss=v, grads=n) for s, (v, n) in enumerate(zip(losses, norms, strict=True))]


@pytest.mark.parametrize(
    ("rule", "more", "expected"),
    [
        (Diverging(), dict(to=2.9), None),
        (Diverging(), dict(to=3.1), "WARN"),
        (Diverging(), dict(to=9.9), "WARN"),
        (Diverging(), dict(to=10.1), "ERROR"),
        (Diverging(), dict(to=3.1, norm=2.9), "WARN"),
        (Diverging(), dict(to=3.1, norm=3.1), "ERROR"),
        (Diverging(), dict(to=3.1, norm=3.2, scatter=0.4), "WARN"),
        (Diverging(), dict(to=3.1, norm=3.35, scatter=0.4), "ERROR"),
        (Diverging(), dict(to=2.9, norm=100.0), None),
        (Diverging(times=5.0), dict(to=4.9), None),
        (Diverging(times=5.0), dict(to=5.1), "WARN"),
        (Diverging(far=4.0), dict(to=3.9), "WARN"),
        (Diverging(far=4.0), dict(to=4.1), "ERROR"),
        (Diverging(), dict(to=3.2, spread=0.4), None),
        (Diverging(), dict(to=3.35, spread=0.4), "WARN"),
        (Diverging(), dict(to=5.0, start=510.0), None),
        (Diverging(), dict(to=5.0, start=490.0), "WARN"),
    ],
)
def test_a_loss_far_above_its_best_stretch_is_told(rule, more, expected):
    """Where the losses scatter it takes two sigmas; below a hundredth of the first loss nothing is called diverging."""
    found = only(rule, rising(**more))
    assert (found[-1].level.name if found else None) == expected
    assert all(100 <= a.step <= 109 for a in found)
    assert first_causes(found) == ["learning_rate_too_high"] * len(found)


@pytest.mark.parametrize(("high", "step"), [(8, None), (9, 108)])
def test_a_jump_is_told_at_the_ninth_probe_at_which_it_stays(high, step):
    found = only(Diverging(), [*rising(4.0, high=high), *[numbers(s, loss=1.0) for s in range(100 + high, 160)]])
    assert [a.step for a in found] == ([] if step is None else [step])


@pytest.mark.parametrize("to", [20.0, 1e6])
def test_a_spike_that_recovers_is_not_divergence(to):
    losses = np.ones(200)
    losses[[20, 120, 121, 150]] = to
    assert only(Diverging(), [numbers(s, loss=v) for s, v in enumerate(losses)]) == []


def test_losses_that_can_be_negative_are_not_judged():
    losses = [*np.linspace(-1, -5, 100), *np.full(60, 100.0)]
    assert only(Diverging(), [numbers(s, loss=v) for s, v in enumerate(losses)]) == []


def test_a_better_loss_and_a_rise_before_a_mark_are_no_divergence():
    assert only(Diverging(), [numbers(s, loss=100 * 0.97**s) for s in range(300)]) == []
    records = rising(5.0, high=100)
    assert marked(Diverging(), records[:100], 99, records[100:]) == []


@pytest.mark.parametrize(
    ("rule", "to", "high", "expected"),
    [
        (Diverging(), 9.9, 40, None),
        (Diverging(), 10.1, 40, (17, "WARN")),
        (Diverging(), 99.0, 40, (17, "WARN")),
        (Diverging(), 101.0, 40, (17, "ERROR")),
        (Diverging(), 101.0, 7, None),
        (Diverging(), 10.1, 8, (17, "WARN")),
        (Diverging(early=12), 10.1, 40, (21, "WARN")),
        (Diverging(early=12), 10.1, 11, None),
        (Diverging(far=5.0), 4.9, 40, None),
        (Diverging(far=5.0), 5.1, 40, (17, "WARN")),
        (Diverging(very_far=50.0), 49.0, 40, (17, "WARN")),
        (Diverging(very_far=50.0), 51.0, 40, (17, "ERROR")),
    ],
)
def test_a_loss_far_above_its_first_values_is_told_after_eight_steps(rule, to, high, expected):
    found = only(rule, [*rising(to, flat=10, high=high), *[numbers(s, loss=1.0) for s in range(10 + high, 60)]])
    assert levels(found) == ([] if expected is None else [expected])
    assert first_causes(found) == ["learning_rate_too_high"] * len(found)


@pytest.mark.parametrize(
    ("cosine", "cause"),
    [
        (None, "learning_rate_too_high"),
        (-0.9, "learning_rate_too_high"),
        (0.29, "learning_rate_too_high"),
        (0.31, "ascent"),
        ((-0.9, 0.9, -0.9), "ascent"),
        ((-0.9, -0.9, 0.9), "learning_rate_too_high"),
        ((NAN, NAN, NAN), "learning_rate_too_high"),
    ],
)
def test_updates_of_a_matrix_along_its_gradient_make_divergence_an_ascent(cosine, cause):
    losses = [1.0] * 10 + [20.0] * 20
    found = only(Diverging(), [layers(s, loss=v, cosine=cosine) for s, v in enumerate(losses)])
    assert levels(found) == [(17, "WARN")] and first_causes(found) == [cause]


def test_steps_count_at_the_start_not_probes():
    losses = [1.0] * 4 + [50.0] * 3
    found = only(Diverging(), [numbers(s * 100, loss=v) for s, v in enumerate(losses)])
    assert levels(found) == [(600, "WARN")]


@pytest.mark.parametrize(("to", "alerts"), [(19.0, False), (21.0, True)])
def test_the_first_values_are_the_median_of_four(to, alerts):
    losses = [1.0, 3.0] * 5 + [to] * 10
    assert bool(only(Diverging(), [numbers(s, loss=v) for s, v in enumerate(losses)])) is alerts


def test_a_rising_loss_that_turned_nan_is_left_to_nonfinite():
    losses = [1.0] * 10 + [20.0] * 5 + [NAN] * 20
    assert only(Diverging(), [numbers(s, loss=v) for s, v in enumerate(losses)]) == []


# --- nonfinite ----------------------------------------------------------------------------------------------


def broken(*phases, step=0, **scalars):
    """A record with one bad element in the last leaf of each of these phases."""
    bad = {phase: np.array([0, phase in phases], np.int32) for phase in PHASES}
    opt = dict(step=step + 1, **scalars)
    base = flow(
        step,
        opt=opt,
        loss=NAN if "loss" in phases else 1.0,
        nonfinite=bad["params"],
        grads_bad=bad["grads"],
        updates_bad=bad["updates"],
    )
    n = len(base.leaves["optimizer"])
    more = {
        "batch.nonfinite": bad["batch"],
        "metric_arrays.nonfinite": bad["metrics"],
        "optimizer.nonfinite": np.array([0] * (n - 1) + ["optimizer" in phases], np.int32),
        **({"eval.loss": float("nan")} if "eval" in phases else {}),
    }
    tables = {g: leaves(g, ("a", "b")) for g in ("batch", "metric_arrays")}
    return Record(step, 0.0, {**base.values, **more}, {**base.leaves, **tables})


@pytest.mark.parametrize("order", range(len(PHASES)))
def test_the_first_phase_of_a_step_is_named_and_the_later_ones_are_listed(order):
    words = ("batch", "loss", "metric", "evaluation", "gradients", "updates", "parameters", "optimizer state")
    (found,) = only(Nonfinite(), [broken(*PHASES[order:])])
    assert found.title.endswith(words[order]) and found.level is Level.ERROR
    listed, _, fine = found.message.partition("Finite at that step")
    assert all(word in listed for word in words[order:])
    assert all(word in fine for word in words[:order] if word not in ("metric", "evaluation"))
    assert set(found.values) == {f"{phase}.nonfinite" for phase in PHASES[order:]}


@pytest.mark.parametrize(
    ("phases", "scalars", "expected"),
    [
        (("grads",), dict(last_finite=0), "INFO"),
        (("grads", "updates"), dict(last_finite=0), "INFO"),
        (("grads",), dict(last_finite=1), "ERROR"),
        (("grads",), {}, "ERROR"),
        (("updates",), dict(last_finite=0), "ERROR"),
        (("grads", "params"), dict(last_finite=0), "ERROR"),
        (("loss", "grads"), dict(last_finite=0), "ERROR"),
        (("metrics",), dict(last_finite=0), "WARN"),
        (("metrics", "grads"), dict(last_finite=0), "ERROR"),
    ],
)
def test_bad_gradients_of_a_step_that_was_skipped_on_purpose_are_only_information(phases, scalars, expected):
    assert levels(only(Nonfinite(), [broken(*phases, **scalars)])) == [(0, expected)]


def test_bad_gradients_behind_a_finite_loss_point_at_the_backward_pass_and_name_the_leaf():
    (found,) = only(Nonfinite(), [broken("grads")])
    assert first_causes([found]) == ["nan_gradient_op"] and found.paths == ("b",)
    assert "held 1 non-finite element in 1 of 2 leaves, first in b." in found.message


def test_a_skipped_step_that_turns_into_bad_parameters_is_told_again():
    records = [broken("grads", last_finite=0), broken("grads", "params", step=1, last_finite=1)]
    assert levels(only(Nonfinite(), records)) == [(0, "INFO"), (1, "ERROR")]


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_may_be_allowed(phase):
    assert only(Nonfinite(allow=(phase,)), [broken(phase)]) == []
    assert len(only(Nonfinite(allow=(phase,)), [broken(*PHASES)])) == 1


FAULTS = {
    "zero_gradients": dict(grads=(0.0, 1.0, 1.0)),
    "absorbed_updates": dict(absorbed=1.0),
    "update_ratio": dict(ratio=1.0),
    "vanishing_gradients": FADED,
    "dead_units": dict(activations=dict(dead=1.0)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({}, ["fault"]),
        (dict(loss=NAN), ["nonfinite"]),
        (dict(grads_bad=(0, 0, 1)), ["nonfinite"]),
        (dict(nonfinite=(0, 0, 1)), ["nonfinite"]),
    ],
)
def test_what_else_a_bad_loss_gradient_or_parameter_shows_is_a_consequence(fault, bad, said):
    table = leaves(paths=LAYERS.paths, shapes=LAYERS.shapes, dtypes=("bfloat16",) * 3)
    found = run([flow(s, table=table, **{"loss": 1.0, **FAULTS[fault], **bad}) for s in range(40)])[0]
    assert [a.rule for a in found] == [fault if rule == "fault" else rule for rule in said]


# --- lost_update by fingerprints ----------------------------------------------------------------------------


def passed(step, outside, entry, leaving, table=LAYERS, **more):
    texts, enters, leaves_ = (tuple(f"mix64:{t}" for t in word) for word in (outside, entry, leaving))
    return flow(step, table=table, texts=texts, **{"updates.entry": enters, "updates.leaving": leaves_}, **more)


@pytest.mark.parametrize(
    ("outside", "entry", "leaving", "lost"),
    [
        ("abc", "abc", "xyz", LAYERS.paths),
        ("xbz", "abc", "xyz", ("b.kernel",)),
        ("abc", "abc", "abz", ("b.bias",)),
        ("xyz", "abc", "xyz", ()),
        ("abc", "abc", "abc", ()),
        ("uvw", "abc", "xyz", ()),
    ],
)
def test_parameters_that_left_the_update_changed_and_are_outside_what_they_were_are_told_at_once(
    outside, entry, leaving, lost
):
    found = only(LostUpdate(), [passed(0, outside, entry, leaving)])
    assert levels(found) == ([(0, "ERROR")] if lost else []) and all(a.paths == lost for a in found)


def test_a_step_taken_back_by_a_loop_that_moves_otherwise_is_a_warning():
    found = only(
        LostUpdate(),
        [passed(s, (f"a{s}", f"b{s}", f"c{s}"), "abc", "xyz") for s in range(3)] + [passed(3, "abc", "abc", "xyz")],
    )
    assert levels(found) == [(3, "WARN")] and found[0].title == "The step's result does not arrive"


def test_a_step_whose_state_is_dropped_is_named_from_the_second_probe_on():
    records = [
        passed(0, "abc", "abc", "abc", opt=dict(step=0)),
        passed(1, "abc", "abc", "xyz", opt=dict(step=0), **{"watch.traced": 1}),
    ]
    assert first_causes(only(LostUpdate(), records)) == ["state_dropped"]


def test_fingerprints_of_another_method_and_of_other_leaves_prove_nothing():
    record = passed(0, "abc", "abc", "xyz")
    texts = tuple(t.replace("mix64", "xxh3") for t in record.values["params.fingerprint"])
    assert only(LostUpdate(), [Record(0, 0.0, {**record.values, "params.fingerprint": texts}, record.leaves)]) == []
    others = {**record.leaves, "params": leaves(paths=("k", "l", "m"))}
    assert only(LostUpdate(), [Record(0, 0.0, record.values, others)]) == []


# --- usage --------------------------------------------------------------------------------------------------


def unmeasured(step, said="the state is split", **more):
    return params(step, (f"a{step}", f"b{step}"), **{"watch.unmeasured": said}, **more)


def test_a_watched_optimizer_that_cannot_be_measured_is_told_once_and_only_when_it_steps():
    found = only(Usage(), [unmeasured(s, opt=dict(step=max(0, s - 5))) for s in range(200)])
    assert levels(found) == [(6, "INFO")] and "the state is split" in found[0].message
    assert only(Usage(), [unmeasured(s, opt=dict(step=7)) for s in range(200)]) == []
    assert only(Usage(), [unmeasured(s) for s in range(200)]) == []


def missing(step, missed, count, steps=1):
    return params(step, (f"a{step}", f"b{step}"), opt=dict(step=count), steps=steps, **{"watch.missed": missed})


@pytest.mark.parametrize(
    ("missed", "stride", "expected"),
    [
        ((1, 1), 1, [(1, "INFO")]),
        ((0, 1, 0, 1), 1, []),
        ((1,), 1, []),
        ((0, 0, 1, 1), 1, [(3, "INFO")]),
        ((1, 1, 1), 0.5, []),
    ],
)
def test_armed_steps_that_leave_nothing_are_told_after_two_in_a_row_of_an_optimizer_that_always_steps(
    missed, stride, expected
):
    found = only(Usage(), [missing(10 * s, bool(m), int(10 * s * stride), 10) for s, m in enumerate(missed)])
    assert levels(found) == [(10 * s, level) for s, level in expected] and first_causes(found) == [None] * len(found)


def test_both_ways_to_say_that_nothing_can_be_measured_are_one():
    records = [missing(s, True, s) for s in range(5)] + [unmeasured(s, opt=dict(step=s)) for s in range(5, 10)]
    assert len(only(Usage(), records)) == 1


def test_all_rules_at_their_defaults_are_in_the_set():
    assert {type(rule) for rule in default()} >= {Ratio, Clipping, DeadUnits, VanishingGradients, Spike, Diverging}
