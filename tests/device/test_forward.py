"""One measured forward pass, against the same pass by hand in NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Net
from flax import nnx

from nnx_probes.device.forward import Forward, read_places


def call(model, batch):
    return model(batch)


def batch(rows=5, features=3, dtype=np.float32):
    return np.random.default_rng(0).normal(size=(rows, features)).astype(dtype)


class Measured:
    """What one pass found, by path."""

    def __init__(self, places, packed):
        numbers, alive = read_places(places, np.asarray(packed))
        self.places = {place.path: place for place in places}
        self.paths = [place.path for place in places]
        assert len(self.places) == len(places)
        self.rows = {
            path: {name: float(x[i]) for name, x in numbers.items()} | {"alive": alive[i]}
            for i, path in enumerate(self.paths)
        }
        assert all(x.dtype == np.float32 and x.shape == (len(places),) for x in numbers.values())

    def __getitem__(self, path):
        return self.rows[path]


def measured(model, x, forward=call, kept=None):
    return Measured(*Forward(forward).enqueue(model, x, kept))


def agree(row, x, *, rtol=1e-5):
    """One place against the array that it should have seen."""
    x = np.asarray(x, np.float64)
    np.testing.assert_allclose(row["rms"], np.sqrt(np.mean(x * x)), rtol=rtol, atol=1e-7)
    np.testing.assert_allclose(row["max_abs"], np.max(np.abs(x)), rtol=rtol, atol=1e-7)
    assert row["nonfinite"] == np.sum(~np.isfinite(x))
    if x.ndim >= 2:
        np.testing.assert_array_equal(row["alive"], (x != 0).any(tuple(range(x.ndim - 1))))
    else:
        assert row["alive"] is None


def linear(layer, x):
    return np.asarray(x, np.float64) @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...])


def relu(x):
    return np.maximum(x, 0)


def bits(model):
    """Every array of a model as bytes, and the arrays themselves."""
    arrays = jax.tree.leaves(nnx.as_pure(nnx.state(model)))
    raw = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]
    return [np.asarray(x).tobytes() for x in raw], arrays


class Block(nnx.Module):
    """In training mode: batch statistics and random numbers."""

    def __init__(self, rngs):
        self.lin = nnx.Linear(3, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(nnx.relu(self.bn(self.lin(x))))


class Backwards(nnx.Module):
    """Its modules run in the opposite order of their names."""

    def __init__(self, rngs):
        self.zz = nnx.Linear(3, 3, rngs=rngs)
        self.mm = nnx.Linear(3, 3, rngs=rngs)
        self.aa = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.aa(self.mm(self.zz(x)))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(3, 3, rngs=rngs)
        self.out = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return x + self.out(nnx.relu(self.lin(x)))


class Scanned(nnx.Module):
    """A stack of 4 layers made by vmap and run by scan."""

    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(Layer, in_axes=0, out_axes=0))(rngs)
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.layers))


class Wrapped(nnx.Module):
    """Runs `inner` through a transformation."""

    def __init__(self, inner, transform):
        self.inner = inner
        self.transform = nnx.static(transform)

    def __call__(self, x):
        return self.transform(call)(self.inner, x)


class Same(nnx.Module):
    def __call__(self, x):
        return x


class Apply(nnx.Module):
    """A function of what a Linear with the unit matrix returns: of the batch itself."""

    def __init__(self, function, features=3):
        self.lin = nnx.Linear(features, features, rngs=nnx.Rngs(0))
        self.lin.kernel[...] = jnp.eye(features)
        self.function = nnx.static(function)

    def __call__(self, x):
        return self.function(self.lin(x))


# --- values -------------------------------------------------------------------------------------------------


def test_every_place_of_a_perceptron_has_the_values_of_numpy():
    model, x = Net(nnx.Rngs(0)), batch()
    found = measured(model, x)
    hidden = linear(model.a, x)
    assert found.paths == ["a", "a > relu", "b", "model"]
    agree(found["a"], hidden)
    agree(found["a > relu"], relu(hidden))
    agree(found["b"], linear(model.b, relu(hidden)))
    assert found["model"] | {"alive": None} == pytest.approx(found["b"] | {"alive": None}, nan_ok=True)
    assert [found.places[path].shape for path in found.paths] == [(5, 4), (5, 4), (5, 2), (5, 2)]
    assert [found.places[path].function for path in found.paths] == ["", "relu", "", ""]
    assert [found.places[path].units for path in found.paths] == [4, 4, 2, 2]


def test_batch_norm_and_dropout_are_measured_as_in_training():
    model, x = Block(nnx.Rngs(0)), batch()
    model.bn.scale[...], model.bn.bias[...] = jnp.array([1.0, 2, 3, 4]), jnp.array([0.5, -0.5, 0, -9])
    mask = np.asarray(nnx.clone(model.drop)(jnp.ones((5, 4))))  # 0 or 2
    found = measured(model, x)
    before = linear(model.lin, x)
    after = (before - before.mean(0)) / np.sqrt(before.var(0) + 1e-5) * [1, 2, 3, 4] + [0.5, -0.5, 0, -9]
    assert found.paths == ["lin", "bn", "bn > relu", "drop", "model"]
    agree(found["lin"], before)
    agree(found["bn"], after, rtol=1e-4)
    agree(found["bn > relu"], relu(after), rtol=1e-4)
    agree(found["drop"], relu(after) * mask, rtol=1e-4)
    assert 0 < np.sum(mask == 0) < mask.size and not found["bn > relu"]["alive"][3]


def test_evaluation_mode_is_measured_as_such():
    model, x = Block(nnx.Rngs(0)), batch()
    model.eval()
    found = measured(model, x)
    normal = linear(model.lin, x) / np.sqrt(1 + 1e-5)
    agree(found["bn"], normal)
    agree(found["drop"], relu(normal))


@pytest.mark.parametrize(
    ("function", "name", "low", "high"),
    [(jnp.tanh, "tanh", -0.98, 0.98), (nnx.sigmoid, "logistic", 0.01, 0.99), (nnx.hard_tanh, "hard_tanh", -0.98, 0.98)],
)
def test_what_lies_within_a_hundredth_of_an_end_is_saturated(function, name, low, high):
    x = np.random.default_rng(0).normal(size=(50, 3), scale=4).astype(np.float32)
    found = measured(Apply(function), x)
    y = np.asarray(function(x), np.float64)
    share = np.mean((y < low) | (y > high))
    assert 0.1 < share < 0.9
    agree(found[f"lin > {name}"], y)
    assert found[f"lin > {name}"]["saturated"] == pytest.approx(share, abs=1e-6)


def test_both_ends_count_as_saturated_and_the_middle_does_not():
    found = measured(Apply(jnp.tanh, 4), np.array([[-9, 9, 0.5, 2.2]], np.float32))  # tanh(2.2) is 0.976
    assert found["lin > tanh"]["saturated"] == 0.5


def test_only_functions_with_two_ends_can_saturate():
    found = measured(Net(nnx.Rngs(0)), batch())
    assert all(np.isnan(found[path]["saturated"]) for path in found.paths)


def test_a_scanned_stack_is_one_stacked_output():
    model, x = Scanned(nnx.Rngs(0)), batch()
    found = measured(model, x)
    lins, outs, layers, now = [], [], [], x
    for i in range(4):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], nnx.state(model.layers))
        lins.append(np.asarray(now) @ np.asarray(layer["lin"]["kernel"][...]) + np.asarray(layer["lin"]["bias"][...]))
        outs.append(relu(lins[-1]) @ np.asarray(layer["out"]["kernel"][...]) + np.asarray(layer["out"]["bias"][...]))
        now = now + outs[-1]
        layers.append(now)
    assert set(found.paths) == {"layers.lin", "layers.out", "layers", "head", "model"}
    assert [found.places[p].shape for p in ("layers.lin", "layers.out", "layers")] == 3 * [(4, 5, 3)]
    for path, parts in (("layers.lin", lins), ("layers.out", outs), ("layers", layers)):
        agree(found[path], np.stack(parts), rtol=1e-4)
    agree(found["head"], linear(model.head, now), rtol=1e-4)


@pytest.mark.parametrize(
    ("value", "dtype"), [(300, "float16"), (1e-4, "float16"), (1e30, "float32"), (2e38, "bfloat16"), (1e-30, "float32")]
)
def test_neither_large_nor_small_numbers_spoil_the_root_mean_square(value, dtype):
    x = np.full((4, 3), value, dtype)
    row = measured(Same(), x)["model"]
    assert row["rms"] == pytest.approx(float(x[0, 0]), rel=1e-5) and row["max_abs"] == float(x[0, 0])
    assert row["nonfinite"] == 0


def test_an_output_of_no_elements_is_all_zero():
    row = measured(Same(), np.zeros((0, 3), np.float32))["model"]
    assert row["rms"] == row["max_abs"] == row["nonfinite"] == 0 and not row["alive"].any()


# --- which places there are -----------------------------------------------------------------------------------


def test_places_come_in_the_order_of_computation_and_not_of_names():
    assert measured(Backwards(nnx.Rngs(0)), batch()).paths == ["zz", "mm", "aa", "model"]


def test_inner_modules_come_before_the_one_that_returns_their_output():
    class Outer(nnx.Module):
        def __init__(self):
            self.a = nnx.Sequential(nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0))))

        def __call__(self, x):
            return self.a(x)

    paths = ["a.layers.0.layers.0", "a.layers.0", "a", "model"]
    assert measured(Outer(), batch()).paths == paths


def test_a_module_called_twice_has_two_places():
    lin = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    x = batch()
    found = measured(nnx.Sequential(lin, nnx.relu, lin, nnx.relu), x)
    paths = ["layers.0", "layers.0 > relu", "layers.0#2", "layers.0 > relu#2", "model"]
    assert found.paths == paths
    once = relu(linear(lin, x))
    agree(found["layers.0 > relu"], once)
    agree(found["layers.0 > relu#2"], relu(linear(lin, once)))


def test_every_output_of_a_module_has_its_place_and_integers_have_none():
    class Several(nnx.Module):
        def __call__(self, x):
            return {"twice": 2 * x, "sum": x.sum(), "where": jnp.argmax(x), "pair": (x[:, 0], -x)}

    x = batch()
    found = measured(Several(), x)
    assert sorted(place.shape for place in found.places.values()) == [(), (5,), (5, 3), (5, 3)]
    rows = {place.shape: found[path] for path, place in found.places.items()}
    agree(rows[()], x.sum())
    agree(rows[5,], x[:, 0])


def test_other_methods_are_named():
    class Coder(nnx.Module):
        def __init__(self):
            self.lin = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def encode(self, x):
            return self.lin(x)

    model, x = Coder(), batch()
    found = measured(model, x, lambda model, x: model.encode(x))
    assert found.paths == ["lin", "model.encode()"]
    agree(found["model.encode()"], linear(model.lin, x))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (nnx.relu, "relu"),
        (nnx.relu6, "relu6"),
        (lambda x: jnp.maximum(x, 0), "max(x, 0)"),
        (nnx.sigmoid, "logistic"),
        (nnx.tanh, "tanh"),
        (nnx.silu, "silu"),
        (nnx.elu, "elu"),
        (nnx.leaky_relu, "leaky_relu"),
        (nnx.softplus, "softplus"),
    ],
)
def test_activation_functions_are_named_and_measured(function, name):
    x = batch()
    found = measured(Apply(function), x)
    assert found.paths == ["lin", f"lin > {name}", "model"]
    agree(found[f"lin > {name}"], function(x))
    assert found.places[f"lin > {name}"].function == name


@pytest.mark.parametrize("function", [nnx.gelu, lambda x: x + 1, jnp.exp, lambda x: jnp.maximum(x, 1)])
def test_what_is_no_activation_function_by_itself_has_no_place(function):
    assert measured(Apply(function), batch()).paths == ["lin", "model"]


def test_a_function_before_any_module_is_one_of_the_input():
    x = batch()
    found = measured(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), x, lambda model, x: model(nnx.relu(x)))
    assert found.paths == ["input > relu", "model"]
    agree(found["input > relu"], relu(x))


def test_a_pass_that_calls_no_module_has_no_places():
    assert measured(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), batch(), lambda model, x: x + 1).paths == []


def test_batches_may_be_any_tree():
    model, x = Net(nnx.Rngs(0)), batch()
    forward = lambda model, b: model(b["x"][0] * b["scale"])  # noqa: E731
    found = measured(model, {"x": (x, np.arange(5)), "scale": 2.0}, forward)
    agree(found["a"], linear(model.a, 2 * x))


# --- who is alive -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [1, 7, 8, 9, 17])
def test_a_unit_is_alive_if_it_is_other_than_zero_on_any_sample(features):
    x = -np.ones((3, features), np.float32)
    x[2, ::2] = 1e-3  # on one sample only
    found = measured(Apply(nnx.relu, features), x)
    assert found["lin > relu"]["alive"].tolist() == [i % 2 == 0 for i in range(features)]
    assert found["lin"]["alive"].all() and found["lin"]["alive"].dtype == np.bool_


def test_a_unit_that_is_nan_is_not_taken_for_dead():
    x = np.zeros((3, 3), np.float32)
    x[1, 2] = np.nan
    assert measured(Same(), x)["model"]["alive"].tolist() == [False, False, True]


def test_masks_of_many_places_do_not_run_into_each_other():
    widths = (8, 16, 9, 3)
    layers = [nnx.Linear(i, o, rngs=nnx.Rngs(0)) for i, o in zip((3, *widths), widths, strict=False)]
    for i, layer in enumerate(layers):
        layer.kernel[...] = layer.kernel[...].at[:, i].set(0)
    found = measured(nnx.Sequential(*layers[:3], nnx.relu, layers[3]), batch())
    for i, path in enumerate(("layers.0", "layers.1", "layers.2", "layers.4")):
        assert found[path]["alive"].tolist() == [unit != i for unit in range(widths[i])]


# --- what is not finite -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_place_that_is_not_finite_is_where_it_began(bad):
    model = nnx.Sequential(*[nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(4)])
    model.layers[2].bias[...] = jnp.array([0.0, bad, 0.0])
    found = measured(model, batch())
    first = next(path for path in found.paths if found[path]["nonfinite"])
    assert first == "layers.2" and found[first]["nonfinite"] == 5 and not np.isfinite(found["layers.3"]["rms"])
    assert found["layers.1"]["nonfinite"] == 0 and np.isfinite(found["layers.1"]["rms"])
    assert found["layers.3"]["nonfinite"] == 15


def test_an_activation_function_can_be_where_it_began():
    found = measured(Apply(lambda x: nnx.softplus(x) * np.float32(np.inf)), batch())
    assert [found[path]["nonfinite"] for path in ("lin", "lin > softplus", "model")] == [0, 0, 15]


# --- nothing of the model changes -------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_a_pass_leaves_every_variable_as_it_is(kept):
    model = Block(nnx.Rngs(0))
    model(batch())  # statistics and counts other than at the start
    forward = Forward(call)
    before, arrays = bits(model)
    graph = nnx.graphdef(model)
    for _ in range(2):
        forward.enqueue(model, batch(), forward.keep(model) if kept else None)
    after, same = bits(model)
    assert before == after and all(x is y for x, y in zip(arrays, same, strict=True))
    assert nnx.graphdef(model) == graph
    assert not any(isinstance(v, nnx.Intermediate) for _, v in nnx.iter_graph(model))


def test_two_passes_over_the_same_model_are_bit_identical():
    model, forward = Block(nnx.Rngs(0)), Forward(call)
    (places, first), (again, second) = forward.enqueue(model, batch()), forward.enqueue(model, batch())
    assert places == again
    np.testing.assert_array_equal(first, second)


def test_the_random_numbers_are_those_that_the_step_would_draw():
    model, x = Block(nnx.Rngs(0)), batch()
    found = measured(model, x)
    agree(found["model"], model(x))  # draws now: the pass drew nothing
    agree(measured(model, x)["model"], nnx.clone(model)(x))


# --- compilation ----------------------------------------------------------------------------------------------


def counting():
    """A forward function and the list of its calls."""
    calls = []

    def forward(model, batch):
        calls.append(batch)
        return model(batch)

    return forward, calls


def test_the_same_structure_is_traced_once_whatever_the_objects_and_the_values():
    counted, calls = counting()
    forward = Forward(counted)
    forward.enqueue(Net(nnx.Rngs(0)), batch())
    once = len(calls)
    model, x = Net(nnx.Rngs(1)), 2 * batch()
    found = Measured(*forward.enqueue(model, x))
    found = Measured(*forward.enqueue(model, x, forward.keep(model)))
    assert len(calls) == once > 0
    agree(found["a"], linear(model.a, x))


def test_every_structure_keeps_its_own_places():
    counted, calls = counting()
    forward = Forward(counted)
    nets = {
        "narrow": nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
        "deep": Backwards(nnx.Rngs(0)),
        "block": Block(nnx.Rngs(0)),
    }
    batches = {rows: batch(rows) for rows in (5, 2)}
    first = {(n, r): forward.enqueue(model, x) for n, model in nets.items() for r, x in batches.items()}
    once = len(calls)
    for (name, rows), (places, packed) in reversed(first.items()):
        again, same = forward.enqueue(nets[name], batches[rows])
        assert again == places and places[-1].shape[0] == rows
        np.testing.assert_array_equal(packed, same)
    assert len(calls) == once


def test_training_and_evaluation_mode_are_two_structures():
    model, forward, x = Block(nnx.Rngs(0)), Forward(call), batch()
    found = []
    for mode in (model.train, model.eval, model.train, model.eval):
        mode()
        found.append(Measured(*forward.enqueue(model, x))["model"]["rms"])
    assert found[0] == found[2] != found[1] == found[3]


# --- kept copies ----------------------------------------------------------------------------------------------


def test_kept_copies_outlive_the_deletion_of_the_live_arrays():
    model, x = Net(nnx.Rngs(0)), batch()
    forward = Forward(call)
    kept = forward.keep(model)
    expected = linear(model.a, x)
    for array in jax.tree.leaves(nnx.as_pure(nnx.state(model))):
        array.delete()
    agree(Measured(*forward.enqueue(model, x, kept))["a"], expected)


def test_kept_copies_are_of_before_a_step_that_donates_the_model():
    model, x = Block(nnx.Rngs(0)), batch()
    forward = Forward(call)
    before, old = forward.enqueue(model, x)[1], jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param)))
    kept = forward.keep(model)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x + 1 if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    nnx.update(model, step(nnx.state(model, nnx.Param)))
    assert all(x.is_deleted() for x in old)
    np.testing.assert_array_equal(before, forward.enqueue(model, x, kept)[1])
    assert not np.array_equal(before, forward.enqueue(model, x)[1])


def test_kept_copies_share_no_buffer_with_the_model():
    model = Block(nnx.Rngs(0))
    _, pure = Forward(call).keep(model)
    live = jax.tree.leaves(nnx.as_pure(nnx.state(model)))
    copies = jax.tree.leaves(pure)
    assert len(copies) == len(live)
    plain = [(a, b) for a, b in zip(copies, live, strict=True) if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key)]
    assert all(a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer() for a, b in plain) and len(plain) > 4


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_places_inside_a_transformation_come_in_the_order_of_computation(transform):
    found = measured(Wrapped(Backwards(nnx.Rngs(0)), transform), batch())
    assert found.paths == ["inner.zz", "inner.mm", "inner.aa", "inner", "model"]


def test_places_inside_a_scan_come_in_the_order_of_computation():
    assert measured(Scanned(nnx.Rngs(0)), batch()).paths == ["layers.lin", "layers.out", "layers", "head", "model"]


def test_a_module_called_model_is_an_inner_one():
    class Wrapper(nnx.Module):
        def __init__(self):
            self.model = Backwards(nnx.Rngs(0))

        def __call__(self, x):
            return self.model(x)

    paths = measured(Wrapper(), batch()).paths
    assert paths[:3] == ["model.zz", "model.mm", "model.aa"] and len(paths) == 5


def test_a_float64_batch_gets_the_places_of_the_program_that_runs():
    forward, x = Forward(call), batch()
    narrow, deep = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), Backwards(nnx.Rngs(0))
    forward.enqueue(narrow, x)
    forward.enqueue(deep, x)
    places, _ = forward.enqueue(narrow, x.astype(np.float64))
    assert [place.path for place in places] == ["model"]


@pytest.mark.parametrize("jit", [nnx.jit, jax.jit])
def test_a_forward_that_is_jitted_already_shows_its_activation_functions(jit):
    def forward(model, x):
        return nnx.relu(model(x))

    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), batch()
    jitted, plain = (Forward(f).enqueue(model, x) for f in (jit(forward), forward))
    assert [place.path for place in jitted[0]] == ["model", "model > relu"] == [place.path for place in plain[0]]
    np.testing.assert_array_equal(jitted[1], plain[1])
