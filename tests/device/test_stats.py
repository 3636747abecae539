"""`step_stats` against NumPy, inside compiled steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Net, mse
from flax import nnx

from nnx_probes.device.stats import PREFIX, step_stats
from nnx_probes.errors import ArgumentError, ArgumentTypeError

GRADS = {"grads_norm", "grads_max_abs", "grads_nonfinite", "grads_zeros"}
UPDATES = {"updates_norm", "updates_max_abs", "updates_nonfinite"}
PARAMS = {"params_norm"}
BOTH = {"update_ratio", "absorbed"}


def stats(**given):
    return {name.removeprefix(PREFIX): np.asarray(x) for name, x in jax.jit(step_stats)(**given).items()}


def trees():
    rng = np.random.default_rng(0)
    shapes = {"w": (3, 4), "b": (4,), "inner": [(), (2, 2)]}
    p, g, u = (
        jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))
        for _ in range(3)
    )
    g["b"][1:3] = 0
    g["w"][1, 1] = np.inf
    u["w"][0] *= 1e-9  # absorbed
    u["b"][:] = 0
    return p, g, u


def expected(p, g, u):
    leaves = [[np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (p, g, u)]
    after = jax.tree.leaves(optax.apply_updates(jax.tree.map(jnp.asarray, p), jax.tree.map(jnp.asarray, u)))
    p, g, u = leaves
    norms = {name: np.array([np.sqrt(np.sum(x * x)) for x in xs]) for name, xs in (("p", p), ("g", g), ("u", u))}
    return {
        "grads_norm": norms["g"],
        "grads_max_abs": [np.max(np.abs(x)) for x in g],
        "grads_nonfinite": [np.sum(~np.isfinite(x)) for x in g],
        "grads_zeros": [np.mean(x == 0) for x in g],
        "updates_norm": norms["u"],
        "updates_max_abs": [np.max(np.abs(x)) for x in u],
        "updates_nonfinite": [np.sum(~np.isfinite(x)) for x in u],
        "params_norm": norms["p"],
        "update_ratio": norms["u"] / norms["p"],
        "absorbed": [np.mean((v != 0) & (np.asarray(a) == x)) for x, v, a in zip(p, u, after, strict=True)],
    }


def test_every_value_is_that_of_numpy_in_the_order_of_the_leaves():
    p, g, u = trees()
    found, want = stats(params=p, grads=g, updates=u), expected(p, g, u)
    assert found.keys() == want.keys()
    for name, x in found.items():
        assert x.dtype == (np.int32 if name.endswith("nonfinite") else np.float32) and x.shape == (4,)
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert want["grads_nonfinite"][-1] == 1 and want["absorbed"][-1] >= 1 / 3 and want["grads_zeros"][0] == 0.5


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("g", GRADS),
        ("u", UPDATES),
        ("p", PARAMS),
        ("gu", GRADS | UPDATES),
        ("gp", GRADS | PARAMS),
        ("pu", PARAMS | UPDATES | BOTH),
    ],
)
def test_what_is_returned_is_what_the_arguments_tell(given, names):
    p, g, u = trees()
    arguments = {"g": ("grads", g), "u": ("updates", u), "p": ("params", p)}
    found, want = stats(**dict(arguments[letter] for letter in given)), expected(p, g, u)
    assert found.keys() == names
    for name, x in found.items():
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("loss", [2.5, np.float64(2.5), np.array([[2.5]], np.float16), jnp.bfloat16(2.5)])
def test_the_loss_is_one_float32(loss):
    found = step_stats(loss=loss)
    assert list(found) == ["probes/loss"]
    assert (
        found["probes/loss"].dtype == jnp.float32 and found["probes/loss"].shape == () and found["probes/loss"] == 2.5
    )


def test_states_modules_and_dicts_give_the_same():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    forms = [model, state, nnx.to_pure_dict(state), nnx.state(model, nnx.Param), {"x": list(jax.tree.leaves(state))}]
    found = [stats(params=form, updates=form) for form in forms]
    for other in found:
        assert other["params_norm"].shape == (2,)
        jax.tree.map(np.testing.assert_array_equal, other, found[0])
    assert found[0]["params_norm"][1] == pytest.approx(np.linalg.norm(model.kernel[...]), rel=1e-6)


def test_arguments_of_different_types_go_together():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    pure = nnx.to_pure_dict(nnx.state(model))
    found = stats(params=model, grads=nnx.state(model), updates=pure)
    assert found.keys() == GRADS | UPDATES | PARAMS | BOTH
    np.testing.assert_array_equal(found["grads_norm"], found["params_norm"])


def test_a_compiled_step_returns_the_statistics_of_the_step_it_took():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(mse)(model, batch)
        params = nnx.state(model, nnx.Param)
        updates = jax.tree.map(lambda g: -0.5 * g, grads)
        found = step_stats(grads=grads, updates=updates, params=params, loss=loss)
        optimizer.update(model, grads)
        return loss, found

    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    before = [np.asarray(p, np.float64) for p in jax.tree.leaves(nnx.state(model, nnx.Param))]
    loss, found = step(model, optimizer, (x, x[:, :2]))
    after = [np.asarray(p, np.float64) for p in jax.tree.leaves(nnx.state(model, nnx.Param))]
    moved = [np.linalg.norm(b - a) for a, b in zip(before, after, strict=True)]
    assert found["probes/loss"] == loss
    np.testing.assert_allclose(found["probes/params_norm"], [np.linalg.norm(p) for p in before], rtol=1e-5)
    np.testing.assert_allclose(found["probes/updates_norm"], moved, rtol=1e-4)
    np.testing.assert_allclose(found["probes/grads_norm"], 2 * found["probes/updates_norm"], rtol=1e-5)


def test_a_parameter_that_is_all_zero_has_no_ratio():
    found = step_stats(params={"b": np.zeros(3)}, updates={"b": np.ones(3)})
    assert np.isnan(found["probes/update_ratio"]).all()


# --- bad input ----------------------------------------------------------------------------------------------


def test_nothing_given_is_an_error_that_says_what_was_expected():
    with pytest.raises(
        ArgumentTypeError, match=r"step_stats\(\) got nothing: expected grads=, updates=, params= or loss="
    ):
        step_stats()


@pytest.mark.parametrize("name", ["grads", "updates", "params"])
@pytest.mark.parametrize(
    ("value", "kind"), [({}, "dict"), (1.5, "float"), ({"a": 1.0}, "dict"), ([np.ones(2), 3], "list"), ("w", "str")]
)
def test_what_holds_no_arrays_is_named_with_its_type(name, value, kind):
    with pytest.raises(ArgumentTypeError, match=rf"step_stats\({name}={kind}\): expected a pytree of arrays"):
        step_stats(**{name: value})


@pytest.mark.parametrize(
    "params", [{"a": np.ones(3)}, {"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones((2, 1))}, {"a": np.ones(())}]
)
def test_arguments_of_other_shapes_are_an_error_that_shows_both(params):
    shape = r"\(2,\)"
    with pytest.raises(ArgumentError, match=rf"params has leaves of shapes .*, grads of \[{shape}\].* same structure"):
        step_stats(grads={"a": np.ones(2)}, params=params)


def test_the_error_about_shapes_says_what_to_pass():
    model = Net(nnx.Rngs(0))
    grads = {"a": np.ones(2)}
    with pytest.raises(ArgumentError, match=r"for example nnx.state\(model, nnx.Param\)"):
        step_stats(grads=grads, params=model)


def test_a_module_with_typed_keys_has_one_row_a_leaf():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    found = step_stats(params=model)
    assert found["probes/params_norm"].shape == (len(jax.tree.leaves(nnx.as_pure(nnx.state(model)))),)


def test_arguments_with_other_names_are_an_error():
    with pytest.raises(ArgumentError):
        step_stats(grads={"a": np.ones(2)}, params={"b": np.ones(2)})
