"""Verdicts, rates and what counts as harm, from outcomes by hand."""

import math

import pytest

from nnx_probes.faults.catalogue.entry import Fault
from nnx_probes.faults.run import Found, Outcome
from nnx_probes.faults.score import harmful, judge, rate

FAULT = Fault(
    "f", "a fault", ("spike", "diverging"), ("ascent",), lambda r: r, ("mlp",), onset=10, within=5, leaf={"mlp": "a.b"}
)


def alert(step, rule="spike", level="WARN", causes=("ascent", "x"), paths=("a.b",)):
    return Found(step, rule, level, "title", tuple(paths), tuple(causes))


def outcome(*alerts, score=1.0):
    return Outcome(score, tuple(alerts), "", 1.0)


def verdict(*alerts, every=1):
    return judge(FAULT, "mlp", 0, outcome(*alerts), every=every)


@pytest.mark.parametrize(
    ("step", "every", "found"),
    [(10, 1, "found"), (15, 1, "found"), (16, 1, "late"), (59, 10, "found"), (60, 10, "found"), (61, 10, "late")],
)
def test_an_alert_counts_as_late_after_the_promised_delay(step, every, found):
    assert verdict(alert(step), every=every).found == found


def test_the_first_probe_after_the_onset_is_where_the_delay_begins():
    shifted = Fault("f", "", ("spike",), (), lambda r: r, ("mlp",), onset=11, within=1)
    assert judge(shifted, "mlp", 0, outcome(alert(30)), every=10).found == "found"
    assert judge(shifted, "mlp", 0, outcome(alert(31)), every=10).found == "late"


@pytest.mark.parametrize(
    "said",
    [(), (alert(12, rule="clipping"),), (alert(12, level="INFO"),), (alert(9),)],
    ids=["nothing", "another rule", "INFO only", "before the onset"],
)
def test_what_does_not_count_is_a_miss(said):
    found = verdict(*said)
    assert (found.found, found.step, found.top1, found.top3, found.leaf) == ("missed", -1, False, False, None)


def test_an_alert_before_the_onset_is_kept_as_a_false_one():
    assert verdict(alert(9), alert(12)).early == ("spike@9",)


def test_other_alerts_are_listed_and_the_worst_level_is_kept():
    found = verdict(alert(12), alert(13, rule="nonfinite", level="ERROR"))
    assert (found.others, found.worst) == (("nonfinite@13",), "ERROR")


@pytest.mark.parametrize(
    ("causes", "first", "three"),
    [(("ascent",), True, True), (("x", "y", "ascent"), False, True), (("x", "y", "z", "ascent"), False, False)],
)
def test_a_cause_counts_where_it_stands(causes, first, three):
    found = verdict(alert(12, causes=causes))
    assert (found.top1, found.top3) == (first, three)


def test_the_leaf_counts_if_the_alert_names_it():
    assert verdict(alert(12, paths=("x", "a.b"))).leaf is True
    assert verdict(alert(12, paths=("x",))).leaf is False
    nowhere = Fault("f", "", ("spike",), (), lambda r: r, ("mlp",))
    assert judge(nowhere, "mlp", 0, outcome(alert(1)), every=1).leaf is None


@pytest.mark.parametrize(
    ("faulty", "healthy", "hurt"),
    [
        ([2.0, 2.0], [1.0, 1.0], True),
        ([2.0, 1.0], [1.0, 1.0], False),
        ([math.nan, math.inf], [1.0, 1.0], True),
        ([1.11], [1.0], False),
        ([1.13], [1.0], True),
        ([0.02], [0.01], False),
        ([], [], False),
    ],
)
def test_harm_is_a_clearly_worse_score_with_every_seed(faulty, healthy, hurt):
    assert harmful([outcome(score=s) for s in faulty], [outcome(score=s) for s in healthy]) is hurt


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 120, 0.0, 0.0310), (50, 50, 0.9287, 1.0), (1, 2, 0.0945, 0.9055)],
)
def test_intervals_are_wilsons(hits, of, low, high):
    found = rate([True] * hits + [False] * (of - hits))
    assert (found.hits, found.of) == (hits, of)
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_a_rate_of_nothing_says_so():
    assert str(rate([])) == "0 of 0"
    assert math.isnan(rate([]).share)
    assert str(rate([True] * 47 + [False] * 3)) == "47 of 50 (94 %, 84 % to 98 %)"
