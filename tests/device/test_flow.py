"""What a step's gradients and updates do to each parameter, against a float64 oracle in NumPy.

``p + u == p`` is asked of `optax.apply_updates` itself, run eagerly on concrete arrays. XLA's CPU backend treats subnormal
float32 numbers as zero: the oracle does so too, and allows what that may cost a norm, sqrt(n) * 2^-126.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_probes.device.flow import Flow, Layout, Slot

PAIRS = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
"""(dtype of the parameters, dtype of gradients and updates)."""
PLAIN = [(), (7,), (3, 5), (0, 3), (64,)]
STACKED = [((4, 3, 2), 0), ((3, 4, 2), 1), ((0, 3), 1), ((0, 3), 0)]
SLOTS = [(shape, None) for shape in PLAIN] + STACKED
FTZ = float(2.0**-126)
F32_MAX = float(np.finfo(np.float32).max)
COUNTS = {"grad_bad", "update_bad"}
NAMES = [field.name for field in dataclasses.fields(Flow)]
seeded = settings(derandomize=True, deadline=None, max_examples=40, database=None)


def layout_of(dtype, slots=SLOTS):
    return Layout([Slot((f"p{i}",), shape, dtype, axis) for i, (shape, axis) in enumerate(slots)])


@functools.partial(jax.jit, static_argnums=0)
def compiled(layout, grads, params, updates):
    return layout.measure(grads, params, updates)


def measure(layout, grads, params=None, updates=None):
    on_device = [None if xs is None else [jnp.asarray(x) for x in xs] for xs in (grads, params, updates)]
    return np.asarray(compiled(layout, *on_device))


def one(grad=None, param=None, update=None, axis=None):
    """The statistics of a single leaf, as a dict of numbers (of arrays, with an axis)."""
    known = next(x for x in (param, grad, update) if x is not None)
    layout = Layout([Slot(("p",), np.shape(known), str(np.asarray(known).dtype), axis)])
    words = measure(layout, *(None if x is None else [x] for x in (grad, param, update)))
    found = layout.unpack(words, stack=axis is not None)
    return {name: getattr(found, name) if axis is not None else getattr(found, name)[0] for name in NAMES}


# --- the oracle ---------------------------------------------------------------------------------------------


def wide(x):
    """float64, float32's subnormals as 0."""
    x = np.asarray(x).astype(np.float64)
    return np.where(np.abs(x) < FTZ, 0.0, x)


def norm(x):
    with np.errstate(all="ignore"):
        size = np.abs(x.astype(np.longdouble))
        return float(np.sqrt(np.sum(size * size)))


def after_update(param, update):
    """The new parameter by optax's own definition, nothing compiled together with anything else."""
    return np.asarray(optax.apply_updates(jnp.asarray(param), jnp.asarray(update)))


def agree_norm(found, x, what):
    expected = norm(x)
    if np.isfinite(expected) and expected <= F32_MAX * (1 - 1e-5):
        assert abs(float(found) - expected) <= 1e-5 * expected + FTZ * max(1, x.size) ** 0.5, what
    elif not np.isfinite(expected):
        assert np.array_equal(found, np.float32(expected), equal_nan=True), what
    else:  # finite in float64, at the end of float32 or beyond it
        assert found >= F32_MAX * (1 - 1e-4), what


def agree_max(found, x, what):
    expected = np.max(np.abs(x), initial=0)
    if np.isfinite(expected):
        assert abs(float(found) - expected) < FTZ, what  # exact, but for subnormals
    else:
        assert np.array_equal(found, np.float32(expected), equal_nan=True), what


def agree_share(found, hits, may_be_nan, what):
    if may_be_nan:
        assert np.isnan(found), what
    else:
        assert abs(float(found) - (np.mean(hits) if hits.size else 0.0)) <= 1e-7, what


def agree(row, g, p, u, after):
    """One row of what was measured against the slice of the arrays that it stands for (None: not given)."""
    what = f"{row} for g={g!r} p={p!r} u={u!r}"
    g, p, u, after = (None if x is None else wide(x) for x in (g, p, u, after))
    for kind, x in (("grad", g), ("update", u)):
        if x is None:
            assert np.isnan(row[f"{kind}_norm"]) and np.isnan(row[f"{kind}_max"]) and row[f"{kind}_bad"] == 0, what
            continue
        agree_norm(row[f"{kind}_norm"], x, what)
        agree_max(row[f"{kind}_max"], x, what)
        assert row[f"{kind}_bad"] == np.sum(~np.isfinite(x)), what
    if p is None:
        assert np.isnan(row["param_norm"]), what
    else:
        agree_norm(row["param_norm"], p, what)
    if g is None:
        assert np.isnan(row["grad_zeros"]), what
    else:
        agree_share(row["grad_zeros"], g == 0, np.isnan(g).any(), what)
    if p is None or u is None:
        assert np.isnan(row["absorbed"]) and np.isnan(row["ratio"]), what
    else:
        agree_absorbed(row["absorbed"], p, u, after, what)
        agree_ratio(row["ratio"], norm(p), norm(u), what)
    if g is None or u is None:
        assert np.isnan(row["cosine"]), what
    else:
        agree_cosine(row["cosine"], g, u, what)


def agree_absorbed(found, p, u, after, what):
    if np.isinf(p).any() and np.isnan(found):
        return  # inf + u == inf, but an infinite parameter leaves no difference to look at
    agree_share(found, (u != 0) & (after == p), any(np.isnan(x).any() for x in (p, u, after)), what)


def agree_ratio(found, p, u, what):
    if not p > 0:
        assert np.isnan(found), what
    elif all(not np.isfinite(x) or x == 0 or 1e-30 < x < F32_MAX * (1 - 1e-5) for x in (p, u)):
        with np.errstate(all="ignore"):
            expected = np.float32(np.float64(u) / p)
        assert np.isclose(found, expected, rtol=3e-5, equal_nan=True), what


def agree_cosine(found, g, u, what):
    lengths = norm(g), norm(u)
    if not all(np.isfinite(x) and x > 0 for x in lengths):
        assert np.isnan(found), what
    elif all(1e-30 < x < F32_MAX * (1 - 1e-5) for x in lengths):
        expected = float(np.sum((g / lengths[0]) * (u / lengths[1])))
        assert abs(found - expected) < 1e-5, what


def rows_of(found):
    return [dict(zip(NAMES, values, strict=True)) for values in zip(*(getattr(found, n) for n in NAMES), strict=True)]


def agree_all(layout, words, grads, params, updates):
    """Every leaf on the whole, and every layer of the stacked ones by itself."""
    n = len(layout.slots)
    after = [None] * n
    if params is not None and updates is not None:
        after = [after_update(p, u) for p, u in zip(params, updates, strict=True)]
    grads, params, updates = ([None] * n if xs is None else xs for xs in (grads, params, updates))
    leaves = list(zip(grads, params, updates, after, strict=True))
    found = layout.unpack(words)
    for row, arrays in zip(rows_of(found), leaves, strict=True):
        agree(row, *arrays)
    layers = [
        [None if x is None else np.take(x, layer, slot.axis) for x in arrays]
        for slot, arrays in zip(layout.slots, leaves, strict=True)
        if slot.axis is not None
        for layer in range(slot.shape[slot.axis])
    ]
    for row, arrays in zip(rows_of(layout.unpack(words, stack=True)), layers, strict=True):
        agree(row, *arrays)
    for name in NAMES:
        assert getattr(found, name).dtype == (np.int32 if name in COUNTS else np.float32)


# --- what is drawn ------------------------------------------------------------------------------------------


def special(dtype):
    """What breaks naive sums: float16 above 256, float32 whose squares overflow or underflow, subnormals, NaN, Inf."""
    info = ml_dtypes.finfo(dtype)
    some = [0.0, -0.0, 1.0, -1.5, float(info.smallest_normal), float(info.smallest_subnormal)]
    some += [300.0, 257.0, -65504.0, 1e-4] if dtype == "float16" else [1e30, -3e30, 1e-30, 2e-23, 1e19, -8e37, 3e38]
    return [*some, float("nan"), float("inf"), float("-inf")]


HOW = ["special", "one special", "scale", "constant", "zeros", "sparse"]


@st.composite
def leaf(draw, dtype, shape, param=None):
    """One array of `shape`; with a parameter also one whose elements are about the size that it absorbs."""
    n = int(np.prod(shape))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    how = draw(st.sampled_from(HOW if param is None else [*HOW, "near", "near", "near"]))
    palette = special(dtype)
    values = rng.normal(size=n) * 10.0 ** draw(st.sampled_from([-18, -12, -3, 0, 1, 3, 12, 18]))
    if how == "near":
        with np.errstate(all="ignore"):
            steps = 2.0 ** rng.integers(-27, -5, n) * rng.choice([-1.0, 1.0], n) * rng.choice([1.0, 1.1], n)
            values = param.astype(np.float64).reshape(-1) * steps
    elif how == "special":
        values = rng.choice(palette, n)
    elif how == "constant":
        values = np.full(n, draw(st.sampled_from(palette)))
    elif how == "zeros":
        values = np.zeros(n)
    elif how == "sparse":
        values = values * rng.integers(0, 2, n)
    elif how == "one special" and n:
        values[draw(st.integers(0, n - 1))] = draw(st.sampled_from(palette))
    with np.errstate(all="ignore"):
        return values.astype(dtype).reshape(shape)


@pytest.mark.parametrize(("params", "others"), PAIRS)
@seeded
@given(data=st.data())
def test_every_statistic_agrees_with_the_oracle_on_leaves_and_on_layers(params, others, data):
    layout = layout_of(params)
    p = [data.draw(leaf(params, shape)) for shape, _ in SLOTS]
    g = [data.draw(leaf(others, shape)) for shape, _ in SLOTS]
    u = [data.draw(leaf(others, x.shape, x)) for x in p]
    agree_all(layout, measure(layout, g, p, u), g, p, u)


GIVEN = [given for given in itertools.product([True, False], repeat=3) if any(given)]


@pytest.mark.parametrize(
    "given", GIVEN, ids=lambda given: "".join(n for n, has in zip("gpu", given, strict=True) if has)
)
def test_what_is_not_given_is_nan_and_counts_nothing(given):
    layout = layout_of("float32", [((3,), None), ((2, 3), 0)])
    rng = np.random.default_rng(0)
    arrays = [[rng.normal(size=s.shape).astype(np.float32) for s in layout.slots] if has else None for has in given]
    for xs in arrays:
        if xs is not None:
            xs[0][1] = np.inf
    agree_all(layout, measure(layout, *arrays), *arrays)


def test_nothing_given_is_all_nan():
    layout = layout_of("float32", [((3,), None)])
    found = layout.unpack(np.asarray(layout.measure(None)))
    assert all(np.isnan(getattr(found, name)).all() for name in NAMES if name not in COUNTS)
    assert found.grad_bad.tolist() == found.update_bad.tolist() == [0]


def test_statistics_are_the_numbers_that_measure_packs():
    layout = layout_of("float32", [((3,), None), ((), None)])
    g, p, u = ([jnp.linspace(a, b, 3), jnp.float32(a)] for a, b in ((1, 2), (2, np.inf), (-1, np.nan)))
    found = jax.jit(layout.statistics)(g, p, u)
    words = measure(layout, g, p, u)
    assert words.dtype == np.uint32 and words.shape == (layout.words,)
    unpacked = layout.unpack(words)
    for name in ("grad_norm", "grad_max", "grad_bad", "update_norm", "update_max", "update_bad", "param_norm"):
        assert found[name].dtype == getattr(unpacked, name).dtype
        np.testing.assert_array_equal(found[name], getattr(unpacked, name))
    assert unpacked.update_bad.tolist() == [3, 0]


# --- single facts -------------------------------------------------------------------------------------------


def test_a_float16_norm_does_not_overflow():
    found = one(*3 * [np.full(4, 300, np.float16)])  # one square is 90000, the largest float16 65504
    assert found["grad_norm"] == found["update_norm"] == found["param_norm"] == 600


@pytest.mark.parametrize(("value", "dtype"), [(1e-30, "float32"), (6e-8, "float16"), (1e-36, "bfloat16")])
def test_tiny_values_do_not_underflow(value, dtype):
    x = np.full(9, value, dtype)
    found = one(x, x, x)
    expected = 3 * float(x[0])
    assert np.allclose([found["grad_norm"], found["update_norm"], found["param_norm"]], expected, rtol=1e-5, atol=0)
    assert found["grad_zeros"] == 0 and np.isclose(found["ratio"], 1)


@pytest.mark.parametrize("value", [1e20, -8e37])
def test_large_values_do_not_overflow(value):
    x = np.full(9, value, np.float32)
    found = one(x, x, x)
    expected = 3 * abs(float(x[0]))
    assert np.allclose([found["grad_norm"], found["update_norm"], found["param_norm"]], expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_of_numbers_near_the_largest_is_not_zero(dtype):
    x = np.array([2e38, -1e38], dtype)
    found = one(x, x, -x)
    expected = float(np.linalg.norm(x.astype(np.float64)))
    assert np.allclose([found["grad_norm"], found["update_norm"], found["param_norm"]], expected, rtol=1e-5)
    assert np.isclose(found["cosine"], -1)


def test_a_ratio_beyond_float32_is_infinite_and_warns_of_nothing():
    assert one(None, np.full(2, 1e-30, np.float32), np.full(2, 1e30, np.float32))["ratio"] == np.inf


def test_leaves_that_are_all_zero_have_norm_zero_and_no_ratio():
    zero = np.zeros((2, 3), np.float32)
    found = one(zero, zero, zero)
    assert found["grad_norm"] == found["grad_max"] == found["update_norm"] == found["param_norm"] == 0
    assert found["grad_zeros"] == 1 and found["absorbed"] == 0
    assert np.isnan(found["ratio"]) and np.isnan(found["cosine"])


def test_negative_zero_is_zero():
    zero = np.array([-0.0, 0.0], np.float32)
    found = one(zero, np.ones(2, np.float32), zero)
    assert found["grad_zeros"] == 1 and found["absorbed"] == 0


def test_float32_subnormals_count_as_zeros():
    x = np.array([1e-40, 1.0, np.finfo(np.float32).smallest_normal, 0.0], np.float32)
    assert one(x, None, None)["grad_zeros"] == 0.5


def test_float16_subnormals_do_not_count_as_zeros():
    x = np.array([6e-8, 1.0, 0.0, 0.0], np.float16)
    assert one(x, None, None)["grad_zeros"] == 0.5


def test_nan_in_one_layer_spoils_that_layer_and_the_leaf_only():
    x = np.ones((3, 4), np.float32)
    x[1, 2] = np.nan
    layers, whole = one(x, np.ones_like(x), x, axis=0), one(x, np.ones_like(x), x)
    for name in ("grad_norm", "grad_max", "update_norm", "update_max", "grad_zeros", "absorbed", "ratio", "cosine"):
        assert np.isnan(layers[name]).tolist() == [False, True, False] and np.isnan(whole[name])
    assert layers["grad_bad"].tolist() == layers["update_bad"].tolist() == [0, 1, 0]
    assert whole["grad_bad"] == whole["update_bad"] == 1 and layers["param_norm"].tolist() == [2, 2, 2]


def test_a_leaf_that_overflows_float32_only_on_the_whole_is_infinite_on_the_whole_only():
    x = np.full((64, 1), 8e37, np.float32)
    layers, whole = one(x, x, x, axis=0), one(x, x, x)
    assert np.isfinite(layers["grad_norm"]).all() and np.isinf(whole["grad_norm"])
    assert whole["grad_bad"] == 0 and whole["grad_max"] == np.float32(8e37)


def test_bad_elements_are_counted_exactly_among_many():
    x = np.ones(100_003, np.float32)
    x[::7], x[3::11] = np.nan, -np.inf
    assert one(x, None, x)["grad_bad"] == one(x, None, x)["update_bad"] == np.sum(~np.isfinite(x))


def test_the_cosine_tells_descent_from_ascent():
    g, p = np.array([3.0, -4.0, 0.0], np.float32), np.ones(3, np.float32)
    cosines = [one(g, p, u.astype(np.float32))["cosine"] for u in (-0.1 * g, 7 * g, np.array([4.0, 3.0, 1.0]))]
    assert np.allclose(cosines, [-1, 1, 0], atol=1e-6)


# --- absorbed updates ---------------------------------------------------------------------------------------


@functools.cache
def positive_bfloat16():
    """One bfloat16 of each of the 128 fractions, in four binades."""
    fractions = np.arange(128) / 128 + 1
    return np.concatenate([fractions * 2.0**e for e in (-20, -1, 0, 15)]).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_a_bfloat16_parameter_absorbs_what_is_below_a_512th_of_it_and_nothing_above_a_256th(dtype, signs):
    size = positive_bfloat16().astype(np.float64)
    p = (signs[0] * size).astype(ml_dtypes.bfloat16)
    below = (signs[1] * size / 512 * (1 - 2**-7)).astype(dtype)
    above = (signs[1] * size / 256 * (1 + 2**-6)).astype(dtype)
    assert (np.abs(below.astype(np.float64)) < size / 512).all()
    assert (np.abs(above.astype(np.float64)) > size / 256).all()
    assert one(None, p, below)["absorbed"] == 1
    assert one(None, p, above)["absorbed"] == 0


@pytest.mark.parametrize(("dtype", "digits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_an_update_of_half_an_ulp_is_absorbed_by_even_parameters_only(dtype, digits):
    ulp = 2.0 ** (1 - digits)
    p = np.array([1, 1 + ulp, 1 + 2 * ulp, 1 + 3 * ulp], dtype)
    u = np.full(4, ulp / 2, dtype)
    assert one(None, p, u)["absorbed"] == 0.5
    assert one(None, p, 2 * u)["absorbed"] == 0


def test_rounding_is_that_of_the_parameter_and_not_of_the_update():
    p, u = np.ones(4, ml_dtypes.bfloat16), np.full(4, 1e-3, np.float32)
    assert one(None, p, u)["absorbed"] == 1
    assert one(None, p.astype(np.float32), u)["absorbed"] == 0


def test_zero_updates_are_not_absorbed_and_zero_parameters_absorb_nothing():
    p, u = np.array([1, 1, 0, 0], np.float32), np.array([0, 1e-9, 1e-9, 0], np.float32)
    assert one(None, p, u)["absorbed"] == 0.25


# --- layouts ------------------------------------------------------------------------------------------------


def test_rows_of_the_stack_come_in_the_order_of_their_paths():
    layout = Layout(
        [
            Slot(("a", "kernel"), (2, 3), "float32"),
            Slot(("b", "kernel"), (2, 3), "float32", 0),
            Slot(("c",), (2, 3), "float32", 1),
        ]
    )
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    found = layout.unpack(measure(layout, [x, 10 * x, 100 * x]), stack=True)
    assert found.grad_max.tolist() == [30, 60, 400, 500, 600]
    names = {("a", "kernel"): "a.kernel", ("b", "kernel"): "b.kernel", ("c",): "c"}
    assert layout.stack_paths(names) == ["b.kernel[0]", "b.kernel[1]", "c[0]", "c[1]", "c[2]"]


def test_a_layout_without_stacked_leaves_has_no_stack():
    layout = layout_of("float32", [((3,), None)])
    assert layout.unpack(measure(layout, [np.ones(3, np.float32)]), stack=True) is None
    assert layout.stack_paths({("p0",): "p"}) == []


def test_a_layout_of_no_leaves_has_no_words():
    layout = Layout([])
    assert layout.words == 0 and np.asarray(layout.measure([], [], [])).shape == (0,)
    assert layout.unpack(np.zeros(0, np.uint32)).grad_norm.shape == (0,)


def test_equal_layouts_share_one_compilation():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def traced(layout, grads):
        traces.append(layout)
        return layout.measure(grads)

    grads = [jnp.ones((2, 3))]
    for axis in (0, 0, 1, 0):
        traced(layout_of("float32", [((2, 3), axis)]), grads)
    assert [layout.slots[0].axis for layout in traces] == [0, 1]


def test_a_layout_fits_arrays_of_its_shapes_only():
    layout = layout_of("float32", [((3,), None), ((2, 3), 0)])
    assert layout.fits([np.ones(3), np.ones((2, 3))])
    assert not layout.fits([np.ones(3)])
    assert not layout.fits([np.ones(3), np.ones((3, 2))])
    assert not layout.fits([np.ones(3), 1.0])


# --- complex and double precision ---------------------------------------------------------------------------


def test_a_complex_parameter_that_is_turned_has_moved():
    p, u = np.array([1, 1], np.complex64), np.array([-1 + 1j, -1 - 1j], np.complex64)
    assert one(None, p, u)["absorbed"] == 0


def test_every_normal_float64_counts_as_other_than_zero():
    with jax.enable_x64(True):
        assert one(np.array([1e-305, 1.0]), None, None)["grad_zeros"] == 0


ALIKE = [
    ((7,), None),
    ((150, 120), None),  # beyond what is stacked: a loop, where there are enough of them
    ((2, 3), None),
    ((7,), None),
    ((150, 120), None),
    ((4, 90, 60), 0),
    ((7,), None),
    ((150, 120), None),
    ((4, 90, 60), 0),
    ((90, 4, 60), 1),
    ((4, 90, 60), 0),
    ((2, 3), None),
    ((0,), None),
    ((0,), None),
]


@pytest.mark.parametrize(("param", "flowing"), PAIRS)
@pytest.mark.parametrize("spoiled", [False, True])
def test_leaves_that_are_alike_are_measured_together_as_one_by_one(param, flowing, spoiled):
    rng = np.random.default_rng(3)
    slots = [Slot((f"p{i}",), shape, param, axis) for i, (shape, axis) in enumerate(ALIKE)]

    def arrays(dtype, size):
        found = [np.asarray(rng.normal(size=shape) * size * 2.0**i) for i, (shape, _) in enumerate(ALIKE)]
        for i, x in enumerate(found):
            x.reshape(-1)[: i + 1] = 0
            if spoiled and x.size and i % 3 == 1:
                x.reshape(-1)[i : 2 * i] = np.nan if i % 2 else np.inf
        return [jnp.asarray(x, dtype) for x in found]

    grads, params, updates = arrays(flowing, 1e-3), arrays(param, 1.0), arrays(flowing, 1e-4)
    together, apart = Layout(slots), Layout(slots, together=False)
    for chosen in [(grads, params, updates), (grads, None, None), (None, params, updates)]:
        one = jax.jit(together.measure)(*chosen)
        other = jax.jit(apart.measure)(*chosen)
        for stack in (False, True):
            a, b = together.unpack(np.asarray(one), stack=stack), apart.unpack(np.asarray(other), stack=stack)
            for name in NAMES:
                exact = name in COUNTS or name in {"grad_max", "update_max", "grad_zeros", "absorbed"}
                close = 0 if exact else 2e-6
                np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=close, atol=close, err_msg=name)


def test_many_leaves_take_few_instructions():
    def instructions(n):
        layout = Layout([Slot((i,), (8,), "float32") for i in range(n)])
        xs = [jnp.ones((8,))] * n
        return str(jax.make_jaxpr(lambda xs: layout.measure(xs, xs, xs))(xs)).count("reduce_max")

    assert instructions(50) == instructions(2)
