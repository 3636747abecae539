"""`step_stats`: what a step can return of itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Net
from flax import nnx

import nnx_probes as probes
from nnx_probes.errors import ArgumentError, ArgumentTypeError


def trees():
    model = Net(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    return model, params, grads, jax.tree.map(lambda g: -0.1 * g, grads)


def plain(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(nnx.as_pure(tree))]


def test_statistics_are_those_of_numpy_inside_a_compiled_step():
    _, params, grads, updates = trees()
    found = jax.jit(lambda g, u, p: probes.step_stats(grads=g, updates=u, params=p, loss=3.0))(grads, updates, params)
    assert all(name.startswith("probes/") for name in found) and float(found["probes/loss"]) == 3.0
    g, u, p = plain(grads), plain(updates), plain(params)
    norms = {name: [np.linalg.norm(x) for x in xs] for name, xs in (("grads", g), ("updates", u), ("params", p))}
    for name, expected in norms.items():
        np.testing.assert_allclose(found[f"probes/{name}_norm"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["probes/grads_max_abs"], [np.abs(x).max() for x in g], rtol=1e-6)
    assert not np.any(found["probes/grads_nonfinite"]) and found["probes/grads_nonfinite"].dtype == jnp.int32
    np.testing.assert_allclose(found["probes/grads_zeros"], 0)
    bias = np.array(norms["params"]) == 0
    assert np.isnan(np.asarray(found["probes/update_ratio"])[bias]).all()
    np.testing.assert_allclose(found["probes/absorbed"], 0)


def test_a_state_a_module_and_a_dict_give_the_same():
    model, params, _, _ = trees()
    of_state = probes.step_stats(params=params)["probes/params_norm"]
    for tree in (model, nnx.to_pure_dict(params)):
        np.testing.assert_array_equal(probes.step_stats(params=tree)["probes/params_norm"], of_state)


def test_only_what_the_arguments_tell_is_returned():
    _, _, grads, updates = trees()
    assert set(probes.step_stats(grads=grads)) == {
        f"probes/grads_{name}" for name in ("norm", "max_abs", "nonfinite", "zeros")
    }
    assert "probes/absorbed" not in probes.step_stats(grads=grads, updates=updates)


def test_arguments_that_cannot_work_are_refused():
    _, params, grads, _ = trees()
    with pytest.raises(ArgumentTypeError, match="got nothing"):
        probes.step_stats()
    with pytest.raises(ArgumentTypeError, match="expected a pytree of arrays"):
        probes.step_stats(grads={"a": "text"})
    with pytest.raises(ArgumentError, match="expected the same structure"):
        probes.step_stats(grads=jax.tree.leaves(grads)[:2], params=params)
