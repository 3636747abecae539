"""What callbacks return and raise, as one monitor sees it."""

from __future__ import annotations

import pytest

import nnx_probes as probes
from nnx_probes.callbacks.plugged import Plugged
from nnx_probes.host.history import Facts, History
from nnx_probes.host.pace import Pace
from nnx_probes.host.record import Record


class Explaining(probes.Callback):
    def __init__(self, what):
        self.what = what

    def explain(self, record, history):
        return self.what


@pytest.mark.parametrize("what", [3, "text", ["a", "b"], [("a", 1)], True])
def test_an_explanation_that_is_no_mapping_is_noted_and_the_others_are_kept(what):
    callbacks = [Explaining({"a": 1}), Explaining(what), Explaining(None), Explaining({"b": 2})]
    plugged = Plugged(callbacks, [Pace(1) for _ in callbacks])
    assert plugged.explain(Record(0, 0.0, {}), History(Facts())) == {"a": 1, "b": 2}
    assert plugged.failures == {"Explaining.explain": 1}


class Prepared(probes.Callback):
    """Notes at which steps it was told that the next one is due, and which were."""

    def __init__(self):
        self.before, self.due = [], []

    def before_due(self, ctx):
        self.before.append(ctx.step)

    def on_step_end(self, ctx):
        self.due.append(ctx.step)


@pytest.mark.parametrize(("by", "every"), [(1, 4), (10, 40), (10, 100), (7, 50)])
def test_a_loop_whose_steps_grow_by_more_than_1_is_prepared_from_its_second_probe_on(by, every):
    callback = Prepared()
    with probes.Monitor(None, every=every, callbacks=[callback], rules=[]) as monitor:
        steps = range(0, 40 * by, by)
        for step in steps:
            monitor(step)
    assert len(callback.due) > 2
    last = len(callback.due)  # it may be prepared for one more
    assert callback.before[1:last] == [step - by for step in callback.due[1:]]  # the first: before any step


def test_by_how_much_steps_grow_is_seen_anew_after_a_restart():
    callback = Prepared()
    with probes.Monitor(None, every=100, callbacks=[callback], rules=[]) as monitor:
        for step in range(0, 250, 1):
            monitor(step)
        monitor.mark(0, "restart")
        callback.before.clear()
        for step in range(0, 250, 10):
            monitor(step)
    assert callback.before == [90, 190]
