"""A stretch over which the loss does not fall, and what it is found by."""

from __future__ import annotations

import numpy as np
import pytest
from builders import leaves, numbers, params

from nnx_probes.host.history import Facts, History
from nnx_probes.host.motion import Motion
from nnx_probes.host.trend import Plateau, falling, plateau

NAN = float("nan")


def history(losses, by=1, began=0, facts=None, mark=None):
    past = History(facts or Facts())
    for i, loss in enumerate(losses):
        past.observe(numbers(began + i * by, loss=loss))
        if began + i * by == mark:
            past.forget(mark)
    return past


def found(losses, by=1, began=0, total=None, mark=None, steps=50, probes=8, warm_up=0.1):
    past = history(losses, by, began, Facts(total_steps=total), mark)
    return plateau(past, steps=steps, probes=probes, warm_up=warm_up)


# --- falling ------------------------------------------------------------------------------------------------


def descending(n, rises):
    """n losses that fall, but for the first one, which stands after the `rises` next ones."""
    rest = list(range(n - 1, 0, -1))
    return np.array([*rest[:rises], n, *rest[rises:]], float)


@pytest.mark.parametrize(
    ("n", "rises", "falls"),
    [(10, 8, True), (10, 9, False), (5, 0, False), (6, 0, True), (20, 0, True)],
)
def test_a_trend_is_told_at_one_per_cent(n, rises, falls):
    """Of 10 losses 8 of 45 pairs may rise: (45 - 16 - 1) / 11.18 = 2.50; with 9 it is 2.33 and a little less."""
    assert falling(descending(n, rises)) is falls


@pytest.mark.parametrize("losses", [[1.0] * 50, list(range(50)), [1.0, 2.0] * 25])
def test_losses_that_stay_or_rise_do_not_fall(losses):
    assert not falling(np.array(losses, float))


def test_of_many_losses_two_hundred_are_looked_at_from_the_first_to_the_last():
    late = np.append(np.ones(4000), np.linspace(1, 0.5, 1000))
    assert falling(late) and not falling(late[:4000]) and not falling(late[::-1])
    rng = np.random.default_rng(0)
    assert falling(np.linspace(1, 0.9, 100_000) + rng.normal(0, 0.05, 100_000))


def test_noise_is_called_falling_about_once_in_a_hundred():
    rng = np.random.default_rng(0)
    assert 2 <= sum(falling(rng.normal(size=64)) for _ in range(1000)) <= 20


# --- plateau ------------------------------------------------------------------------------------------------


def test_a_plateau_knows_its_losses_and_what_was_before():
    losses = [*np.linspace(5, 2, 300), *np.linspace(1, 1.1, 50)]
    stretch = found(losses, began=1000)
    assert isinstance(stretch, Plateau) and (stretch.began, stretch.ended) == (1300, 1349)
    assert stretch.losses.tolist() == losses[300:] and stretch.before.tolist() == losses[:300]


def test_the_quarters_are_medians_also_of_lengths_that_four_does_not_divide():
    stretch = Plateau(np.array([1.0, 9.0, 2.0, 3.0, 3.0, 7.0, 4.0, 4.0, 5.0, 5.0]), np.zeros(0), 0, 9)
    assert stretch.quarters().tolist() == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("given", "least"),
    [
        (dict(), 306),
        (dict(total=1000), 150),
        (dict(total=1000, warm_up=0.3), 350),
        (dict(total=1), 51),
        (dict(by=10), 34),
        (dict(total=1, probes=70), 71),
        (dict(mark=99), 406),
        (dict(total=1000, mark=99), 250),
    ],
)
@pytest.mark.parametrize("began", [0, 777])
def test_a_run_is_old_enough_after_its_warm_up_and_the_stretch(given, least, began):
    if "mark" in given:
        given = {**given, "mark": given["mark"] + began}
    assert found([1.0] * least, began=began, **given) is not None
    assert found([1.0] * (least - 1), began=began, **given) is None


def test_the_stretch_is_as_long_as_asked_for_in_steps_or_in_losses():
    assert len(found([1.0] * 400).losses) == 50
    assert len(found([1.0] * 400, probes=80).losses) == 80
    assert len(found([1.0] * 400, by=10, probes=3).losses) == 5


def test_before_the_first_loss_there_is_no_plateau():
    assert plateau(History(), steps=50, probes=0, warm_up=0.1) is None
    assert found([NAN] * 400) is None and found([None] * 400) is None


def test_losses_that_are_not_finite_lie_in_no_stretch():
    losses = np.ones(400)
    losses[1::2], losses[0::50] = NAN, np.inf
    stretch = found(losses)
    assert np.isfinite(stretch.losses).all() and np.isfinite(stretch.before).all()
    assert (stretch.began, stretch.ended, len(stretch.losses)) == (352, 398, 24)


def test_a_loss_that_was_not_finite_at_the_start_makes_the_run_no_older():
    assert found([*[NAN] * 10, *[1.0] * 39], total=1) is None and found([*[NAN] * 10, *[1.0] * 50], total=1) is not None


def test_a_loss_that_became_finite_late_has_to_last_as_long():
    """The first 300 steps of a run in float16 were skipped: their losses are not finite."""
    late = [NAN] * 300
    assert found([*late, *[1.0] * 49]) is None and found([*late, *[1.0] * 50]) is not None


@pytest.mark.parametrize(("losses", "falls"), [(np.linspace(1, 0.9, 400), True), (np.linspace(0.9, 1, 400), False)])
def test_where_the_loss_goes_down_there_is_no_plateau(losses, falls):
    assert (found(losses) is None) is falls


# --- what it needs of the history -----------------------------------------------------------------------------


def test_the_history_remembers_where_it_began():
    assert History().began is None
    past = history([None, 1.0, 2.0], began=40)
    assert past.began == 40 and past.records == 3
    past.forget(42)
    assert past.began == 40 and past.marked_at == 42


@pytest.mark.parametrize(
    ("states", "trained", "stands"),
    [
        ((), (True, True), False),
        (("ab",), (True, True), False),
        (("ab", "ab"), (True, True), True),
        (("ab", "ac"), (True, True), False),
        (("ab", "cd"), (True, True), False),
        (("ab", "ab", "xy"), (True, True), False),
        (("ab", "xy", "xy"), (True, True), True),
        (("ab", "ac"), (True, False), True),
        (("ab", "cb"), (True, False), False),
        (("ab", "ab"), (False, False), False),
        (("ab", ("a", "deleted")), (True, True), False),
    ],
)
def test_parameters_stand_when_all_trained_leaves_do(states, trained, stands):
    motion, table = Motion(), leaves(trained=trained)
    for step, texts in enumerate(states):
        motion.observe(step, table, params(step, texts).values["params.fingerprint"], 1)
    assert motion.stands() is stands


def test_micro_steps_are_no_standstill():
    motion = Motion()
    for step in range(3):
        motion.observe(step, leaves(), ("xxh3:a", "xxh3:b"), 0)
    assert not motion.stands()
