"""Statistics against a float64 oracle, on the device (`Program`) and on the host (NumPy leaves of a `Probe`).

XLA's CPU backend treats subnormal float32 numbers as zero: the oracle allows what that may cost, sqrt(n) * 2^-126.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bitwise import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_probes.device.probe import Probe
from nnx_probes.device.reduce import Program, count_nonfinite

KNOWN = {kind.name: kind for kind in KINDS}
FLOATS = ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "complex64"]
EXACT = ["int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool"]
SHAPES = [(), (1,), (0,), (7,), (3, 5), (64,)]
FTZ = float(2.0**-126)
seeded = settings(derandomize=True, deadline=None, max_examples=40, database=None)


def oracle(x):
    """norm, max_abs, nonfinite, value in float64 (longdouble inside, so that squares fit).

    A complex number of which a part is NaN is NaN, also beside an infinite part.
    """
    wide = np.asarray(x)
    wide = wide.astype(np.complex128 if wide.dtype.kind == "c" else np.float64)
    with np.errstate(all="ignore"):
        size = np.abs(wide.astype(np.clongdouble if wide.dtype.kind == "c" else np.longdouble))
        size = np.where(np.isnan(wide), np.nan, size)
        norm = float(np.sqrt(np.sum(size * size)))
        largest = float(np.max(size, initial=0))
    bad = int(np.sum(~np.isfinite(wide)))
    value = float(wide.reshape(())) if wide.size == 1 and wide.dtype.kind != "c" else np.nan
    return norm, largest, bad, value


def check(x, norm, max_abs, nonfinite, value):
    x = np.asarray(x)
    with np.errstate(all="ignore"):
        o_norm, o_largest, o_bad, o_value = oracle(x)
        narrow = np.float32(o_norm)
    what = f"{x.dtype} {x.shape} {x.reshape(-1)[:8]}: norm {norm} for {o_norm}, max_abs {max_abs} for {o_largest}, {nonfinite}"
    assert nonfinite == o_bad, what
    slack = FTZ * max(1, x.size) ** 0.5
    if np.isfinite(narrow):
        assert abs(float(norm) - o_norm) <= 1e-5 * o_norm + slack, what
    elif np.isfinite(o_norm):  # beyond float32
        assert norm == narrow or o_norm < 3.41e38, what
    else:
        assert np.array_equal(norm, narrow, equal_nan=True), what
    if np.isfinite(o_largest):
        with np.errstate(over="ignore"):
            close = 2e-7 if x.dtype.kind == "c" else 0  # a modulus is rounded, all else is exact
            expected = np.float32(o_largest)
        assert max_abs == expected or abs(float(max_abs) - o_largest) <= close * o_largest + FTZ, what
    else:
        assert np.array_equal(max_abs, np.float32(o_largest), equal_nan=True), what
    return o_value


def special(dtype):
    """Element values that break naive sums: f16 above 256, f32 near 1e30 and 1e-30, f8 at its end, subnormals."""
    name = np.dtype(dtype).name
    if name == "bool":
        return [0, 1]
    if name.startswith(("int", "uint")):
        info = ml_dtypes.iinfo(dtype)
        return [0, 1, int(info.min), int(info.max), int(info.max) // 2]
    real = np.float32 if name == "complex64" else dtype
    info = ml_dtypes.finfo(real)
    some = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        float(info.max),
        float(info.min),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    ]
    some += {"float16": [300.0, 257.0, 1e-4], "float64": [1e200, 1e-200, 1e38]}.get(name, [])
    if name in ("float32", "bfloat16", "complex64", "float64"):
        some += [1e30, -3e30, 1e-30, 2e-23, 1e19]
    return [*some, float("nan"), float("inf"), float("-inf")]


@st.composite
def arrays(draw, name, shape):
    """Raw bits, special values, or an even scale of random numbers."""
    kind = KNOWN[name]
    n = int(np.prod(shape))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    how = draw(st.sampled_from(["bits", "special", "one special", "scale", "constant"]))
    if how == "bits":
        return kind.host(kind.random(rng, *shape))
    palette = special(kind.dtype)
    if how == "special":
        return _cast(rng.choice(np.array(palette, object), n), kind.dtype, shape, rng)
    if how == "constant":
        return _cast([draw(st.sampled_from(palette))] * n, kind.dtype, shape, rng)
    if name in EXACT:
        return kind.host(kind.random(rng, *shape))
    values = list(rng.normal(size=n) * 10.0 ** draw(st.sampled_from([-35, -22, -19, -3, 0, 1, 3, 18, 25, 37])))
    if how == "one special" and n:
        values[draw(st.integers(0, n - 1))] = draw(st.sampled_from(palette))
    return _cast(values, kind.dtype, shape, rng)


def _cast(values, dtype, shape, rng):
    with np.errstate(all="ignore"):
        if np.dtype(dtype).kind in "iu" or np.dtype(dtype).name in ("int4", "uint4"):
            wide = np.uint64 if min(values, default=0) >= 0 else np.int64
            return np.array([int(v) for v in values], wide).astype(dtype).reshape(shape)
        real = np.array(values, np.float64).reshape(shape)
        if np.dtype(dtype).kind == "c":
            return (real + 1j * rng.permutation(real.reshape(-1)).reshape(shape)).astype(dtype)
        return real.astype(dtype)


@functools.cache
def program():
    return Program(hashing=False)


def mode(name):
    return KNOWN[name].mode()


@pytest.mark.parametrize("name", FLOATS + EXACT)
@seeded
@given(data=st.data())
def test_the_program_agrees_with_the_oracle(name, data):
    xs = [data.draw(arrays(name, shape)) for shape in SHAPES]
    with mode(name):
        on_device = [jnp.asarray(x) for x in xs]
        found = program().unpack(program().enqueue(on_device), on_device)
    for x, norm, top, bad, value in zip(xs, found.norm, found.max_abs, found.nonfinite, found.value, strict=True):
        expected = check(x, norm, top, bad, value)
        with np.errstate(over="ignore"):
            expected = float(np.float32(expected)) if name == "float64" else expected
        if name != "int64" and not 0 < abs(expected) < FTZ:
            assert np.array_equal(value, expected, equal_nan=True)
    assert found.norm.dtype == found.max_abs.dtype == np.float32 and found.nonfinite.dtype == np.int32
    assert found.value.dtype == np.float64 and found.lanes is None


@pytest.mark.parametrize("name", [*FLOATS, *EXACT, "complex128", "uint64"])
@seeded
@given(data=st.data())
def test_host_leaves_agree_with_the_oracle(name, data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    x = data.draw(arrays(name, shape)) if name not in ("complex128", "uint64") else _wide(data, name, shape)
    sample = Probe({"x": x}, fingerprints=None).enqueue().fetch()
    expected = check(x, sample.norm[0], sample.max_abs[0], sample.nonfinite[0], sample.value[0])
    assert np.array_equal(sample.value[0], expected, equal_nan=True)


def _wide(data, name, shape):
    kind = KNOWN[name]
    return kind.host(kind.random(np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))), *shape))


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("name", [*FLOATS, *EXACT])
def test_every_special_value_is_measured_alone_and_beside_every_other(name, where):
    dtype, palette = KNOWN[name].dtype, special(KNOWN[name].dtype)
    rng = np.random.default_rng(0)
    singles = [_cast([v], dtype, (1,), rng) for v in palette]
    if name == "complex64":
        singles = [np.array([complex(re, im)], np.complex64) for re in palette for im in palette]
    mixed = [np.concatenate([a, b]) for a in singles[::3] for b in singles[::5]]
    with mode(name):
        for x in singles + mixed:
            leaf = jnp.asarray(x) if where == "device" else x
            if where == "device":
                found = program().unpack(program().enqueue([leaf]), [leaf])
            else:
                found = Probe(leaf, fingerprints=None).enqueue().fetch()
            check(x, found.norm[0], found.max_abs[0], found.nonfinite[0], found.value[0])


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32"])
def test_one_program_serves_leaves_of_every_kind_and_a_bad_one_spoils_no_other(name):
    rng = np.random.default_rng(0)
    xs = [
        rng.normal(size=(3, 4)).astype(np.float32),
        np.full(5, np.nan, ml_dtypes.bfloat16),
        np.full(9, 1e30, np.float32),
        np.full(9, 1e-30, np.float32),
        np.full(9, 300, np.float16),
        np.array([1, np.inf, -np.inf, np.nan], np.float32),
        np.arange(6, dtype=name),
        np.array([3 + 4j], np.complex64),
        np.array(True),
        np.zeros((0, 3), np.float32),
        np.array(448, ml_dtypes.float8_e4m3fn),
    ]
    sample = Probe([jnp.asarray(x) for x in xs], fingerprints=None).enqueue().fetch()
    for x, *row in zip(xs, sample.norm, sample.max_abs, sample.nonfinite, sample.value, strict=True):
        check(x, *row)
    assert sample.nonfinite.tolist() == [0, 5, 0, 0, 0, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("x", "value"),
    [
        (jnp.uint32(2**32 - 1), 2**32 - 1),
        (jnp.int32(-(2**31)), -(2**31)),
        (jnp.int32(2**24 + 1), 2**24 + 1),
        (jnp.uint8(255), 255),
        (jnp.asarray(-8, jnp.int4), -8),
        (jnp.bool_(True), 1),
        (jnp.float32(0.1), float(np.float32(0.1))),
        (jnp.float16(0.1), float(np.float16(0.1))),
        (jnp.bfloat16(3.14), 3.140625),
        (jnp.asarray(448, jnp.float8_e4m3fn), 448),
        (jnp.full((1, 1), 7), 7),
        (2**53, 2**53),
        (0.1, 0.1),
        (np.uint64(2**40 + 1), 2**40 + 1),
        (True, 1),
        (np.float64(1e300), 1e300),
    ],
)
def test_the_value_of_a_scalar_is_exact(x, value):
    assert Probe({"x": x}, fingerprints=None).enqueue().fetch().value[0] == value


@pytest.mark.parametrize("x", [jnp.ones(2), jnp.complex64(1j), jnp.zeros((0,)), np.ones(2), 1j])
def test_what_is_no_single_real_number_has_no_value(x):
    assert np.isnan(Probe({"x": x}, fingerprints=None).enqueue().fetch().value[0])


def test_typed_keys_are_measured_as_their_data():
    sample = Probe(jax.random.key(7)).enqueue().fetch()
    assert sample.norm[0] == 7 and sample.nonfinite[0] == 0 and np.isnan(sample.value[0])


def test_the_norm_of_33_million_ones_does_not_saturate():
    n = 2**25 + 1
    sample = Probe([jnp.ones(n, jnp.bfloat16), np.ones(n, np.float32)], fingerprints=None).enqueue().fetch()
    assert np.allclose(sample.norm, np.sqrt(n), rtol=1e-5)


def test_elements_of_a_leaf_that_underflow_one_by_one_still_count():
    x = np.full(100_000, 1e-20, np.float32)  # squares: 1e-40, subnormal; their sum: 1e-35
    x[0] = 1e-15
    sample = Probe([jnp.asarray(x), x], fingerprints=None).enqueue().fetch()
    assert np.allclose(sample.norm, np.linalg.norm(x.astype(np.float64)), rtol=1e-5)


def test_many_elements_whose_squares_underflow_still_count_beside_one_whose_square_does_not():
    x = np.full(1_000_000, 1e-19, np.float32)  # squares: 1e-38, subnormal; their sum: 1e-32
    x[0] = 1.1e-15  # its square: 1.2e-30
    sample = Probe([jnp.asarray(x), x], fingerprints=None).enqueue().fetch()
    assert np.allclose(sample.norm, np.linalg.norm(x.astype(np.float64)), rtol=1e-5)


@pytest.mark.parametrize("fingerprints", [None, "mix64", "xxh3"])
def test_a_probe_is_traced_once_over_many(fingerprints):
    state = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4, jnp.bfloat16), "key": jax.random.key(0), "n": jnp.int32(0)}
    probe = Probe(lambda: state, fingerprints=fingerprints)
    for step in range(30):
        bad = jnp.nan if step % 7 == 6 else 0.1
        state = {**state, "w": state["w"] + bad, "n": state["n"] + 1}
        sample = probe.enqueue().fetch()
        assert sample.value[2] == step + 1
    assert probe.traces == 1


def test_counting_writes_no_copy_of_a_large_leaf():
    x = jnp.ones((300, 400))
    whole = jax.jit(count_nonfinite).lower(x).compile().memory_analysis()
    layers = jax.jit(lambda x: count_nonfinite(x, (1,))).lower(jnp.ones((10, 12_000))).compile().memory_analysis()
    assert whole.temp_size_in_bytes < x.nbytes / 10
    assert layers.temp_size_in_bytes < x.nbytes / 4  # one layer


@pytest.mark.parametrize("size", [4095, 4096, 4097, 10_000])
def test_counting_in_pieces_misses_none(size):
    x = np.zeros(size, np.float32)
    x[[0, size // 2, -1]] = np.nan, np.inf, -np.inf
    assert int(count_nonfinite(jnp.asarray(x))) == 3
    stacked = np.stack([x, np.ones_like(x)], axis=1)
    assert count_nonfinite(jnp.asarray(stacked), (0,)).tolist() == [3, 0]
    assert int(count_nonfinite(jnp.asarray(x + 1j).astype(jnp.complex64))) == 3
