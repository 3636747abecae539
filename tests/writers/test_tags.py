from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nnx_probes.errors import ArgumentTypeError
from nnx_probes.host.record import Record
from nnx_probes.writers import tags

from .samples import PARAMS, record


def test_the_first_dot_of_a_name_becomes_the_group():
    shown = tags.scalars(
        Record(1, 0.0, {"loss": 2.0, "probes.overhead": 0.5, "metrics.val.acc": 1, "optimizer.step": 3})
    )
    assert shown == {
        "loss": 2.0,
        "probes/overhead": 0.5,
        "metrics/val.acc": 1.0,
        "optimizer/step": 3.0,
        "nonfinite": 0.0,
    }


def test_bools_are_numbers_and_texts_are_left_out():
    shown = tags.scalars(Record(1, 0.0, {"a": True, "b": "text", "c": ("x", "y"), "d": None}))
    assert shown == {"a": 1.0, "nonfinite": 0.0}


@given(hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(0, 2.0**127, width=32)))
def test_the_aggregate_norm_is_the_norm_of_the_norms(norms):
    shown = tags.scalars(Record(0, 0.0, {"grads.norm": norms}))
    assert shown["grads/norm"] == pytest.approx(np.linalg.norm(norms.astype(np.float64)), rel=1e-12)


def test_the_aggregate_norm_does_not_overflow_in_float64():
    shown = tags.scalars(Record(0, 0.0, {"grads.norm": np.array([3e300, 4e300])}))
    assert shown["grads/norm"] == pytest.approx(5e300)


def test_nonfinite_counts_elements_of_all_groups_and_numbers():
    values = {
        "loss": math.nan,
        "params.nonfinite": np.array([1, 2], np.int32),
        "grads.nonfinite": np.array([4], np.int32),
        "params.norm": np.array([np.nan, 1], np.float32),
    }
    shown = tags.scalars(Record(0, 0.0, values))
    assert shown["nonfinite"] == 8
    assert math.isnan(shown["params/norm"])


def test_two_names_keep_two_tags():
    shown = tags.scalars(Record(0, 0.0, {"a.b": 1.0, "a/b": 2.0}))
    assert sorted(shown.values()) == [0.0, 1.0, 2.0]
    shown = tags.scalars(Record(0, 0.0, {"metrics.a b": 1.0, "metrics.a_b": 2.0, "metrics.\udc80": 3.0}))
    assert len(shown) == 4


def test_a_number_too_large_for_a_float_is_infinite():
    assert tags.number(10**400) == math.inf
    assert tags.number(-(10**400)) == -math.inf


def test_the_error_for_an_array_names_the_tag_and_the_way_out():
    with pytest.raises(ArgumentTypeError, match=r"'loss' cannot be written as a scalar: got ndarray.*mean\(\)"):
        tags.number(np.zeros(3), "loss")


def test_vectors_carry_a_hash_of_the_leaves_and_are_float32():
    other = dataclasses.replace(PARAMS, paths=("layers.0.kernel", "layers.0.scale"))
    first, second = tags.vectors(record(0)), tags.vectors(record(0, leaves=other))
    assert {tag.split("/")[0] for tag in first} == {"params_norm", "params_max_abs", "params_nonfinite"}
    assert not set(first) & set(second)
    assert {vector.dtype for vector in first.values()} == {np.dtype(np.float32)}


@given(
    st.lists(st.text(st.characters(), max_size=8), min_size=1, max_size=12, unique=True)
    | st.lists(st.sampled_from(["a", "\udc80", "\\udc80", "/", " ", "[0]"]), min_size=1, unique=True)
)
def test_leaf_tags_are_unique_and_all_in_one_group(paths):
    n = len(paths)
    leaves = dataclasses.replace(
        PARAMS,
        paths=tuple(paths),
        kinds=("Param",) * n,
        shapes=((),) * n,
        dtypes=("float32",) * n,
        trained=(True,) * n,
    )
    values = {"params.norm": np.zeros(n, np.float32)}
    shown = tags.leaf_scalars(Record(0, 0.0, values, {"params": leaves}), lambda _: True)
    assert len(shown) == n
    assert {tag.split("/")[0] for tag in shown} == {"params_norm"}
    for tag in shown:
        tag.encode("utf-8")


def test_leaf_scalars_take_only_accepted_paths():
    shown = tags.leaf_scalars(record(0), lambda path: path.endswith("bias"))
    assert shown["params_norm/layers.0.bias"] == 2.0
    assert all(tag.endswith("bias") for tag in shown)


def test_fingerprints_become_a_table():
    found = tags.fingerprint_tables(record(1))
    assert list(found) == ["fingerprints/params"]
    assert "| `layers.0.bias` | `mix64:0000000100000001` |" in found["fingerprints/params"]
