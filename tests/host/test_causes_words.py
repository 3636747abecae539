"""Every explanation: what it is made of, and that its sentence is whole when it is really given."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from builders import flow, leaves, params, run

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.causes import EXPLANATIONS
from nnx_probes.host.causes.evidence import gather
from nnx_probes.host.history import Facts, History
from nnx_probes.host.record import Record
from nnx_probes.host.rules import DEFAULTS

SLUGS = {
    "absorbed_by_dtype",
    "ascent",
    "bad_initialization",
    "clip_spread_inf",
    "converged",
    "dead_relu",
    "detached_module",
    "eps_underflow",
    "gradient_cut",
    "label_out_of_range",
    "learning_rate_too_high",
    "learning_rate_too_low",
    "learning_rate_zero",
    "nan_accepted_after_skips",
    "nan_gradient_op",
    "nonfinite_batch",
    "nonfinite_in_forward",
    "optimizer_recreated",
    "other_copy_trained",
    "overflow_low_precision",
    "saturated_activations",
    "stale_view",
    "state_dropped",
    "state_restored",
    "subset_excluded",
    "transform_zeroes_updates",
    "update_not_called",
    "weight_decay_only",
    "wrt_selects_nothing",
}
"""Stable names: an alert's reader may act on them."""

RULES = {rule.slug for rule in DEFAULTS}
EACH = pytest.mark.parametrize("entry", EXPLANATIONS, ids=lambda entry: f"{entry.slug}:{entry.rules[0]}")
NAN = float("nan")


def names(entry):
    return {name.removeprefix("!") for name in (*entry.needs, *entry.plus, *entry.minus)}


# --- as data ------------------------------------------------------------------------------------------------


def test_the_slugs_are_the_known_ones():
    assert {entry.slug for entry in EXPLANATIONS} == SLUGS


@EACH
def test_an_explanation_says_what_to_change_and_what_would_change_the_verdict(entry):
    assert entry.title and entry.why and entry.fix and entry.check
    assert all(
        text == text.strip() and text[-1] not in ",:" for text in (entry.title, entry.why, entry.fix, entry.check)
    )
    assert not entry.title.endswith(".")


@EACH
def test_an_explanation_is_of_known_rules_and_its_score_stays_within_one(entry):
    assert entry.rules and set(entry.rules) <= RULES and len(set(entry.rules)) == len(entry.rules)
    assert 0 < entry.base <= 1 and all(0 < w <= 1 for w in (*entry.plus.values(), *entry.minus.values()))


@functools.cache
def evidence():
    """What is gathered for a simple record."""
    history, record = History(), params(0, "ab", loss=1.0, opt=dict(step=1))
    history.observe(record)
    return gather(Alert(0, "frozen_params", Level.WARN, "still", paths=("a",)), record, history)


@EACH
def test_an_explanation_refers_to_evidence_that_is_gathered_always(entry):
    assert names(entry) <= set(evidence())


@EACH
def test_an_explanation_does_not_speak_for_and_against_itself_with_one_fact(entry):
    assert not set(entry.plus) & set(entry.minus) and not (set(entry.plus) | set(entry.minus)) & set(entry.needs)


@EACH
def test_an_explanation_excluded_by_one_need_is_not_given(entry):
    facts = {n.removeprefix("!"): not n.startswith("!") for n in entry.needs}
    assert entry.cause("no_such_rule", facts) is None
    for rule in entry.rules:
        assert entry.cause(rule, {**facts, "absorbed_share": 0.5}) is not None
        for name in facts:
            assert entry.cause(rule, {**facts, name: not facts[name], "absorbed_share": 0.5}) is None


@EACH
def test_scores_follow_the_evidence_and_stay_between_nothing_and_one(entry):
    facts = {n.removeprefix("!"): not n.startswith("!") for n in entry.needs} | {"absorbed_share": 0.5}
    plain = entry.cause(entry.rules[0], facts).score
    assert plain == pytest.approx(min(entry.base, 1))
    for name in entry.plus:
        assert plain < entry.cause(entry.rules[0], {**facts, name: True}).score <= 1
    for name, weight in entry.minus.items():
        less = entry.cause(entry.rules[0], {**facts, name: True})
        assert (less is None) is (weight >= entry.base) and (less is None or 0 < less.score < plain)


# --- in words -----------------------------------------------------------------------------------------------


def still(n=24, opt=None, facts=None, loss=lambda s: 1.0, texts=lambda s: "ab", **more):
    """Runs in which parameters stand still, or move as `texts` says."""
    given = {} if opt is None else {"opt": opt}
    return [
        params(s, texts(s), loss=loss(s), **{k: v(s) for k, v in given.items()}, **more) for s in range(n)
    ], facts or Facts()


def trial(update, absorbed=(0.0, 0.0), later=1.0, earlier=1.0):
    return {
        "params.trial_update": np.array(update, np.float32),
        "params.trial_absorbed": np.array(absorbed, np.float32),
        "trial.later": later,
        "trial.earlier": earlier,
    }


def counting(s):
    return dict(step=s)


def moving(s):
    return dict(step=s, moments=f"m{s}")


def one_moves(s):
    return (f"a{s}", "b")


def both_move(s):
    return (f"a{s}", f"b{s}")


def standstills():
    """What `frozen_params`, `lost_update` and `optimizer_reset` are explained by."""
    yield still(opt=lambda s: dict(step=0))
    yield still(opt=lambda s: dict(step=0), facts=Facts(watched=True), **{"watch.traced": 1})
    yield still(loss=lambda s: 1 / (s + 1))
    yield still(n=2, texts=lambda s: ("deleted", "deleted"))
    yield still(n=1, opt=lambda s: dict(step=1), **{"optimizer.selects_nothing": True, "optimizer.wrt": "LoRAParam"})
    no_rate = trial((0, 0), later=0, earlier=0)
    yield still(opt=lambda s: dict(step=s, learning_rate=0.0), facts=Facts(total_steps=20), **no_rate)
    yield still(opt=moving, **trial((0, 0), later=0, earlier=1))
    yield still(opt=counting, **no_rate)
    yield still(opt=lambda s: dict(step=s, zero=True))
    yield still(opt=counting, **trial((0.1, 0.1)))
    yield still(opt=moving, **trial((1e-7, 1e-7), (1.0, 1.0), later=1e-7, earlier=1e-7))
    yield still(opt=moving, facts=Facts(other_model=True))
    yield still(opt=counting, texts=lambda s: "ab" if s % 2 else "xy")
    yield still(opt=lambda s: dict(step=(5, 6, 1)[min(s, 2)]), texts=both_move)
    yield still(opt=lambda s: dict(step=0), texts=both_move)
    yield still(opt=moving, texts=one_moves, **trial((0.1, 0.0)))
    yield still(opt=moving, texts=one_moves, **{"params.replaced": ("b",)})
    yield still(opt=lambda s: dict(step=s, zero=True), texts=one_moves)
    yield [flow(s, updates=0.0, texts="ab") for s in range(4)], Facts()
    same, other = ("xxh3:a", "xxh3:b"), ("xxh3:c", "xxh3:d")
    yield (
        [flow(s, texts="ab", **{"updates.entry": same, "updates.leaving": other if s else same}) for s in range(2)],
        Facts(),
    )


def halves(dtype="float16"):
    return leaves(dtypes=(dtype, "float32"))


def bad(step=0, nonfinite=(0, 4), table=None, grads=1.0, batch=None, **more):
    """A record with bad parameters and what else is given; `batch` counts the bad elements of a batch of integers."""
    record = flow(step, nonfinite=nonfinite, grads=grads, **({} if table is None else {"table": table}), **more)
    if batch is None:
        return record
    extra = {"batch.nonfinite": np.array([batch], np.int32), "batch.max_int": 50257.0}
    return Record(step, 0.0, {**record.values, **extra}, {**record.leaves, "batch": leaves("batch", ("x",))})


def breakdowns():
    """What `nonfinite` and `skipped_updates` are explained by."""
    seen = {"params.largest": 1.0}
    yield [bad(loss=NAN, batch=3)], Facts()
    yield [bad(100 * s, (0, 4 * s), loss=NAN if s else 1.0, steps=100, batch=0, **seen) for s in range(2)], Facts()
    yield [bad(nonfinite=(0, 0), loss=NAN, batch=0)], Facts()
    yield [bad(loss=0.5)], Facts()
    yield [bad(nonfinite=(0, 0), grads_bad=(0, 1), loss=0.5)], Facts()
    yield [bad(loss=NAN)], Facts()
    yield [bad(loss=NAN, activations=dict(nonfinite=(0, 7)))], Facts()
    yield [bad(loss=0.5, activations=dict(nonfinite=(0, 7)))], Facts()
    yield [bad(s, (0, 4 * (s == 3)), loss=v) for s, v in enumerate((1.0, 9.0, 80.0, NAN))], Facts()
    yield [flow(0, cosine=0.9), bad(1, loss=NAN)], Facts()
    yield [bad(table=halves(), loss=NAN)], Facts()
    yield [bad(table=halves("float8_e4m3fn"), loss=0.5)], Facts()
    yield [bad(loss=0.5, opt=dict(step=3, notfinite_count=3, total_notfinite=3))], Facts()
    for spread in (0.0, NAN):
        yield [bad(loss=0.5, grads_bad=(0, 1), updates=(spread, NAN), **{"grads.clip_norm": 1.0})], Facts()
    for loss in (NAN, 0.5):
        opts = [dict(step=s, notfinite_count=s, total_notfinite=s) for s in range(12)]
        yield [flow(s, table=halves(), opt=opt, loss=loss) for s, opt in enumerate(opts)], Facts()


LAYER = leaves(paths=("lin.kernel", "lin.bias"), shapes=((4, 4), (4,)))


def gradients():
    """What the rules about gradients, updates and activations are explained by."""
    narrow = leaves(dtypes=("bfloat16",) * 2)
    jump = [1.0] * 70 + [50.0] * 20
    for more in (
        dict(grads=(0.0, 1.0)),
        dict(grads=(1.0, 0.0), activations=dict(dead=0.95)),
        dict(grads=0.0),
        dict(grads=0.0, texts="ab"),
        dict(activations=dict(dead=1.0)),
        dict(grads=1e-6, slices=dict(grads=(1.0, 1e-9), ratio=1e-9)),
        dict(grads=(1e-9, 1.0), table=leaves(), ratio=1e-9),
        dict(absorbed=0.75, table=narrow),
        dict(ratio=1.0),
        dict(ratio=1e-9),
        dict(grads=0.0, absorbed=1.0, loss=0.0),
    ):
        yield [flow(s, **{"table": LAYER, "loss": 1.0, **more}) for s in range(40)], Facts()
    yield (
        [flow(s, table=LAYER, grads=0.0, absorbed=1.0, texts="ab", loss=0.0 if s else 1.0) for s in range(40)],
        Facts(),
    )
    for more in ({}, dict(cosine=0.9)):
        yield [flow(s, table=LAYER, loss=v, grads=v, **more) for s, v in enumerate(jump)], Facts()
    yield [flow(s, table=LAYER, loss=1.0, grads=v) for s, v in enumerate(jump)], Facts()
    yield [flow(s, table=LAYER, loss=v) for s, v in enumerate([2.0] * 100 + [7.0] * 30)], Facts()


@functools.cache
def given():
    """(rule, slug, title) -> every sentence that was given for it in the runs above."""
    found = {}
    for records, facts in (*standstills(), *breakdowns(), *gradients()):
        for alert in run(records, facts)[0]:
            for cause in alert.causes:
                found.setdefault((alert.rule, cause.slug, cause.title), set()).add(cause.why)
    return found


def sentences(entry, rule):
    """The given sentences that may come from this explanation: it shares rule, slug and title, and begins alike."""
    begins, _, _ = entry.why.partition("{")
    return {why for why in given().get((rule, entry.slug, entry.title), ()) if why.startswith(begins)}


@EACH
def test_each_explanation_is_given_for_each_of_its_rules_in_some_run(entry):
    assert all(sentences(entry, rule) for rule in entry.rules)


@EACH
def test_no_given_sentence_has_a_gap(entry):
    for rule in entry.rules:
        for why in sentences(entry, rule):
            assert not set("?{}") & set(why) and "nan" not in why.replace("NaN", "").split()
            assert why[0].isupper() or why[0].isdigit() or why.startswith(("a ", "float16"))
            assert why.endswith(".") and "  " not in why


@pytest.mark.parametrize(
    ("rule", "slug", "words"),
    [
        ("frozen_params", "state_dropped", "optimizer.step (0)"),
        ("lost_update", "state_dropped", "although Optimizer.update was traced into the step"),
        ("frozen_params", "wrt_selects_nothing", "wrt=LoRAParam"),
        ("lost_update", "stale_view", "their arrays were donated away"),
        ("frozen_params", "stale_view", "the loss falls (1 to "),
        ("frozen_params", "learning_rate_zero", "The injected learning_rate is 0."),
        ("frozen_params", "learning_rate_zero", "the schedule ran out"),
        ("frozen_params", "learning_rate_zero", "at every schedule count tried"),
        ("frozen_params", "transform_zeroes_updates", "norm 2.8"),
        ("frozen_params", "gradient_cut", "its moments are exactly 0"),
        ("frozen_params", "absorbed_by_dtype", "100% of the elements keep their value (float32)"),
        ("frozen_params", "other_copy_trained", "it is known to hold another model object"),
        ("frozen_params", "detached_module", "a new object stands where the first one stood"),
        ("nonfinite", "nonfinite_batch", "3 element(s) in batch leaf x is not finite"),
        ("nonfinite", "nonfinite_batch", "steps 1 to 100"),
        ("nonfinite", "label_out_of_range", "integers up to 50257"),
        ("nonfinite", "nan_gradient_op", "finite (0.5) and its gradients are not"),
        ("nonfinite", "nan_gradient_op", "finite (0.5) and the parameters after it are not"),
        ("nonfinite", "nonfinite_in_forward", "the first module whose output is not finite is lin > relu"),
        ("nonfinite", "learning_rate_too_high", "the loss grew from"),
        ("nonfinite", "overflow_low_precision", "1 leaves"),
        ("nonfinite", "nan_accepted_after_skips", "skipped 3 non-finite updates"),
        ("nonfinite", "clip_spread_inf", "1 of 2 gradients are not finite; the update of every other parameter is 0"),
        ("nonfinite", "clip_spread_inf", "every other parameter is not finite either"),
        ("absorbed_updates", "absorbed_by_dtype", "75% of the elements kept their value"),
        ("diverging", "learning_rate_too_high", "the loss grew from 1 to 50"),
        ("diverging", "ascent", "the updates of 1 of 1 matrices go along their gradient, first lin.kernel"),
    ],
)
def test_what_was_seen_is_in_the_sentence(rule, slug, words):
    said = [why for (r, s, _), found in given().items() if (r, s) == (rule, slug) for why in found]
    assert any(words in why for why in said), said
