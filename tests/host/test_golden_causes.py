"""The diagnosis says today what it said when it was last read by a person (see golden.py)."""

from __future__ import annotations

import golden


def test_the_causes_given_these_facts_are_the_ones_that_were_read():
    now, then = golden.given_facts(), golden.stored("given_facts")
    assert {k: (then.get(k), now.get(k)) for k in {*now, *then} if now.get(k) != then.get(k)} == {}


def test_the_alerts_of_all_runs_are_the_ones_that_were_read():
    now, then = golden.runs(), golden.stored("runs")
    assert len(now) == len(then)
    assert [(i, b, a) for i, (a, b) in enumerate(zip(now, then, strict=True)) if a != b] == []
