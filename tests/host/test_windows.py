"""For how many updates something has been true of a leaf."""

from __future__ import annotations

import numpy as np
import pytest
from builders import leaves

from nnx_probes.host.record import Record
from nnx_probes.host.windows import GROUPS, Windows

NAME = "grads.max_abs"


def record(*values, name=NAME, table=None, **extra):
    group = name.partition(".")[0]
    table = leaves(group, [f"leaf{i}" for i in range(len(values))]) if table is None else table
    return Record(0, 0.0, {name: np.array(values, np.float32), **extra}, {group: table})


def observed(*probes, updates=1, **kwargs):
    """Windows of one-leaf (or several-leaf) probes: values, or (updates, values...) where `updates` is None."""
    windows = Windows()
    for probe in probes:
        probe = (probe,) if np.isscalar(probe) else probe
        own, values = (probe[0], probe[1:]) if updates is None else (updates, probe)
        windows.observe(record(*values, **kwargs), own)
    return windows


def zero(x):
    return x == 0


# --- streak -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "probes", "expected"),
    [(1, 1, 1), (1, 5, 5), (100, 1, 1), (100, 2, 101), (100, 3, 201), (7, 128, 127 * 7 + 1)],
)
def test_the_first_probe_of_a_streak_counts_one_update_and_each_further_one_all_since_the_one_before(
    updates, probes, expected
):
    assert observed(*[0.0] * probes, updates=updates).streak(NAME, zero).tolist() == [expected]


def test_updates_before_the_first_probe_that_holds_belong_to_nobody():
    assert observed((50, 1.0), (50, 0.0), (30, 0.0), updates=None).streak(NAME, zero).tolist() == [31]


@pytest.mark.parametrize(("values", "expected"), [((0, 0, 1), 0), ((0, 1, 0), 1), ((1, 0, 0), 2), ((0, 0, 1, 0, 0), 2)])
def test_an_interruption_starts_the_count_anew(values, expected):
    assert observed(*map(float, values)).streak(NAME, zero).tolist() == [expected]


def test_leaves_are_counted_apart():
    assert observed((0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)).streak(NAME, zero).tolist() == [3, 2, 1]


def test_a_nan_interrupts():
    assert observed(0.0, float("nan"), 0.0, 0.0).streak(NAME, zero).tolist() == [2]


@pytest.mark.parametrize(("effective", "expected"), [(True, 3), (False, 1)])
def test_micro_steps_in_between_break_a_streak_unless_they_are_left_out(effective, expected):
    probes = [(1, 0.0), (0, 9.0), (0, 9.0), (1, 0.0), (0, 9.0), (1, 0.0)]
    assert observed(*probes, updates=None).streak(NAME, zero, effective=effective).tolist() == [expected]


@pytest.mark.parametrize("effective", [True, False])
def test_micro_steps_that_hold_count_for_nothing(effective):
    probes = [(1, 0.0), (0, 0.0), (0, 0.0), (4, 0.0), (0, 0.0)]
    assert observed(*probes, updates=None).streak(NAME, zero, effective=effective).tolist() == [5]


def test_only_micro_steps_are_no_update_at_all():
    assert observed(*[(0, 0.0)] * 9, updates=None).streak(NAME, zero).tolist() == [0]


def test_a_name_never_seen_has_no_rows():
    windows = observed(0.0)
    assert len(windows.streak("updates.absorbed", zero)) == 0 and windows.last("updates.absorbed") is None
    assert len(windows.ever("updates.absorbed")) == 0 and windows.updates("updates.absorbed") == 0


def test_the_last_hundred_and_twenty_eight_probes_are_kept():
    windows = observed(*[0.0] * 300)
    assert windows.updates(NAME) == 128 and windows.streak(NAME, zero).tolist() == [128]


# --- what is kept and what is dropped -----------------------------------------------------------------------


def test_other_leaves_start_anew_and_the_same_leaves_in_a_new_table_go_on():
    windows = observed((0.0, 0.0), (0.0, 0.0))
    windows.observe(record(0.0, 0.0), 1)
    assert windows.streak(NAME, zero).tolist() == [3, 3]
    windows.observe(record(0.0, 0.0, table=leaves("grads", ("leaf0", "other"))), 1)
    assert windows.streak(NAME, zero).tolist() == [1, 1]
    windows.observe(record(0.0), 1)
    assert windows.streak(NAME, zero).tolist() == [1] and windows.ever(NAME).tolist() == [0.0]


def test_other_leaves_of_one_group_leave_the_other_groups_alone():
    windows = observed(0.0, 0.0)
    for paths in (("x",), ("y",)):
        windows.observe(record(0.0, name="updates.absorbed", table=leaves("updates", paths)), 1)
    assert windows.streak(NAME, zero).tolist() == [2] and windows.streak("updates.absorbed", zero).tolist() == [1]


def test_forgetting_ends_every_streak():
    windows = observed(0.0, 0.0)
    windows.forget()
    assert len(windows.streak(NAME, zero)) == 0 and windows.last(NAME) is None
    windows.observe(record(0.0), 5)
    assert windows.streak(NAME, zero).tolist() == [1]


def test_the_largest_magnitude_ever_is_kept_beyond_the_window_and_ignores_nan():
    windows = observed((-5.0, float("nan")), (1.0, 0.0), *[(0.0, 0.5)] * 200, (float("nan"), 0.25))
    assert windows.ever(NAME).tolist() == [5.0, 0.5]


def test_the_last_value_is_the_newest():
    assert observed((1.0, 2.0), (3.0, 4.0)).last(NAME).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("group", GROUPS)
def test_every_measured_group_is_remembered(group):
    windows = observed(0.0, name=f"{group}.some")
    assert windows.leaves[group].paths == ("leaf0",) and windows.last(f"{group}.some").tolist() == [0.0]


@pytest.mark.parametrize(
    "other", [record(0.0, name="params.norm"), Record(0, 0.0, {NAME: np.zeros(1)}), record(0.0, name="optimizer.norm")]
)
def test_other_groups_and_values_without_a_table_are_passed_over(other):
    windows = Windows()
    windows.observe(other, 1)
    assert all(windows.last(name) is None for name in other.values)


def test_single_numbers_of_a_group_are_no_rows():
    windows = Windows()
    windows.observe(record(0.0, **{"grads.clip_norm": 1.0, "grads.table": np.zeros((2, 2))}), 1)
    assert windows.last("grads.clip_norm") is None and windows.last("grads.table") is None


def test_a_user_s_array_of_another_length_or_of_texts_is_no_row_for_each_leaf():
    windows = Windows()
    for length in (2, 3, 1, 2):
        windows.observe(record(0.0, 0.0, **{"grads.mine": np.ones(length), "grads.words": np.array(["a", "b"])}), 1)
    assert windows.values("grads.mine").shape == (2, 2) and windows.values("grads.words").shape == (0, 0)
    assert windows.streak(NAME, zero).tolist() == [4, 4]
