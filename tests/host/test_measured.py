"""What is taken from measured values when a cause is looked for: one fact a test, at both sides of its border."""

from __future__ import annotations

import numpy as np
import pytest
from builders import flow, leaves

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.causes.course import course
from nnx_probes.host.causes.evidence import gather
from nnx_probes.host.causes.measured import measured
from nnx_probes.host.history import History
from nnx_probes.host.record import Record


def facts(record, *paths, before=(), values=None):
    """The facts about an alert of `record` that names `paths`."""
    history = History()
    for each in (*before, record):
        history.observe(each)
    alert = Alert(record.step, "zero_gradients", Level.WARN, "title", "message", paths=paths, values=values or {})
    return measured(alert, record, history)


KERNELS = leaves(paths=("a.kernel", "a.bias", "b.kernel", "b.bias"), shapes=((4, 4), (4,), (4, 4), (4,)))


# --- gradients and updates of the alert's own leaves ----------------------------------------------------------


@pytest.mark.parametrize(
    ("grads", "zero", "nonzero"),
    [((0, 1), True, False), ((1, 0), False, True), ((0, 0), True, False), ((1, 1), False, True)],
)
def test_gradients_are_those_of_the_leaves_named(grads, zero, nonzero):
    found = facts(flow(0, grads=grads), "a")
    assert (found["grads_zero_here"], found["grads_nonzero_here"]) == (zero, nonzero)


@pytest.mark.parametrize(("updates", "zero", "nonzero"), [((0, 1), True, False), ((1, 0), False, True)])
def test_updates_are_those_of_the_leaves_named(updates, zero, nonzero):
    found = facts(flow(0, updates=updates), "a")
    assert (found["updates_zero_here"], found["updates_nonzero_here"]) == (zero, nonzero)


def test_an_alert_that_names_no_leaf_is_about_all():
    found = facts(flow(0, grads=(0, 1), updates=(0, 1)))
    assert not found["grads_zero_here"] and not found["grads_nonzero_here"]
    assert not found["updates_zero_here"] and not found["updates_nonzero_here"]


def test_where_nothing_was_measured_nothing_is_claimed():
    found = facts(flow(0, grads=None, updates=None), "a")
    assert not any(v for name, v in found.items() if isinstance(v, bool))
    assert found["grad_norm_here"] == "?"


def test_a_layer_of_a_stack_counts_by_its_own_name():
    found = facts(flow(0, slices=dict(grads=(0.0, 1.0, 1.0))), "stack.kernel[0]")
    assert found["grads_zero_here"] and not facts(flow(0, slices=dict(grads=(0.0, 1.0, 1.0))))["grads_zero_here"]


def test_the_norm_here_is_that_of_the_named_leaves_together():
    record = flow(0, grads=(3.0, 4.0), table=leaves(shapes=((), ())))
    assert facts(record, "a", "b")["grad_norm_here"] == "5" and facts(record, "b")["grad_norm_here"] == "4"


@pytest.mark.parametrize(("share", "holds"), [(0.49, False), (0.5, True), (1.0, True)])
def test_half_of_the_elements_make_an_update_absorbed(share, holds):
    found = facts(flow(0, absorbed=(share, 0.0)), "a")
    assert found["absorbed_here"] is holds and found["absorbed_share"] == pytest.approx(share)


def test_an_unknown_share_is_none():
    assert facts(flow(0, absorbed=(np.nan, 1.0)), "a", "b")["absorbed_share"] == 0.0


# --- everything that is measured ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grads", "texts", "holds"), [(0.0, "ab", True), ((0.0, 1.0), "ab", False), (0.0, ["s0", "s0"], False)]
)
def test_decay_alone_moves_parameters_without_any_gradient(grads, texts, holds):
    record = flow(1, grads=grads, texts=list(texts))
    assert facts(record, before=[flow(0, grads=grads)])["decay_only"] is holds


@pytest.mark.parametrize(("share", "holds"), [(0.89, False), (0.9, True)])
@pytest.mark.parametrize("kind", ["dead", "saturated"])
def test_nine_tenths_of_the_units_make_a_dead_or_saturated_place(kind, share, holds):
    found = facts(flow(0, activations={kind: (0.0, share)}))
    assert found[f"{kind}_measured"] is holds
    assert not found["saturated_measured" if kind == "dead" else "dead_measured"]


@pytest.mark.parametrize(("nonfinite", "first"), [((0, 2), "lin > relu"), ((1, 2), "lin")])
def test_the_first_module_that_is_not_finite_is_named(nonfinite, first):
    found = facts(flow(0, activations=dict(nonfinite=nonfinite)))
    assert found["activations_bad"]
    assert found["module_words"].endswith(f"not finite is {first}.")


@pytest.mark.parametrize(("before", "bad", "holds"), [(True, 1, True), (False, 1, False), (False, 0, True)])
def test_outputs_of_parameters_that_were_nan_already_name_no_module(before, bad, holds):
    record = flow(0, nonfinite=[bad, 0], activations=dict(nonfinite=1, before=before))
    assert facts(record)["activations_bad"] is holds


def test_finite_outputs_name_no_module():
    found = facts(flow(0, activations=dict(nonfinite=0)))
    assert not found["activations_bad"] and found["module_words"] == ""


@pytest.mark.parametrize(
    ("grads", "named", "holds"),
    [
        ((0, 1, 1, 1), "a.kernel", True),  # the bias lives: nothing enters the layer
        ((0, 0, 1, 1), "a.kernel", False),  # nothing leaves it either
        ((0, 1, 1, 1), "b.kernel", False),
        ((1, 0, 1, 1), "a.bias", False),
    ],
)
def test_a_layer_gets_nothing_in_if_its_bias_alone_has_a_gradient(grads, named, holds):
    assert facts(flow(0, table=KERNELS, grads=grads), named)["dead_inputs"] is holds


# --- weights --------------------------------------------------------------------------------------------------


def weights(*tops, table=KERNELS, grads=1.0):
    return facts(flow(0, table=table, grads=grads, **{"params.max_abs": np.array(tops, np.float32)}))


def test_two_matrices_of_zeros_explain_a_gradient_of_zero():
    found = weights(0, 1, 0, 1)
    assert found["weights_zero"] and found["zero_words"] == "2 matrices hold nothing but zeros, first a.kernel."


def test_one_matrix_of_zeros_may_be_meant():
    assert not weights(0, 1, 1, 1)["weights_zero"]


@pytest.mark.parametrize("name", ["bias", "lora_b", "in_proj_bias"])
def test_what_starts_at_zero_by_design_is_no_fault(name):
    paths = (f"q.{name}", f"k.{name}", "q.kernel", "k.kernel")
    table = leaves(paths=paths, shapes=((2, 4),) * 4)
    assert not weights(0, 0, 1, 1, table=table)["weights_zero"]
    assert weights(1, 1, 0, 0, table=table)["weights_zero"]


def test_leaves_that_are_not_trained_do_not_count():
    table = leaves(paths=KERNELS.paths, shapes=KERNELS.shapes, trained=(False, True, True, True))
    assert not weights(0, 1, 0, 1, table=table)["weights_zero"]


def test_without_any_gradient_zero_weights_are_the_reason_only_if_there_are_no_others():
    """Behind layers of zeros the last bias would still get a gradient."""
    assert weights(0, 1, 0, 1, grads=0.0)["weights_zero"]
    three = leaves(paths=("a.kernel", "b.kernel", "c.kernel"), shapes=((4, 4),) * 3)
    assert not weights(0, 0, 1, table=three, grads=0.0)["weights_zero"]
    assert weights(0, 0, 1, table=three, grads=(0, 0, 1))["weights_zero"]


@pytest.mark.parametrize(("gain", "holds"), [(0.29, True), (0.31, False)])
def test_small_weights_are_below_a_third_of_the_usual_gain(gain, holds):
    """rms times root of the fan-in is 1 for lecun_normal; here the fan-in is 4 and a matrix has 16 elements."""
    norms = np.array([gain * 2, 9, gain * 2, 9], np.float32)
    assert facts(flow(0, table=KERNELS, **{"params.norm": norms}))["small_weights"] is holds


# --- signs and spread -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cosine", "holds"), [((0.31, -1, -1), True), ((0.29, -1, -1), False), ((np.nan, -1, -1), False)]
)
def test_one_matrix_in_three_that_goes_along_its_gradient_is_uphill(cosine, holds):
    table = leaves(paths=("a", "b", "c"), shapes=((2, 2),) * 3)
    found = facts(flow(0, table=table, cosine=cosine))
    assert bool(found["uphill"]) is holds
    if holds:
        assert found["uphill_words"] == "the updates of 1 of 3 matrices go along their gradient, first a"


def test_one_matrix_in_four_and_vectors_are_not_uphill():
    table = leaves(paths=("a", "b", "c", "d"), shapes=((2, 2),) * 4)
    assert not facts(flow(0, table=table, cosine=(1, -1, -1, -1)))["uphill"]
    assert not facts(flow(0, table=KERNELS, cosine=(-1, 1, -1, 1)))["uphill"]


@pytest.mark.parametrize(
    ("updates", "spread", "words"),
    [((0, 0), True, "0"), ((np.nan, np.nan), True, "not finite either"), ((1, 1), False, "0")],
)
def test_a_bad_gradient_spreads_if_the_others_get_no_update_for_it(updates, spread, words):
    found = facts(flow(0, grads_bad=(3, 0), updates=updates))
    assert found["grads_bad"] and not found["grads_fine"]
    assert (found["spread"], found["spread_words"], found["bad_grad_leaves"]) == (spread, words, 1)
    assert found["grad_leaves"] == 2


def test_gradients_that_are_all_bad_have_not_spread():
    found = facts(flow(0, grads_bad=(3, 3), updates=(np.nan, np.nan)))
    assert found["grads_bad"] and not found["spread"]


def test_finite_gradients_are_fine_and_unmeasured_ones_are_not_known_to_be():
    assert facts(flow(0))["grads_fine"] and facts(flow(0))["grads_known"]
    assert not facts(flow(0, grads=None))["grads_fine"] and not facts(flow(0, grads=None))["grads_known"]


def test_a_clip_that_is_known_and_a_large_value_are_passed_on():
    found = facts(flow(0, **{"grads.clip_norm": 1.0}), values={"large": 1.0})
    assert found["clip_known"] and found["large"]
    assert not facts(flow(0))["clip_known"] and not facts(flow(0))["large"]


@pytest.mark.parametrize(("largest", "rows", "holds"), [(8, 8, True), (7, 8, False), (None, 8, False)])
def test_a_token_needs_a_row_in_the_largest_embedding(largest, rows, holds):
    table = leaves(paths=("positions.embedding", "tokens.embedding"), shapes=((4, 2), (rows, 2)))
    record = flow(0, table=table, **({} if largest is None else {"batch.max_int": float(largest)}))
    alert = Alert(0, "nonfinite", Level.ERROR, "title", "message")
    assert gather(alert, record, History())["token_beyond"] is holds


def test_a_model_without_an_embedding_has_no_vocabulary():
    alert = Alert(0, "nonfinite", Level.ERROR, "title", "message")
    assert not gather(alert, flow(0, **{"batch.max_int": 8.0}), History())["token_beyond"]


# --- the course of the loss, and the batch --------------------------------------------------------------------


def batches(tops, dtype="float32", **more):
    table = leaves("batch", ("x", "y"), trained=(False, False), dtypes=(dtype, "float32"))
    return [
        Record(s, 0.0, {"batch.max_abs": np.array([top, 1.0], np.float32), **more}, {"batch": table})
        for s, top in enumerate(tops)
    ]


def about(records, **more):
    """What `course` says about the last of these records."""
    history = History()
    for each in records:
        history.observe(each)
    return course(Alert(0, "spike", Level.WARN, "title", "message", **more), records[-1], history)


@pytest.mark.parametrize(
    ("tops", "dtype", "found"),
    [
        ([1.0] * 7 + [10.0], "float32", True),
        ([1.0] * 7 + [9.9], "float32", False),
        ([1.0] * 6 + [10.0], "float32", False),  # too few to know what is usual
        ([1.0] * 7 + [10.0] + [1.0] * 3, "float32", True),
        ([1.0] * 7 + [10.0] + [1.0] * 4, "float32", False),
        ([1.0] * 7 + [10.0], "int32", False),
        ([0.0] * 7 + [10.0], "float32", False),
    ],
)
def test_a_batch_ten_times_as_large_as_usual_in_the_last_four_probes_is_an_outlier(tops, dtype, found):
    said = about(batches(tops, dtype))
    assert said["batch_outlier"] is found
    assert said["outlier_words"] == ("The batch's x is 10 times as large as usual." if found else "")


def lossy(losses, classes=(10,)):
    extra = {"labels.classes": np.array(classes, np.int64)}
    return [Record(s, 0.0, {"loss": loss, **extra}, {}) for s, loss in enumerate(losses)]


LN10 = float(np.log(10))
FLOOR = float(np.log1p(9 / np.e))


@pytest.mark.parametrize(
    ("losses", "classes", "found"),
    [
        ([LN10, 2.0], (10,), True),
        ([LN10 * 1.0099, 2.0], (10,), True),
        ([LN10 * 1.0101, 2.0], (10,), False),
        ([LN10, FLOOR * 1.001], (10,), True),
        ([LN10, FLOOR * 0.999, 2.0], (10,), False),
        ([LN10, 2.0], (10, 10), False),  # which of the two are the labels?
        ([LN10, 2.0], (1,), False),
    ],
)
def test_a_second_softmax_shows_in_the_first_loss_and_in_the_lowest(losses, classes, found):
    assert about(lossy(losses, classes))["softmax_twice"] is found


@pytest.mark.parametrize(("width", "other", "found"), [(9e-7, 1.0, True), (1.1e-6, 1.0, False), (1.0, 0.0, False)])
def test_the_largest_array_of_a_batch_is_the_input(width, other, found):
    table = leaves("batch", ("x", "mask"), trained=(False, False), shapes=((8, 4), (8,)))
    record = Record(0, 0.0, {"batch.spread": np.array([width, other])}, {"batch": table})
    assert about([record])["input_constant"] is found


def test_of_two_largest_arrays_none_is_the_input():
    table = leaves("batch", ("x", "y"), trained=(False, False), shapes=((8, 4), (8, 4)))
    assert not about([Record(0, 0.0, {"batch.spread": np.zeros(2)}, {"batch": table})])["input_constant"]


@pytest.mark.parametrize(("ratio", "big"), [(0.051, True), (0.049, False)])
def test_updates_of_a_twentieth_of_their_matrices_are_big(ratio, big):
    assert about([flow(0, ratio=ratio)])["big_updates"] is big
    vectors = leaves(shapes=((4,), (4,)))
    assert not about([flow(0, ratio=ratio, table=vectors)])["big_updates"]


def test_the_first_record_is_the_first_probe():
    assert about([flow(0)])["first_probe"] and not about([flow(0), flow(1)])["first_probe"]
