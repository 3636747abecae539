"""NaN and Inf that are there by design, and those that are not."""

from __future__ import annotations

import numpy as np
import pytest
from builders import flow, leaves, params, run
from runs import with_values

from nnx_probes.host.alert import Level
from nnx_probes.host.judge import Judge
from nnx_probes.host.record import Record
from nnx_probes.host.rules import default
from nnx_probes.host.rules.nonfinite import poisoned

INF = float("inf")
NAN = float("nan")


def masked(kind="Variable"):
    return leaves(paths=("w", "mask"), trained=(True, False), kinds=("Param", kind))


def with_mask(step, bad=(0, 6), text="mask", kind="Variable", loss=1.0, **more):
    return params(step, (f"w{step}", text), table=masked(kind), nonfinite=bad, loss=loss, opt=dict(step=step), **more)


def with_best(step, best=INF, path="best_value", bad=None, shape=(), **more):
    """A record of an optimizer that holds one number of this value."""
    record = params(step, (f"a{step}", f"b{step}"), loss=1.0, opt=dict(step=step, **{path: best}), **more)
    counts = np.array([0, 0, not np.isfinite(best) if bad is None else bad], np.int32)
    table = record.leaves["optimizer"]
    tables = {**record.leaves, "optimizer": leaves("optimizer", table.paths, shapes=((2, 2), (), shape))}
    return Record(step, 0.0, {**record.values, "optimizer.nonfinite": counts}, tables)


def found(records):
    return [(a.step, a.rule, a.level.name, a.paths) for a in run(records)[0]]


def test_a_mask_of_minus_infinity_is_no_finding_and_poisons_nothing():
    records = [with_mask(s) for s in range(9)]
    assert found(records) == [] and not any(poisoned(record) for record in records)


def test_a_mask_does_not_silence_the_other_rules():
    table = leaves(paths=("w", "v", "mask"), trained=(True, True, False), kinds=("Param", "Param", "Variable"))
    records = [
        flow(s, table=table, grads=(0.0, 1.0), nonfinite=(0, 0, 3), texts=(f"w{s}", f"v{s}", "m")) for s in range(20)
    ]
    assert [rule for _, rule, _, _ in found(records)] == ["zero_gradients"]


@pytest.mark.parametrize("loss", [NAN, 1.0])
def test_a_mask_is_told_neither_as_bad_nor_as_finite_when_something_else_breaks(loss):
    records = [with_mask(s) for s in range(3)]
    last = with_mask(3, (0 if loss != loss else 2, 6), loss=loss)
    (alert,), _ = run([*records, last])
    assert alert.paths == (() if loss != loss else ("w",))
    assert set(alert.values) == ({"loss.nonfinite"} if loss != loss else {"params.nonfinite"})
    assert "parameters" not in alert.message.partition("Finite at that step")[2]
    assert ("also: the parameters" in alert.message) is False


def test_a_mask_does_not_pass_for_bad_parameters_in_the_causes():
    batch = {"batch.nonfinite": np.zeros(1, np.int32), "batch.max_int": 12.0}
    records = [with_mask(s, loss=NAN if s == 3 else 1.0, **batch) for s in range(4)]
    records = [Record(r.step, 0.0, r.values, {**r.leaves, "batch": leaves("batch", ("x",))}) for r in records]
    (alert,), _ = run(records)
    assert "the parameters after it are not" not in " ".join(cause.why for cause in alert.causes)


@pytest.mark.parametrize(
    ("records", "step"),
    [
        ([with_mask(s, (4, 6)) for s in range(4)], 0),
        ([with_mask(s, (0, 6 * (s == 2))) for s in range(4)], 2),
        ([with_mask(s, text="mask" if s < 2 else "other") for s in range(4)], 2),
        ([with_mask(s, (0, 0 if s == 1 else 6), text=f"m{s % 2}") for s in range(4)], 2),
        ([with_mask(s, kind="BatchStat") for s in range(3)], 0),
    ],
)
def test_trained_leaves_statistics_and_leaves_that_turn_bad_are_errors(records, step):
    assert [(a.step, a.rule, a.level) for a in run(records)[0]] == [(step, "nonfinite", Level.ERROR)]


def test_without_fingerprints_the_number_of_bad_elements_tells():
    def plain(step, bad):
        record = with_mask(step, bad)
        return Record(step, 0.0, {k: v for k, v in record.values.items() if k != "params.fingerprint"}, record.leaves)

    assert found([plain(s, (0, 6)) for s in range(4)]) == []
    assert [x[:3] for x in found([plain(s, (0, 6 + (s == 2))) for s in range(4)])] == [(2, "nonfinite", "ERROR")]


def test_what_is_bad_beside_a_bad_loss_is_no_constant_until_the_loss_is_finite():
    records = [with_mask(s, loss=NAN if s < 2 else 1.0) for s in range(4)]
    judge = Judge(default())
    held = []
    for record in records:
        judge.observe(record)
        held.append(judge.history.constants.paths("params"))
    assert held == [frozenset(), frozenset(), {"mask"}, {"mask"}]


@pytest.mark.parametrize("until", [9, 4])
def test_a_best_value_that_is_still_infinite_is_no_finding(until):
    assert found([with_best(s, INF if s < until else 0.5) for s in range(9)]) == []


@pytest.mark.parametrize(
    ("records", "step"),
    [
        ([with_best(s, 1.0 if s < 3 else NAN) for s in range(6)], 3),
        ([with_best(s, INF if s < 3 else NAN) for s in range(6)], 3),
        ([with_best(s, INF if s != 2 else 0.5) for s in range(6)], 3),
        ([with_best(s, INF, path="nu.a") for s in range(6)], 0),
        ([with_best(s, NAN, bad=3, shape=(4,)) for s in range(6)], 0),
    ],
)
def test_an_optimizer_that_turns_bad_or_holds_bad_moments_is_an_error(records, step):
    assert [(a.step, a.rule, a.level) for a in run(records)[0]] == [(step, "nonfinite", Level.ERROR)]


def test_an_announced_restart_may_bring_constants_back():
    judge, alerts = Judge(default()), []
    for step in range(8):
        if step == 4:
            judge.mark(3)
        record = with_best(step, 0.5 if 1 <= step < 4 else INF)
        judge.observe(record)
        alerts += judge.verdicts(record)
    assert alerts == []


def test_the_first_bad_module_is_named_beside_a_mask():
    records = [
        flow(
            s, table=masked(), texts=(f"w{s}", "m"), nonfinite=(0, 6), activations=dict(nonfinite=(0, 0), before=False)
        )
        for s in range(3)
    ]
    last = with_values(records[-1], loss=NAN, **{"activations.nonfinite": np.array([0, 5], np.int32)})
    (alert,), _ = run([*records, Record(3, 0.0, last.values, last.leaves)])
    assert any("lin > relu" in cause.why for cause in alert.causes)
