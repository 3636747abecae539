"""Every explanation: what it is made of, and that its sentence is whole when it is really given."""

from __future__ import annotations

import functools

import pytest
from builders import params, run
from runs import all_runs

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.causes import EXPLANATIONS
from nnx_probes.host.causes.evidence import gather
from nnx_probes.host.history import History
from nnx_probes.host.rules import DEFAULTS

SLUGS = {
    "absorbed_by_dtype",
    "ascent",
    "bad_initialization",
    "broadcast_loss",
    "clip_spread_inf",
    "constant_input",
    "converged",
    "dead_relu",
    "detached_module",
    "double_softmax",
    "eps_underflow",
    "eval_mode_left_on",
    "gradient_cut",
    "input_pipeline",
    "iterator_restarted",
    "label_out_of_range",
    "labels_unpaired",
    "learning_rate_too_high",
    "learning_rate_too_low",
    "learning_rate_zero",
    "memorization",
    "nan_accepted_after_skips",
    "nan_gradient_op",
    "never_applied",
    "nonfinite_batch",
    "nonfinite_in_forward",
    "optimizer_recreated",
    "other_copy_trained",
    "overflow_low_precision",
    "rng_not_advancing",
    "saturated_activations",
    "stale_view",
    "state_dropped",
    "state_restored",
    "subset_excluded",
    "token_out_of_vocabulary",
    "train_mode_in_eval",
    "transform_zeroes_updates",
    "update_not_called",
    "weight_decay_only",
    "wrt_selects_nothing",
}
"""Stable names: an alert's reader may act on them."""

RULES = {rule.slug for rule in DEFAULTS}
EACH = pytest.mark.parametrize("entry", EXPLANATIONS, ids=lambda entry: f"{entry.slug}:{entry.rules[0]}")


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


def with_(facts, name, holds=True):
    """The same facts, and that this piece of evidence holds or does not."""
    return {**facts, name.removeprefix("!"): holds is not name.startswith("!")}


@EACH
def test_scores_follow_the_evidence_and_stay_between_nothing_and_one(entry):
    facts = {"absorbed_share": 0.5}
    for name in entry.needs:
        facts = with_(facts, name)
    for name in (*entry.plus, *entry.minus):
        facts = with_(facts, name, False)
    plain = entry.cause(entry.rules[0], facts).score
    assert plain == pytest.approx(min(entry.base, 1))
    for name in entry.plus:
        assert plain < entry.cause(entry.rules[0], with_(facts, name)).score <= 1
    for name, weight in entry.minus.items():
        less = entry.cause(entry.rules[0], with_(facts, name))
        assert (less is None) is (weight >= entry.base) and (less is None or 0 < less.score < plain)


# --- in words -----------------------------------------------------------------------------------------------


@functools.cache
def given():
    """(rule, slug, title) -> every sentence that was given for it in some run."""
    found = {}
    for records, facts in all_runs():
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
            assert why[0].isupper() or why[0].isdigit() or why.startswith("a ")
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
        ("frozen_params", "transform_zeroes_updates", "the curvature in the optimizer's memory is far too large"),
        ("frozen_params", "gradient_cut", "its moments are exactly 0"),
        ("frozen_params", "absorbed_by_dtype", "100% of the elements keep their value (float32)"),
        ("frozen_params", "other_copy_trained", "it is known to hold another model object"),
        ("frozen_params", "detached_module", "a new object stands where the first one stood"),
        ("nonfinite", "nonfinite_batch", "3 element(s) in batch leaf x is not finite"),
        ("nonfinite", "nonfinite_batch", "steps 1 to 100"),
        ("nonfinite", "label_out_of_range", "integers up to 50257"),
        (
            "nonfinite",
            "token_out_of_vocabulary",
            "up to 50257; the largest embedding, tokens.embedding, has 50257 rows.",
        ),
        ("nonfinite", "nan_gradient_op", "finite (0.5) and its gradients are not"),
        ("nonfinite", "nan_gradient_op", "finite (0.5) and the parameters after it are not"),
        ("nonfinite", "nonfinite_in_forward", "the first module whose output is not finite is lin > relu"),
        ("nonfinite", "learning_rate_too_high", "the loss grew from"),
        (
            "nonfinite",
            "overflow_low_precision",
            "1 leaves are in a type whose largest value is small (float16: 65504).",
        ),
        ("nonfinite", "overflow_low_precision", "is small (float8_e4m3fn: 448)."),
        ("nonfinite", "eps_underflow", "is 0 in float8_e4m3fn."),
        ("skipped_updates", "overflow_low_precision", "(float16: 65504)"),
        ("nonfinite", "nan_accepted_after_skips", "skipped 3 non-finite updates"),
        ("nonfinite", "clip_spread_inf", "1 of 2 gradients are not finite; the update of every other parameter is 0"),
        ("nonfinite", "clip_spread_inf", "every other parameter is not finite either"),
        ("absorbed_updates", "absorbed_by_dtype", "75% of the elements kept their value"),
        ("diverging", "learning_rate_too_high", "the loss grew from 1 to 50"),
        ("frozen_params", "never_applied", "12 batches have been accumulated"),
        ("zero_gradients", "bad_initialization", "2 matrices hold nothing but zeros, first a."),
        ("spike", "input_pipeline", "The batch's x is 100 times as large as usual."),
        ("diverging", "input_pipeline", "The batch's x is 50 times as large as usual."),
        ("nonfinite", "input_pipeline", "The batch's x is 100 times as large as usual."),
        ("chance_level", "constant_input", "The batch's x hardly differs from example to example."),
        ("stalled_loss", "learning_rate_too_low", "No update was ever above 1e-5"),
        ("chance_level", "learning_rate_too_high", "The updates are 0.2 of their matrices"),
        ("stalled_loss", "double_softmax", "a second softmax keeps the loss above 1.46."),
        ("repeated_batch", "iterator_restarted", "3 steps running were trained on the very same batch."),
        ("stale_state", "eval_mode_left_on", "1 of 2 Dropout and BatchNorm layers are set to evaluation, first norm."),
        ("stale_state", "train_mode_in_eval", "BatchStat changed between the step and monitor.on_eval"),
        ("diverging", "ascent", "the updates of 1 of 1 matrices go along their gradient, first lin.kernel"),
    ],
)
def test_what_was_seen_is_in_the_sentence(rule, slug, words):
    said = [why for (r, s, _), found in given().items() if (r, s) == (rule, slug) for why in found]
    assert any(words in why for why in said), said
