"""Each rule: a run that must alert and a near miss that must not."""

from __future__ import annotations

import numpy as np
import pytest
from builders import leaves, params, run
from runs import remembering

from nnx_probes.errors import ArgumentError
from nnx_probes.host.alert import Level
from nnx_probes.host.history import Facts
from nnx_probes.host.rules import FrozenParams, Nonfinite, default


def slugs(alerts):
    return [(a.step, a.rule, a.level.name) for a in alerts]


def new(s):
    """A fingerprint no other step has."""
    return chr(0x4E00 + s)


def first_causes(alerts):
    return [a.causes[0].slug if a.causes else None for a in alerts]


def trial(update, absorbed=(0.0, 0.0), later=1.0, earlier=1.0):
    return {
        "params.trial_update": np.array(update, np.float32),
        "params.trial_absorbed": np.array(absorbed, np.float32),
        "trial.later": later,
        "trial.earlier": earlier,
    }


# --- frozen_params ------------------------------------------------------------------------------------------


def test_the_whole_group_standing_still_over_two_updates_is_an_error():
    alerts, _ = run([params(s, "ab") for s in range(3)])
    assert slugs(alerts) == [(1, "frozen_params", "ERROR")] or slugs(alerts) == [(2, "frozen_params", "ERROR")]
    assert alerts[0].paths == ("a", "b")


def test_one_update_without_a_change_is_none():
    alerts, _ = run([params(0, "ab"), params(1, "ab", opt=dict(step=1)), params(2, "cd", opt=dict(step=2))])
    assert alerts == []


def test_one_leaf_that_never_moved_is_told_after_eight_updates():
    alerts, _ = run([params(s, new(s) + "b", opt=dict(step=s)) for s in range(9)])
    assert slugs(alerts) == [(8, "frozen_params", "WARN")] and alerts[0].paths == ("b",)
    assert run([params(s, new(s) + "b", opt=dict(step=s)) for s in range(8)])[0] == []


def test_one_leaf_that_moved_before_gets_sixty_four_updates():
    states = [params(0, "0a", opt=dict(step=0))] + [params(s, new(s) + "b", opt=dict(step=s)) for s in range(1, 80)]
    alerts, _ = run(states)
    assert slugs(alerts) == [(65, "frozen_params", "WARN")]


def test_leaves_outside_the_filter_may_rest():
    table = leaves(trained=(True, False))
    assert run([params(s, new(s) + "b", table=table, opt=dict(step=s)) for s in range(40)])[0] == []


def test_a_falling_loss_makes_it_a_stale_view_and_a_warning():
    alerts, _ = run([params(s, "ab", loss=1 / (s + 1), opt=dict(step=0)) for s in range(5)])
    assert slugs(alerts)[-1][1:] == ("frozen_params", "WARN") or alerts[0].level is Level.ERROR
    losing, _ = run([params(s * 10, "ab", loss=1 / (s + 1), steps=1, opt=dict(step=0)) for s in range(5)])
    assert "stale_view" in [c.slug for c in losing[-1].causes]


def test_exact_convergence_is_only_information():
    losses = [1.0, 0.0, 0.0, 0.0, 0.0]
    alerts, _ = run([params(s, "ab" if s else "xy", loss=losses[s], opt=dict(step=s)) for s in range(5)])
    assert {a.level for a in alerts} <= {Level.INFO}


def test_a_schedule_at_rest_is_quiet_and_one_that_ran_out_is_not():
    def states(later, earlier):
        found = [params(0, "xy", opt=dict(step=0))]
        return found + [
            params(s, "ab", opt=dict(step=s, moments=str(s)), **trial((0, 0), later=later, earlier=earlier))
            for s in range(1, 6)
        ]

    assert run(states(later=1.0, earlier=0.0))[0] == []
    alerts, _ = run(states(later=0.0, earlier=1.0))
    assert slugs(alerts) == [(3, "frozen_params", "ERROR")] and first_causes(alerts) == ["learning_rate_zero"]


def test_the_last_tiny_steps_of_a_decay_are_quiet():
    found = [params(0, "xy", opt=dict(step=0))]
    found += [params(s, "ab", opt=dict(step=s), **trial((1e-12, 1e-12), absorbed=(1.0, 1.0))) for s in range(1, 15)]
    assert run(found)[0] == []


def test_leaves_left_out_by_design_are_only_information():
    found = [params(s, new(s) + "b", opt=dict(step=s), **trial((0.1, 0.0))) for s in range(12)]
    alerts, _ = run(found)
    assert slugs(alerts) == [(8, "frozen_params", "INFO")] and first_causes(alerts) == ["subset_excluded"]


def test_a_leaf_of_nan_is_no_frozen_leaf():
    found = [params(s, new(s) + "n", nonfinite=(0, 4), opt=dict(step=s)) for s in range(20)]
    assert {a.rule for a in run(found)[0]} == {"nonfinite"}


def test_a_filter_that_selects_nothing_is_told_at_the_first_probe():
    more = {"optimizer.selects_nothing": True, "optimizer.wrt": "LoRAParam"}
    alerts, _ = run([params(0, "ab", opt=dict(step=1), **more)])
    assert slugs(alerts) == [(0, "frozen_params", "ERROR")] and first_causes(alerts) == ["wrt_selects_nothing"]
    assert "LoRAParam" in alerts[0].causes[0].why


@pytest.mark.parametrize(
    ("opt", "more", "facts", "cause"),
    [
        (dict(step=0), {}, Facts(), "state_dropped"),
        (dict(step=0), {"watch.traced": 0, "watch.eager": 0}, Facts(watched=True), "update_not_called"),
        (dict(count=1, zero=True), {}, Facts(), "gradient_cut"),
        (dict(moving=True), {}, Facts(other_model=True), "other_copy_trained"),
        (
            dict(moving=True),
            trial((1e-7, 1e-7), (1.0, 1.0), later=1e-7, earlier=1e-7),
            Facts(),
            "learning_rate_too_low",
        ),
        (dict(moving=False), trial((0, 0), later=0, earlier=0), Facts(), "transform_zeroes_updates"),
        (dict(moving=True), trial((0, 0), later=0, earlier=0), Facts(), "learning_rate_zero"),
    ],
)
def test_the_causal_split_names_the_right_cause_first(opt, more, facts, cause):
    def state(s):
        if opt == dict(step=0):
            return dict(step=0)
        if "count" in opt:
            return dict(step=s, zero=True)
        return dict(step=s, moments=str(s) if opt["moving"] else "m")

    alerts, _ = run([params(s, "ab", loss=1.0, opt=state(s), **more) for s in range(24)], facts)
    assert first_causes(alerts)[0] == cause


@pytest.mark.parametrize("rate", [None, 0.01, 0.0])
def test_a_rate_of_zero_is_not_blamed_for_what_the_memory_of_lbfgs_does(rate):
    scalars = {} if rate is None else dict(learning_rate=rate)
    more = trial((3e-10, 0.0), (0.5, 0.0), later=2e-9, earlier=0.7)
    states = [params(s, "ab", loss=1.0, opt=dict(step=s, moments=str(s), **scalars), **more) for s in range(150)]
    (alert,), _ = run([remembering(state) for state in states])
    slugs_ = [cause.slug for cause in alert.causes]
    assert (slugs_[0], "learning_rate_zero" in slugs_) == (
        ("learning_rate_zero", True) if rate == 0 else ("transform_zeroes_updates", False)
    )


def test_a_known_rate_above_zero_is_not_called_zero_where_no_schedule_speaks_for_it():
    more = trial((0, 0), later=0, earlier=0)
    alerts, _ = run(
        [params(s, "ab", loss=1.0, opt=dict(step=s, moments=str(s), learning_rate=0.01), **more) for s in range(9)]
    )
    assert first_causes(alerts) == ["transform_zeroes_updates"]
    assert "learning_rate_zero" not in [cause.slug for cause in alerts[0].causes]


# --- nonfinite ----------------------------------------------------------------------------------------------


def test_a_bad_loss_is_an_error_at_once_and_told_once():
    alerts, _ = run([params(s, new(s) * 2, loss=float("nan") if s >= 2 else 1.0, opt=dict(step=s)) for s in range(9)])
    assert slugs(alerts) == [(2, "nonfinite", "ERROR")]


def test_the_first_phase_and_the_first_leaf_are_named():
    alerts, _ = run([params(0, "ab", nonfinite=(0, 3), loss=float("inf"))])
    assert "loss" in alerts[0].title and "parameters" in alerts[0].message


def test_allowed_phases_are_quiet():
    rules = default(nonfinite=Nonfinite(allow=("loss",)))
    assert run([params(s, new(s) * 2, loss=float("inf"), opt=dict(step=s)) for s in range(3)], rules=rules)[0] == []


def test_bad_parameters_after_a_finite_loss_point_at_the_gradient():
    alerts, _ = run([params(0, "ab", nonfinite=(1, 0), loss=0.5)])
    assert first_causes(alerts) == ["nan_gradient_op"] and alerts[0].paths == ("a",)


def test_growth_before_the_end_points_at_the_learning_rate():
    losses = [1.0, 2.0, 9.0, 80.0, float("nan")]
    alerts, _ = run([params(s, new(s) * 2, loss=losses[s], nonfinite=(4, 4) if s == 4 else None) for s in range(5)])
    assert first_causes(alerts) == ["learning_rate_too_high"]


def test_a_loss_that_fell_before_the_end_does_not_point_at_the_learning_rate():
    losses = [1.8, 0.038, 0.047, 0.008, float("nan")]
    alerts, _ = run([params(s, new(s) * 2, loss=losses[s], nonfinite=(4, 4) if s == 4 else None) for s in range(5)])
    assert "learning_rate_too_high" not in [c.slug for c in alerts[0].causes]


def test_a_nan_that_began_between_two_probes_offers_the_batches_nobody_saw():
    more = {"batch.nonfinite": np.zeros(1, np.int32)}
    table = leaves("batch", ("x",))
    found = []
    for s in range(3):
        bad = s == 2
        one = params(
            s * 100, new(s) * 2, loss=float("nan") if bad else 1.0, nonfinite=(4, 4) if bad else None, steps=100
        )
        values = {**one.values, **more, "params.largest": 1.0}
        found.append(type(one)(one.step, 0.0, values, {**one.leaves, "batch": table}))
    (alert,), _ = run(found)
    assert [c.slug for c in alert.causes][:2] == ["nonfinite_batch", "nonfinite_in_forward"]
    assert "steps 101 to 200" in alert.causes[0].why and "steps 101 to 200" in alert.causes[1].why


def test_parameters_that_stand_still_because_of_nan_are_not_also_frozen():
    found = [params(s, "ab", nonfinite=(0, 4), loss=float("nan"), opt=dict(step=s)) for s in range(100)]
    assert {a.rule for a in run(found)[0]} == {"nonfinite"}


def test_a_nan_accepted_after_skips_is_told_apart():
    opt = dict(step=3, notfinite_count=3, total_notfinite=3)
    alerts, _ = run([params(0, "ab", nonfinite=(4, 4), loss=0.5, opt=opt)])
    assert first_causes(alerts) == ["nan_accepted_after_skips"]


# --- lost_update and optimizer_reset ------------------------------------------------------------------------


def test_a_traced_update_that_never_counts_is_a_lost_update_and_not_also_frozen():
    found = [params(s, "ab", loss=1.0, opt=dict(step=0), **{"watch.traced": 1}) for s in range(12)]
    alerts, _ = run(found, Facts(watched=True))
    assert slugs(alerts) == [(1, "lost_update", "ERROR")] and first_causes(alerts) == ["state_dropped"]


def test_a_traced_update_that_counts_is_fine():
    found = [params(s, new(s) * 2, opt=dict(step=s), **{"watch.traced": 1}) for s in range(5)]
    assert run(found, Facts(watched=True))[0] == []


def test_deleted_arrays_are_told_in_words():
    alerts, _ = run([params(0, ("deleted", "deleted"))])
    assert slugs(alerts) == [(0, "lost_update", "WARN")] and first_causes(alerts) == ["stale_view"]


def test_a_state_that_comes_back_twice_is_told_and_once_is_not():
    texts = ["aa", "bb", "aa", "cc"]
    assert run([params(s, t, opt=dict(step=s)) for s, t in enumerate(texts)])[0] == []
    alerts, _ = run([params(s, t, opt=dict(step=s)) for s, t in enumerate([*texts, "aa"])])
    assert slugs(alerts) == [(4, "lost_update", "WARN")] and first_causes(alerts) == ["state_restored"]


def to_and_fro(texts, count=lambda s: s + 1, by=1):
    states = [params(s * by, t, steps=by, opt=dict(step=count(s * by))) for s, t in enumerate(texts)]
    return [a for a in run(states)[0] if a.rule == "lost_update"]


FLIPS = ["aa", "bb"] * 6


@pytest.mark.parametrize("by", [1, 5])
def test_a_sign_optimizer_that_flips_between_two_states_near_its_optimum_has_lost_nothing(by):
    assert to_and_fro(["zz", "yy", *FLIPS], by=by) == []
    assert to_and_fro([*FLIPS, "cc", "dd", *["cc", "dd"] * 3, "ee", "ff", "ee", "ff"], by=by) == []


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (FLIPS, lambda s: s // 2 + 1),
        (FLIPS, lambda s: 7),
        ([*FLIPS, "cc", "dd", "cc", "ee", "cc"], lambda s: s + 1),
        (["aa", "bb", "cc"] * 4, lambda s: s + 1),
    ],
)
def test_states_that_come_back_otherwise_or_while_the_optimizer_does_not_count_are_told(texts, count):
    assert slugs(to_and_fro(texts, count))[0][1:] == ("lost_update", "WARN")


def test_an_optimizer_that_goes_back_is_told_at_once():
    alerts, _ = run([params(s, new(s) * 2, opt=dict(step=(5, 6, 1)[s])) for s in range(3)])
    assert slugs(alerts) == [(2, "optimizer_reset", "ERROR")]


def test_parameters_that_move_without_their_optimizer_are_told_after_two_probes():
    alerts, _ = run([params(s, new(s) * 2, opt=dict(step=0)) for s in range(4)])
    assert slugs(alerts) == [(2, "optimizer_reset", "ERROR")] and first_causes(alerts) == ["optimizer_recreated"]


# --- the set ------------------------------------------------------------------------------------------------


def test_an_unknown_rule_name_gets_the_closest_one():
    with pytest.raises(ArgumentError, match="Did you mean 'frozen_params'"):
        default(frozen_param=FrozenParams())


def test_rules_can_be_left_out():
    assert run([params(s, "ab") for s in range(5)], rules=default(frozen_params=None))[0] == []


def test_an_episode_is_told_again_after_sixty_four_quiet_probes():
    bad, good = (lambda s: params(s, new(s) * 2, loss=float("nan"))), (lambda s: params(s, new(s) * 2, loss=1.0))
    states = [bad(0)] + [good(s) for s in range(1, 64)] + [bad(64)] + [good(s) for s in range(65, 129)] + [bad(129)]
    assert [a.step for a in run(states)[0]] == [0, 129]
