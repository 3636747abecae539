"""Movement from fingerprints, and whether a loss falls."""

from __future__ import annotations

import numpy as np
import pytest
from builders import PARAMS, leaves, numbers

from nnx_probes.host.history import History
from nnx_probes.host.motion import Motion
from nnx_probes.host.trend import converged, falls, stands, undecided


def feed(motion, *states, table=PARAMS, updates=1):
    for step, texts in enumerate(states):
        motion.observe(step, table, tuple(f"xxh3:{t}" for t in texts), updates)
    return motion


def test_updates_since_the_last_change_are_counted_leaf_by_leaf():
    motion = feed(Motion(), "ax", "bx", "bx", "bx")
    assert motion.still.tolist() == [2, 3] and motion.moved.tolist() == [True, False]
    assert motion.since.tolist() == [1, 0]


def test_values_of_different_methods_are_not_compared():
    motion = Motion()
    motion.observe(0, PARAMS, ("xxh3:1", "xxh3:2"), 1)
    motion.observe(1, PARAMS, ("mix64:1", "mix64:9"), 1)
    assert not motion.changed.any() and motion.still.tolist() == [0, 0]


def test_an_unreadable_leaf_is_neither_moving_nor_still():
    motion = Motion()
    motion.observe(0, PARAMS, ("deleted", "xxh3:2"), 1)
    motion.observe(1, PARAMS, ("deleted", "xxh3:2"), 1)
    assert motion.still.tolist() == [0, 1]


def test_a_new_leaf_table_keeps_what_is_known_of_leaves_that_stay():
    motion = feed(Motion(), "ax", "bx", "bx")
    motion.observe(3, leaves(paths=("c", "b")), ("xxh3:n", "xxh3:x"), 1)
    assert motion.still.tolist() == [0, 3] and motion.moved.tolist() == [False, False]


def test_coming_back_to_a_state_that_was_left_is_noticed_and_standing_still_is_not():
    motion = feed(Motion(), "aa", "bb")
    assert motion.returned_to is None
    motion.observe(2, PARAMS, ("xxh3:b", "xxh3:b"), 1)
    assert motion.returned_to is None
    motion.observe(3, PARAMS, ("xxh3:a", "xxh3:a"), 1)
    assert motion.returned_to == 0 and motion.returns == 1


def test_forgotten_states_may_come_back():
    motion = feed(Motion(), "aa", "bb")
    motion.forget()
    motion.observe(2, PARAMS, ("xxh3:a", "xxh3:a"), 1)
    assert motion.returned_to is None


def test_leaves_without_elements_are_not_expected_to_move():
    motion = feed(Motion(), "ab", table=leaves(shapes=((0, 3), (2,))))
    assert motion.trained.tolist() == [False, True]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.0726, 0.0488, 0.0296], True),
        ([1.0, 0.9], False),
        ([1.0, 0.999, 0.998], False),
        ([1.0, 1.2, 0.5], False),
        ([4.57, 4.59, 4.55, 4.58], False),
        (np.linspace(3, 1, 50).tolist(), True),
        ([float("nan")] * 10, False),
        ([-1.0, -2.0, -3.0], True),
        ([1.0] * 20, False),
        ([], False),
    ],
)
def test_a_loss_falls_when_the_drop_is_clear_and_steady(losses, expected):
    assert falls(losses) is expected


def test_noise_without_a_trend_falls_in_at_most_two_percent_of_series():
    rng = np.random.default_rng(0)
    hits = sum(falls((4 + rng.normal(size=30)).tolist()) for _ in range(500))
    assert hits <= 10


def test_a_loss_stands_only_when_bit_equal():
    assert stands([0.5, 0.5, 0.5]) and not stands([0.5, 0.5]) and not stands([0.5, 0.5, np.nextafter(0.5, 1)])


@pytest.mark.parametrize(("last", "down"), [(0.951, False), (0.949, True)])
def test_five_per_cent_are_a_drop_among_a_few_losses(last, down):
    assert falls(np.linspace(1, last, 7).tolist()) is down


@pytest.mark.parametrize(("second", "falling", "open_"), [(0.5, True, False), (0.51, False, True), (0.0, True, False)])
def test_of_two_losses_a_half_is_a_fall_and_less_is_open(second, falling, open_):
    assert falls([1.0, second]) is falling
    assert undecided([1.0, second], [0, 1]) is open_


@pytest.mark.parametrize(
    ("second", "apart", "open_"),
    [(0.99, 1, True), (0.991, 1, False), (0.99, 7, True), (0.99, 8, False), (0.9, 8, True), (0.901, 8, False)],
)
def test_a_small_drop_between_two_losses_is_open_only_where_it_is_no_noise(second, apart, open_):
    assert undecided([1.0, second], [0, apart]) is open_


def test_three_losses_are_never_open_and_those_not_finite_do_not_count():
    assert not undecided([1.0, 0.8, 0.7], [0, 1, 2])
    assert undecided([1.0, np.nan, 0.8], [0, 1, 2])


@pytest.mark.parametrize(
    ("losses", "done"),
    [((1.0, 1.0e-6), True), ((1.0, 1.1e-6), False), ((-1.0, 1e-7), True), ((0.0, 0.0), False), ((1.0,), False)],
)
def test_a_millionth_of_the_first_loss_is_converged(losses, done):
    history = History()
    for step, loss in enumerate(losses):
        history.observe(numbers(step, loss=loss))
    assert converged(history) is done


def test_a_history_keeps_the_last_1024_values_and_the_first():
    history = History()
    for step in range(1100):
        history.observe(numbers(step, loss=float(step + 1)))
    steps, losses = history.series("loss")
    assert (len(steps), steps[0], losses[-1], history.first("loss")) == (1024, 76, 1100.0, 1.0)
