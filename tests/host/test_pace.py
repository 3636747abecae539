"""Which interval follows from what a probe costs."""

import itertools

import pytest

from nnx_probes.host.pace import LADDER, Pace


def probed(pace, *costs_s, step_s=1.0):
    for cost_s in costs_s:
        pace.spent(cost_s, step_s)
    return pace.every


def test_the_first_measured_probe_decides_nothing_since_it_may_have_compiled():
    assert probed(Pace.auto(0.01), 1000.0) == 10


@pytest.mark.parametrize(
    ("cost_s", "every"), [(0.0001, 1), (0.01, 1), (0.011, 2), (0.9, 100), (1.0, 100), (1.1, 200), (1e6, 5000)]
)
def test_the_interval_is_the_smallest_of_the_ladder_within_the_budget(cost_s, every):
    assert probed(Pace.auto(0.01), *[cost_s] * 9) == every


def test_one_compilation_among_the_first_probes_does_not_count():
    assert probed(Pace.auto(0.01), 50.0, 0.5) == 50
    assert probed(Pace.auto(0.01), 50.0, 0.5, 0.5, 0.5) == 50


def test_one_disturbed_probe_does_not_move_it():
    pace = Pace.auto(0.01)
    assert probed(pace, 0.5, 0.5, 0.5, 0.5, 0.5) == 50
    assert probed(pace, 60.0) == 50
    assert probed(pace, 0.5, 80.0) == 50


def test_a_cost_near_a_border_does_not_make_it_flap():
    pace = Pace.auto(0.01)
    seen = [probed(pace, cost) for cost in [0.5] * 5 + [0.48, 0.52] * 20]
    assert set(seen[5:]) <= {50, 100} and sum(a != b for a, b in itertools.pairwise(seen[5:])) <= 1


def test_it_goes_down_only_when_a_shorter_one_would_use_half_of_the_budget():
    pace = Pace.auto(0.01)
    assert probed(pace, *[1.0] * 5) == 100
    assert probed(pace, *[0.45] * 5) == 100  # 50 would do, but use 90 %
    assert probed(pace, *[0.24] * 5) == 50


def test_slower_steps_allow_more_probes():
    pace = Pace.auto(0.01)
    assert probed(pace, *[1.0] * 5, step_s=1.0) == 100
    assert probed(pace, *[1.0] * 5, step_s=20.0) == 5


def test_a_fixed_interval_stays():
    assert probed(Pace(7), *[100.0] * 9) == 7
    assert probed(Pace.auto(0.01), *[1.0] * 5, step_s=0.0) == 10


def test_the_first_probe_is_never_timed_then_the_early_ones_and_later_few():
    pace = Pace.auto(0.01)
    timed = []
    for probe in range(40):
        timed += [probe] if pace.timed else []
        pace.advance(probe)
    assert timed == [1, 2, 3, 4, 5, 8, 16, 24, 32]


def test_without_a_budget_none_is_timed_unless_all_are():
    fixed, always = Pace(3), Pace(3, always=True)
    fixed.advance(0), always.advance(0)
    assert (fixed.timed, always.timed) == (False, True)


def test_the_ladder_climbs():
    assert list(LADDER) == sorted(set(LADDER)) and LADDER[0] == 1
