"""The effective-update clock."""

from __future__ import annotations

import numpy as np
import pytest
from builders import leaves, params

from nnx_probes.host.clock import Clock, counters


def advance(clock, at, /, steps=1, **scalars):
    return clock.advance(params(at, "xy", steps=steps, opt=scalars))


def test_counters_are_recognised_by_the_last_part_of_their_path():
    table = leaves("optimizer", ("step", "opt_state.mini_step", "opt_state.inner.0.count", "opt_state.inner.1.count"))
    assert counters(table, np.array([9.0, 1.0, 2.0, 5.0])) == {"step": 9, "mini_step": 1, "count": 5}


def test_leaves_that_are_no_scalars_are_no_counters():
    table = leaves("optimizer", ("step", "mu.count"))
    assert counters(table, np.array([1.0, np.nan])) == {"step": 1}


def test_one_update_a_step():
    clock = Clock()
    assert [advance(clock, s, step=s + 1) for s in range(4)] == [0, 1, 1, 1]


def test_updates_between_probes_are_counted_not_probes():
    clock = Clock()
    assert [advance(clock, s, steps=10, step=s) for s in (0, 10, 30)] == [0, 10, 20]


def test_multisteps_counts_outer_updates_only():
    clock = Clock()
    got = [advance(clock, s, step=s, mini_step=s % 4, gradient_step=s // 4) for s in range(9)]
    assert got == [0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_steps_skipped_by_apply_if_finite_do_not_count():
    clock = Clock()
    assert advance(clock, 0, step=1, total_notfinite=0) == 0
    assert advance(clock, 1, step=2, total_notfinite=1) == 0
    assert advance(clock, 2, step=3, total_notfinite=1) == 1


def test_counters_that_never_moved_leave_the_steps_of_the_loop_as_the_clock_after_a_first_turn_of_three():
    clock = Clock()
    assert [advance(clock, s, step=0) for s in range(6)] == [0, 0, 0, 3, 1, 1]
    assert clock.counters_moved is False and not clock.ever_stepped


def test_a_loop_that_updates_every_fourth_step_gets_time_in_between():
    clock = Clock()
    got = [advance(clock, s, step=s // 4) for s in range(4, 44)]
    assert sum(got[4:]) == 9 and max(got[4:]) == 1


def test_a_loop_that_stops_updating_is_counted_again_after_four_times_its_gap():
    clock = Clock()
    for s in range(10):
        advance(clock, s, step=s)
    got = [advance(clock, 10 + s, step=9) for s in range(12)]
    assert got == [0] * 8 + [1] * 4


@pytest.mark.parametrize(
    ("total", "step", "expected"), [(None, 5, 0), (None, 500, 1), (1000, 50, 0), (1000, 500, 1), (1000, 960, 0)]
)
def test_a_known_rate_of_zero_counts_only_outside_the_start_and_the_end_of_a_schedule(total, step, expected):
    clock = Clock(total_steps=total)
    advance(clock, step - 1, step=1, learning_rate=0.0)
    assert advance(clock, step, step=2, learning_rate=0.0) == expected


def test_without_an_optimizer_every_step_of_the_loop_counts():
    clock = Clock()
    assert clock.advance(params(0, "xy", steps=1)) == 1
    assert clock.advance(params(7, "xy", steps=7)) == 7


def test_a_record_without_the_optimizer_waits_for_the_next_that_has_it():
    clock = Clock()
    advance(clock, 0, step=1)
    assert clock.advance(params(1, "xy")) == 0
    assert advance(clock, 2, step=3) == 2


def test_an_optimizer_that_stepped_before_the_first_record_gets_time_too():
    clock = Clock()  # a generator that is updated at every fifth step, the first time at step 0
    got = [advance(clock, s, step=1 + s // 5) for s in range(20)]
    assert sum(got) == 3 and not Clock().began_stepped
