"""What goes wrong in a rule, in an explanation or in the fold over the records costs neither the alert nor the record."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from builders import flow, leaves, params

from nnx_probes.host import judge as judging
from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.judge import Judge
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.rules import FrozenParams, Nonfinite, default

NAN = float("nan")


def slip(*_, **__):
    raise ValueError("a slip")


def judged(judge, records):
    found = []
    for record in records:
        judge.observe(record)
        found += judge.verdicts(record)
    return [(a.step, a.rule, len(a.causes)) for a in found]


class Always(Rule):
    slug = "always"

    def check(self, record, history):
        return Alert(record.step, self.slug, Level(min(record.step + 1, 3)), "As told")


class Broken(Always):
    slug = "broken"
    check = slip


def test_an_alert_that_cannot_be_explained_goes_out_and_its_rule_stays(monkeypatch, caplog):
    monkeypatch.setattr(judging, "diagnose", slip)
    judge = Judge((Always(), Nonfinite()))
    with caplog.at_level(logging.WARNING, "nnx_probes"):
        found = judged(judge, [flow(s, loss=NAN if s else 1.0) for s in range(4)])
    assert found == [(0, "always", 0), (1, "always", 0), (1, "nonfinite", 0), (2, "always", 0)]
    assert judge.broken == {"causes": 4}
    assert [r.getMessage() for r in caplog.records] == ["the causes of an alert could not be found: ValueError: a slip"]


def test_a_rule_that_fails_is_left_out_from_then_on_and_the_others_are_not(caplog):
    judge = Judge((Broken(), Always()))
    assert judged(judge, [flow(s) for s in range(3)]) == [(s, "always", 0) for s in range(3)]
    assert judge.broken == {"broken": 1} and len(caplog.records) == 1


def test_a_record_that_cannot_be_folded_in_is_still_judged_and_holds_nothing_against_the_rules(monkeypatch, caplog):
    observe = History.observe
    monkeypatch.setattr(History, "observe", lambda self, record: slip() if record.step == 3 else observe(self, record))
    judge = Judge((*default(), Broken()))
    assert [found[:2] for found in judged(judge, [flow(s, loss=NAN if s == 3 else 1.0) for s in range(6)])] == [
        (3, "nonfinite")
    ]
    assert judge.broken == {"broken": 1, "history": 1} and judge.history.last.step == 5 and judge.lost is None
    assert "a record could not be added to what is known of the run: ValueError: a slip" in caplog.text


def test_what_a_trial_adds_may_fail_to_be_learnt(monkeypatch):
    monkeypatch.setattr(History, "learn", slip)
    judge = Judge((Always(),))
    assert judged(judge, [flow(0)]) == [(0, "always", 0)] and judge.broken == {"history": 1}
    assert str(judge.lost) == "a slip"


def test_a_slip_in_the_search_for_suspects_switches_that_rule_off_alone(monkeypatch):
    monkeypatch.setattr(FrozenParams, "suspects", slip)
    judge = Judge((FrozenParams(), Always()))
    assert [judge.observe(params(s, "ab")) for s in range(3)] == [False] * 3
    assert judged(judge, [params(3, "ab")]) == [(3, "always", 0)] and judge.broken == {"frozen_params": 1}


@pytest.mark.parametrize("top", [NAN, 7.0])
def test_an_integer_that_could_not_be_read_costs_no_alert(top):
    record = flow(0, loss=NAN)
    table = leaves("batch", ("x",), dtypes=("int32",))
    values = {**record.values, "batch.max_int": top, "batch.nonfinite": np.zeros(1, np.int32)}
    judge = Judge(default())
    judge.observe(record := Record(0, 0.0, values, {**record.leaves, "batch": table}))
    (alert,) = judge.verdicts(record)
    assert judge.broken == {} and alert.causes
    assert ("label_out_of_range" in {cause.slug for cause in alert.causes}) == (top == top)


def test_a_user_s_array_of_changing_length_costs_no_record():
    judge = Judge(default())
    assert judged(judge, [flow(s, **{"grads.mine": np.ones(1 + s % 3)}) for s in range(6)]) == []
    assert judge.broken == {} and judge.history.records == 6
