"""Rules about evaluations and about batches that come again, and the words of all rules about the course of a loss."""

from __future__ import annotations

import numpy as np
import pytest
from builders import numbers, run
from runs import FAR, course, evaluated, guessing, judged, level

from nnx_probes.host.history import Facts
from nnx_probes.host.record import Record
from nnx_probes.host.rules import ChanceLevel, Overfitting, RepeatedBatch, StalledLoss

NAN = float("nan")


def evaluations(scores, trains, every=20):
    """A training loss that takes each of these values for `every` steps, each followed by an evaluation."""
    records = []
    for i, (score, train) in enumerate(zip(scores, trains, strict=True)):
        part = np.broadcast_to(train, (every,))
        records += [numbers(i * every + j, loss=loss) for j, loss in enumerate(part)]
        records.append(evaluated(i * every + every - 1, score))
    return records


TRAINS = (1.5, 1.4, 1.3, 1.2, 1.1, 1.0, 0.9)


def rising(*scores, train=0.8, rule=None, **more):
    """The level for these scores, while the training loss goes down to `train`."""
    trains = (*TRAINS[: len(scores) - 1], train)
    return level(rule or Overfitting(), evaluations(scores, trains), **more)


# --- overfitting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "scores", "expected"),
    [
        (Overfitting(), (1.0, 1.1, 1.2, 1.3), "WARN"),
        (Overfitting(), (1.0, 1.1, 1.2), None),
        (Overfitting(), (2.0, 1.0, 1.1, 1.2), None),
        (Overfitting(), (2.0, 1.0, 1.1, 1.2, 1.3), "WARN"),
        (Overfitting(), (1.0, 1.1, 1.1, 1.3), None),
        (Overfitting(), (1.0, 1.2, 1.1, 1.3), None),
        (Overfitting(), (1.0, 1.3, 1.1, 1.2, 1.25), None),
        (Overfitting(), (1.0, 1.3, 1.1, 1.2, 1.25, 1.3), "WARN"),
        (Overfitting(), (1.3, 1.2, 1.1, 1.0), None),
        (Overfitting(evaluations=1), (1.0, 1.1), "WARN"),
        (Overfitting(evaluations=4), (1.0, 1.1, 1.2, 1.3), None),
        (Overfitting(evaluations=4), (1.0, 1.1, 1.2, 1.3, 1.4), "WARN"),
    ],
)
def test_an_evaluation_that_rises_three_times_running_is_told(rule, scores, expected):
    assert rising(*scores, rule=rule) == expected


@pytest.mark.parametrize(
    ("rule", "last", "expected"),
    [
        (Overfitting(), 1.051, "WARN"),
        (Overfitting(), 1.049, None),
        (Overfitting(over=0.2), 1.201, "WARN"),
        (Overfitting(over=0.2), 1.199, None),
    ],
)
def test_it_lies_a_twentieth_above_its_best(rule, last, expected):
    assert rising(1.0, 1.01, 1.02, last, rule=rule) == expected
    assert rising(1.0, 1.04, 1.03, 1.035, 1.04, last, rule=rule) == expected


@pytest.mark.parametrize(
    ("rule", "over", "expected"),
    [
        (Overfitting(), 1.101, "WARN"),
        (Overfitting(), 1.099, None),
        (Overfitting(gap=0.5), 1.501, "WARN"),
        (Overfitting(gap=0.5), 1.499, None),
    ],
)
def test_it_lies_a_tenth_above_the_training_loss(rule, over, expected):
    assert rising(1.0, 1.1, 1.2, 1.3, train=1.3 / over, rule=rule) == expected


@pytest.mark.parametrize(("to", "expected"), [(0.79, "WARN"), (0.8, None), (0.9, None)])
def test_the_training_loss_is_lower_than_it_was_at_the_best_evaluation(to, expected):
    found = evaluations((2.0, 1.0, 1.1, 1.2, 1.3), (1.5, 0.8, 0.85, 0.85, to))
    assert level(Overfitting(), found) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((1.5,) * 40, (1.5,) * 24 + (0.8,) * 16, "WARN"),
        ((1.5,) * 40, (1.5,) * 32 + (0.8,) * 8, None),
        ((0.1,) * 24 + (1.5,) * 16, (0.8,) * 40, "WARN"),
        ((1.5,) * 24 + (0.1,) * 9 + (1.5,) * 7, (0.8,) * 40, None),
    ],
)
def test_the_training_loss_is_the_median_of_sixteen_probes(before, after, expected):
    found = evaluations((1.0, 1.1, 1.15, 1.2), (before, 1.0, 1.0, after), every=40)
    assert level(Overfitting(), found) == expected


@pytest.mark.parametrize("scores", [(0.0, 1.1, 1.2, 1.3), (-1.0, 1.1, 1.2, 1.3), (1.0, 1.1, 1.2, NAN)])
def test_losses_that_can_be_negative_and_a_bad_evaluation_are_not_judged(scores):
    assert rising(*scores) is None
    assert level(Overfitting(), evaluations((1.0, 1.1, 1.2, 1.3), (1.5, 1.4, -1.3, 0.8))) is None


def test_training_losses_that_are_not_finite_are_passed_over():
    spoiled = [np.where(np.arange(20) % 3, train, NAN) for train in (1.5, 1.4, 1.3, 0.8)]
    assert level(Overfitting(), evaluations((1.0, 1.1, 1.2, 1.3), spoiled)) == "WARN"
    assert level(Overfitting(), evaluations((1.0, 1.1, 1.2, 1.3), (NAN,) * 4)) is None


def test_an_evaluation_that_was_not_finite_is_not_the_best_one():
    found = judged(Overfitting(), evaluations((NAN, 1.0, 1.1, 1.2, 1.3), (1.5, 1.4, 1.3, 1.2, 0.8)))
    assert found is not None and "since step 39 (1 to 1.3)" in found.message


def test_without_a_training_loss_and_before_the_first_one_nothing_is_known():
    scores = (1.0, 1.1, 1.2, 1.3)
    assert level(Overfitting(), [evaluated(20 * i, score) for i, score in enumerate(scores)]) is None
    for began, expected in ((0, "WARN"), (1, None)):
        trained = [Record(r.step + began, 0.0, r.values, r.leaves) for r in evaluations(scores[1:], (1.4, 1.3, 0.8))]
        assert level(Overfitting(), [evaluated(0, 1.0), *trained]) == expected


def test_only_an_evaluation_is_asked_about_and_a_mark_starts_anew():
    records = evaluations((1.0, 1.1, 1.2, 1.3), (*TRAINS[:3], 0.8))
    assert level(Overfitting(), [*records, numbers(80, loss=0.8)]) is None
    assert level(Overfitting(), records, marks=(19,)) is None
    assert level(Overfitting(), evaluations((0.5, 1.0, 1.1, 1.2, 1.3), (*TRAINS[:4], 0.8)), marks=(19,)) == "WARN"


def test_an_adversarial_objective_leaves_it_out():
    assert rising(1.0, 1.1, 1.2, 1.3, facts=Facts(objective="adversarial")) is None


@pytest.mark.parametrize("seed", range(5))
def test_healthy_evaluations_are_quiet(seed):
    """They fall with the training loss, or level off a little above it, with noise."""
    rng, at = np.random.default_rng(seed), np.arange(60)
    for floor in (0.0, 0.3):
        trains = floor + 2 * np.exp(-at / 15)
        scores = (1.05 * trains + 0.05) * rng.lognormal(0, 0.005, 60)
        assert run(evaluations(scores, trains, every=10), rules=(Overfitting(),))[0] == []


# --- repeated_batch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "at"), [(None, 3), (2, 2), (6, 6)])
def test_three_steps_running_on_one_batch_are_told_once(steps, at):
    rule = RepeatedBatch() if steps is None else RepeatedBatch(steps=steps)
    records = [Record(s, 0.0, {"batch.run": s + 1}, {}) for s in range(20)]
    assert [(a.step, a.level.name) for a in run(records, rules=(rule,))[0]] == [(at - 1, "WARN")]


def test_without_a_run_of_batches_and_on_other_batches_nothing_is_said():
    assert run([numbers(s, loss=1.0) for s in range(20)], rules=(RepeatedBatch(),))[0] == []
    assert run([Record(s, 0.0, {"batch.run": 1 + s % 2}, {}) for s in range(20)], rules=(RepeatedBatch(),))[0] == []


@pytest.mark.parametrize("objective", ["minimize", "adversarial"])
def test_a_falling_loss_is_no_excuse_and_neither_is_the_objective(objective):
    records = [Record(s, 0.0, {"batch.run": s + 1, "loss": 0.5**s}, {}) for s in range(5)]
    assert level(RepeatedBatch(), records, Facts(objective=objective)) == "WARN"


# --- in words -----------------------------------------------------------------------------------------------

STALLED = np.append(3.0, np.full(767, 2.0))


@pytest.mark.parametrize(
    ("rule", "records", "raised", "title", "message", "values"),
    [
        (
            ChanceLevel(),
            guessing(np.full(512, 2.3)),
            (),
            "The loss is that of guessing",
            "Over steps 256 to 511 the median loss is 2.3 and does not fall; guessing among 10 classes in the batch's y "
            "scores 2.303.",
            {"loss": 2.3, "chance": np.log(10)},
        ),
        (
            ChanceLevel(),
            guessing(np.full(512, 1.51), entropy=1.5, path="1"),
            (),
            "The loss is that of guessing",
            "Over steps 256 to 511 the median loss is 1.51 and does not fall; knowing how often each class occurs in the "
            "batch's 1 scores 1.5.",
            {"loss": 1.51, "chance": 1.5},
        ),
        (
            ChanceLevel(),
            guessing([12.5], entropy=FAR, path="tokens"),
            (),
            "The first loss is far above guessing",
            "The first loss is 12.5; guessing among the 10 classes seen in the batch's tokens would score 2.303.",
            {"loss": 12.5, "chance": np.log(10)},
        ),
        (
            StalledLoss(),
            course(STALLED),
            (),
            "The loss has stalled",
            "Over steps 256 to 767 the median loss is 2 (first 3) and does not fall.",
            {"loss": 2.0},
        ),
        (
            StalledLoss(),
            course(STALLED),
            ("dead_units", "chance_level"),
            "The loss has stalled",
            "Over steps 256 to 767 the median loss is 2 (first 3) and does not fall; with it: chance_level, dead_units.",
            {"loss": 2.0},
        ),
        (
            Overfitting(),
            evaluations((2.0, 1.0, 1.1, 1.2, 1.3), (1.5, 1.25, 1.2, 1.0, 0.8)),
            (),
            "The model overfits",
            "The evaluation's loss rises since step 39 (1 to 1.3) while the training loss falls (1.25 to 0.8).",
            {"best_step": 39.0, "gap": 1.625},
        ),
        (
            RepeatedBatch(),
            [Record(12, 0.0, {"batch.run": 3}, {})],
            (),
            "Every step sees the same batch",
            "The batch of step 12 is bit-equal to those of the 2 steps before it.",
            {"run": 3.0},
        ),
    ],
)
def test_every_word(rule, records, raised, title, message, values):
    found = judged(rule, records, raised=raised)
    assert (found.title, found.message) == (title, message) and found.values == pytest.approx(values)
    assert (found.step, found.rule, found.paths) == (records[-1].step, rule.slug, ())
