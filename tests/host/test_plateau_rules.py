"""Rules about the course of the loss: each has a run that must alert and near misses that must not."""

from __future__ import annotations

import numpy as np
import pytest
from builders import flow, leaves, numbers, params, run
from runs import FAR, classes, course, guessing, judged, level

import nnx_probes as probes
from nnx_probes.host.history import Facts
from nnx_probes.host.rules import DEFAULTS, ChanceLevel, Diverging, StalledLoss

LN10 = float(np.log(10))
NAN = float("nan")


def flat(value=LN10, n=40, first=None):
    return np.array([value if first is None else first, *[value] * (n - 1)])


def quarters(*values, of=4, before=24):
    """A loss that is 1 for 24 probes and then as long at each of these values."""
    return np.append(np.full(before, 1.0), np.repeat(values, of))


BRIEF = Facts(total_steps=160)
"""With 16 steps from probe to probe the warm-up is over at the second."""


# --- chance_level -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "times", "expected"),
    [
        (ChanceLevel(), 1.0, "WARN"),
        (ChanceLevel(), 1.019, "WARN"),
        (ChanceLevel(), 1.021, None),
        (ChanceLevel(), 0.981, "WARN"),
        (ChanceLevel(), 0.979, None),
        (ChanceLevel(within=0.1), 1.099, "WARN"),
        (ChanceLevel(within=0.1), 1.101, None),
    ],
)
@pytest.mark.parametrize("entropy", [FAR, 1.5])
def test_a_loss_near_what_guessing_scores_is_told(rule, times, expected, entropy):
    """Once near the logarithm of the number of classes, once near the entropy of their frequencies."""
    score, count = (LN10, 10) if entropy == FAR else (entropy, 1000)
    assert level(rule, guessing(flat(times * score), 16, count=count, entropy=entropy), BRIEF) == expected


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ((1, 1, 1, 1.039), "WARN"),
        ((1, 1, 1, 1.041), None),
        ((0.961, 1, 1, 1), "WARN"),
        ((0.959, 1, 1, 1), None),
        ((1.0, 1.1, 0.9, 1.0), None),
    ],
)
def test_each_quarter_of_the_stretch_is_near(at, expected):
    assert level(ChanceLevel(), guessing(LN10 * quarters(*at), 16), BRIEF) == expected


def test_one_odd_loss_in_the_stretch_changes_nothing():
    losses = flat()
    losses[-6] = 50.0
    assert level(ChanceLevel(), guessing(losses, 16), BRIEF) == "WARN"


@pytest.mark.parametrize(("entropy", "expected"), [(0.11, "WARN"), (0.09, None)])
def test_where_nearly_all_labels_are_of_one_class_nothing_is_said(entropy, expected):
    assert level(ChanceLevel(), guessing(flat(entropy), 16, entropy=entropy), BRIEF) == expected


@pytest.mark.parametrize(("count", "entropy"), [(1, FAR), (1000, 0.0), (1, -0.0)])
def test_labels_of_one_class_only_are_no_division_by_nothing(count, entropy):
    assert level(ChanceLevel(), guessing(flat(), 16, count=count, entropy=entropy), BRIEF) is None
    two = [classes(r, [count, 10], [entropy, LN10], ("x", "y")) for r in course(flat(), 16)]
    assert "the batch's y scores" in judged(ChanceLevel(), two, BRIEF).message


@pytest.mark.parametrize("began", [0, 10_000])
@pytest.mark.parametrize(
    ("rule", "total", "by", "probes"),
    [
        (ChanceLevel(), None, 1, 512),
        (ChanceLevel(), 1000, 1, 356),
        (ChanceLevel(), 2000, 1, 456),
        (ChanceLevel(), 5, 1, 257),
        (ChanceLevel(steps=100), None, 1, 356),
        (ChanceLevel(), None, 100, 19),
        (ChanceLevel(steps=4096), None, 16, 272),
    ],
)
def test_guessing_is_told_once_the_warm_up_and_the_stretch_are_over(rule, total, by, probes, began):
    """Warm-up: a tenth of the planned steps, else 256; stretch: 256 steps and at least 16 probes."""
    records = guessing(flat(n=probes), by, began)
    assert level(rule, records, Facts(total_steps=total)) == "WARN"
    assert level(rule, records[:-1], Facts(total_steps=total)) is None


def test_a_mark_starts_warm_up_and_stretch_anew():
    records = guessing(flat(n=813))
    assert level(ChanceLevel(), records, marks=(300,)) == "WARN"
    assert level(ChanceLevel(), records[:-1], marks=(300,)) is None


@pytest.mark.parametrize(
    ("loss", "count", "expected"),
    [
        (3.01 * LN10, 10, "INFO"),
        (2.99 * LN10, 10, None),
        (3.01 * np.log(2), 2, "INFO"),
        (2.99 * np.log(2), 2, None),
        (50.0, 1, None),
        (NAN, 10, None),
        (float("inf"), 10, "INFO"),
    ],
)
def test_a_first_loss_three_times_that_of_guessing_is_told(loss, count, expected):
    assert level(ChanceLevel(), guessing([loss], count=count)) == expected
    assert level(ChanceLevel(), guessing([1.0, loss], count=count)) is None


def test_the_first_loss_is_not_judged_where_the_labels_may_be_any_of_two_arrays():
    assert level(ChanceLevel(), guessing([50.0], count=[10, 10], entropy=[FAR, FAR], path=("x", "y"))) is None


@pytest.mark.parametrize("rule", [ChanceLevel(), StalledLoss()])
@pytest.mark.parametrize(("to", "quiet"), [(0.985, True), (1.0, False), (1.015, False)])
def test_a_loss_that_falls_is_on_its_way(rule, to, quiet):
    losses = LN10 * np.linspace(2 - to, to, 100) * np.exp(0.001 * np.resize([1, -1], 100))
    assert (level(rule, guessing(losses, 16), BRIEF) is None) is quiet


@pytest.mark.parametrize("rule", [ChanceLevel(), StalledLoss()])
@pytest.mark.parametrize(("texts", "quiet"), [("ab", True), (("a{}", "b"), False), (("a{}", "b{}"), False)])
def test_while_all_parameters_stand_still_that_is_the_finding(rule, texts, quiet):
    records = [
        classes(params(16 * i, [t.format(i) for t in texts], loss=LN10), 10, LN10)  # a standstill is of all of them
        for i in range(80)
    ]
    assert (level(rule, records, BRIEF) is None) is quiet


@pytest.mark.parametrize("rule", [ChanceLevel(), StalledLoss()])
def test_losses_that_are_not_finite_and_records_without_one_are_passed_over(rule):
    losses = flat(n=120)
    losses[1::3] = NAN
    losses[2::9] = np.inf
    assert level(rule, guessing(losses, 16), BRIEF) is not None
    assert level(rule, guessing(flat(NAN, n=120), 16), BRIEF) is None
    without = [numbers(16 * i) if i % 2 else r for i, r in enumerate(guessing(flat(n=200), 16))]
    assert level(rule, without[:-1], BRIEF) is not None and level(rule, without, BRIEF) is None


def test_without_labels_guessing_is_not_known():
    assert level(ChanceLevel(), course(flat(), 16), BRIEF) is None


# --- stalled_loss -------------------------------------------------------------------------------------------

SUPPORT = ("chance_level", "absorbed_updates", "zero_gradients", "vanishing_gradients", "dead_units")


@pytest.mark.parametrize("began", [0, 10_000])
@pytest.mark.parametrize(
    ("rule", "total", "by", "probes"),
    [
        (StalledLoss(), None, 1, 768),
        (StalledLoss(), 1000, 1, 612),
        (StalledLoss(), 10_000, 10, 200),
        (StalledLoss(steps=100), None, 1, 456),
        (StalledLoss(), None, 100, 67),
    ],
)
def test_a_stall_is_told_once_the_warm_up_and_the_stretch_are_over(rule, total, by, probes, began):
    """Stretch: twice the larger of 256 steps and 5 % of the planned ones, and at least 64 probes."""
    records = course(flat(1.0, n=probes), by, began)
    assert level(rule, records, Facts(total_steps=total)) == "INFO"
    assert level(rule, records[:-1], Facts(total_steps=total)) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_stretch_of_a_long_run_that_is_probed_at_every_step_is_as_long_as_said(seed):
    """Of 100,000 planned steps 10,000 are looked at, over which this loss falls by 5 %; the last 1024 say little."""
    losses = np.exp(-np.arange(21_000) / 200_000) * np.random.default_rng(seed).lognormal(0, 0.05, 21_000)
    assert level(StalledLoss(), course(losses), Facts(total_steps=100_000)) is None


def test_a_mark_starts_the_stall_anew():
    records = course(flat(1.0, n=1069))
    assert level(StalledLoss(), records, marks=(300,)) == "INFO"
    assert level(StalledLoss(), records[:-1], marks=(300,)) is None


@pytest.mark.parametrize(
    ("first", "to", "last", "expected"),
    [
        (1.0, 0.51, 0.51, "INFO"),
        (1.0, 0.49, 0.49, None),
        (1.0, 0.9, 0.9, "INFO"),
        (1.0, 0.9, 9e-7, None),
        (1.0, 5.0, 5.0, "INFO"),
        (0.0, 5.0, 5.0, None),
        (-1.0, 5.0, 5.0, None),
        (NAN, 0.9, 0.9, "INFO"),
    ],
)
def test_a_loss_at_half_its_first_value_counts_as_learnt(first, to, last, expected):
    losses = [*flat(to, 99, first=first), last]
    assert level(StalledLoss(), course(losses, 16), BRIEF) == expected


@pytest.mark.parametrize(
    ("rule", "at", "expected"),
    [
        (StalledLoss(), (1.0, 1.1, 0.992, 1.1), "INFO"),
        (StalledLoss(), (1.0, 1.1, 0.988, 1.1), None),
        (StalledLoss(), (1.0, 1.2, 1.1, 0.988), None),
        (StalledLoss(), (1.0, 0.988, 1.1, 1.1), "INFO"),
        (StalledLoss(better=0.1), (1.0, 1.2, 0.92, 1.2), "INFO"),
        (StalledLoss(better=0.1), (1.0, 1.2, 0.88, 1.2), None),
        (StalledLoss(), (0.9, 0.9, 0.9, 0.9), "INFO"),
        (StalledLoss(), (1.1, 1.2, 1.05, 1.3), "INFO"),
    ],
)
def test_a_loss_that_is_better_than_before_has_not_stalled(rule, at, expected):
    """Its second half is held against the 64 losses before the stretch and against its first quarter."""
    early = [1.4] * 64
    assert level(rule, course([*early, *quarters(*at, of=16, before=64)], 16), BRIEF) == expected


@pytest.mark.parametrize(("low", "expected"), [(40, "INFO"), (24, None)])
def test_the_median_of_the_64_losses_before_the_stretch_counts(low, expected):
    early = np.append(np.full(low, 1.0), np.full(64 - low, 1.4))
    losses = [1.4, *early, *np.repeat((1.1, 1.2, 1.05, 1.3), 16)]
    assert level(StalledLoss(), course(losses, 16), BRIEF) == expected


@pytest.mark.parametrize("raised", [(), ("spike", "nonfinite"), *[(slug,) for slug in SUPPORT], SUPPORT[::-1]])
def test_a_stall_is_information_alone_and_a_warning_with_what_speaks_for_it(raised):
    found = judged(StalledLoss(), course(flat(1.0, 80), 16), BRIEF, raised=raised)
    support = [slug for slug in SUPPORT if slug in raised]
    assert found.level.name == ("WARN" if support else "INFO")
    assert found.message.endswith(f"; with it: {', '.join(support)}." if support else "does not fall.")


@pytest.mark.parametrize(
    ("ratio", "once", "expected"),
    [
        (0.9e-5, None, "WARN"),
        (1.1e-5, None, "INFO"),
        (0.0, None, "INFO"),
        (0.9e-5, 1.1e-5, "INFO"),
        ((0.9e-5, 1.0, 0.9e-5), None, "WARN"),
        ((0.9e-5, 0.9e-5, 1.0), None, "INFO"),
    ],
)
def test_updates_that_were_always_tiny_make_it_a_warning(ratio, once, expected):
    """Those of the median matrix; the second leaf is a vector."""
    table = leaves(paths=("k", "b", "l"), shapes=((2, 2), (2,), (2, 2)))
    records = [flow(16 * i, table=table, loss=1.0, opt=False, ratio=ratio) for i in range(70)]
    if once is not None:
        records[3] = flow(48, table=table, loss=1.0, opt=False, ratio=once)
    found = judged(StalledLoss(), records, BRIEF)
    assert found.level.name == expected
    assert found.message.endswith("; with it: updates below 1e-5 of their matrices.") is (expected == "WARN")


@pytest.mark.parametrize("rule", [ChanceLevel(), StalledLoss()])
@pytest.mark.parametrize("seed", range(4))
def test_healthy_noisy_curves_are_quiet(rule, seed):
    rng, steps = np.random.default_rng(seed), np.arange(0, 4000, 40)
    curves = (LN10 * np.exp(-steps / 3000), LN10 * (1 + steps / 100) ** -0.3, 0.3 + 2 * np.exp(-steps / 1500))
    for curve in curves:
        records = guessing(curve * rng.lognormal(0, 0.05, len(steps)), 40, entropy=LN10)
        assert run(records, Facts(total_steps=4000), rules=(rule,))[0] == []


# --- which objective ----------------------------------------------------------------------------------------


def test_the_rules_that_take_a_falling_loss_for_granted_are_these():
    told = {rule.slug for rule in DEFAULTS if rule.descends}
    assert told == {"chance_level", "diverging", "overfitting", "stalled_loss"}


@pytest.mark.parametrize(
    ("rule", "records"),
    [
        (ChanceLevel(), guessing(flat(), 16)),
        (ChanceLevel(), guessing([50.0])),
        (StalledLoss(), course(flat(n=80), 16)),
        (Diverging(), course([1.0] * 10 + [50.0] * 10)),
    ],
)
def test_an_adversarial_objective_leaves_them_out(rule, records):
    assert level(rule, records, BRIEF) is not None
    assert level(rule, records, Facts(total_steps=160, objective="adversarial")) is None


@pytest.mark.parametrize(("objective", "said"), [("minimize", {"diverging"}), ("adversarial", set())])
def test_a_monitor_is_told_the_objective(objective, said):
    with probes.Monitor(None, every=1, callbacks=(probes.callbacks.LossProbe(),), objective=objective) as monitor:
        for step, loss in enumerate([1.0] * 10 + [50.0] * 20):
            monitor(step, loss=loss)
    assert {alert.rule for alert in monitor.alerts} == said and monitor.failures == {}
