"""Asking the optimizer: what would a gradient of ones do, now and at other schedule counts?

Run on copies, only when parameters stand still and somebody has to say why. It tells a learning rate of 0 from
updates that rounding absorbs, and both from a gradient that never arrives.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from nnx_probes.device.leaves import Leaf

__all__ = ["try_update"]

_LATER = (2, 4, 16, 64)
_EARLIER = (0.0, 0.25, 0.5, 0.75)
_LEAST_COUNT = 16


def try_update(
    optimizer: Any, model: Any, leaves: tuple[Leaf, ...], *, count: float | None = None
) -> dict[str, Any] | None:
    """Returns what a gradient of ones would change, or None where the question cannot be asked.

    It cannot be asked of an optimizer that is no ``nnx.Optimizer``, under ``optax.MultiSteps`` (most calls change
    nothing by design), of transformations that need more arguments, or with several processes (they may not ask
    at the same moment, and the program would wait for all of them).

    Args:
      optimizer: the live optimizer.
      model: the live model.
      leaves: the model's leaves, the rows of the result.
      count: the schedule count after the step in question, None for the present one.

    Returns:
      ``"params.trial_update"``: float32[n_leaves], largest magnitude of the update, NaN where not trained;
      ``"params.trial_absorbed"``: float32[n_leaves], share of elements with u != 0 and p + u == p;
      ``"trial.later"``, ``"trial.earlier"``: largest update at later and earlier counts.

    Cost: one compilation, then 9 optimizer updates; waits for them. Nothing of the caller's is changed.
    """
    if not isinstance(optimizer, nnx.Optimizer) or jax.process_count() > 1:
        return None
    state = nnx.as_pure(optimizer.opt_state)
    if any(_name(path) == "mini_step" for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]):
        return None
    params = nnx.state(model, optimizer.wrt)
    paths = [path for path, _ in nnx.to_flat_state(params)]
    pure = nnx.as_pure(params)
    if not paths:
        return None
    if count is None:
        flat = jax.tree_util.tree_flatten_with_path(state)[0]
        own = [int(np.max(np.asarray(jax.device_get(x)), initial=0)) for path, x in flat if _name(path) == "count"]
        count = max(own, default=0)
    count = max(int(count) - 1, 0)  # the count that the step's own update used

    def ask(at: float) -> tuple[np.ndarray, np.ndarray]:
        update, absorbed = _program(optimizer.tx, pure, state, jax.device_put(np.int32(min(at, 2**31 - 1))))
        return np.asarray(jax.device_get(update)), np.asarray(jax.device_get(absorbed))

    update, absorbed = ask(count)
    later = max(float(np.max(ask(max(count, _LEAST_COUNT) * factor)[0])) for factor in _LATER)
    earlier = max(float(np.max(ask(int(count * share))[0])) for share in _EARLIER)
    rows = {tuple(path): i for i, path in enumerate(paths)}
    at = [rows.get(leaf.parts, -1) for leaf in leaves]
    return {
        "params.trial_update": np.array([update[i] if i >= 0 else np.nan for i in at], np.float32),
        "params.trial_absorbed": np.array([absorbed[i] if i >= 0 else np.nan for i in at], np.float32),
        "trial.later": later,
        "trial.earlier": earlier,
    }


def _step(tx: Any, params: Any, state: Any, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    def at_count(path: Any, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(count, x.shape).astype(x.dtype) if _name(path) == "count" else x

    state = jax.tree_util.tree_map_with_path(at_count, state)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(ones, state, params)
    moved = optax.apply_updates(params, updates)
    largest, absorbed = [], []
    for p, u, q in zip(jax.tree.leaves(params), jax.tree.leaves(updates), jax.tree.leaves(moved), strict=True):
        largest.append(jnp.max(jnp.abs(u), initial=0).astype(jnp.float32))
        lost = (u != 0) & (lax.optimization_barrier(q) == p)
        absorbed.append(jnp.mean(lost.astype(jnp.float32)) if p.size else jnp.float32(0))
    return jnp.stack(largest), jnp.stack(absorbed)


_program = jax.jit(_step, static_argnums=0)  # compiled once for each transformation, however often it is asked


def _name(path: Any) -> str:
    for key in reversed(path):
        name = getattr(key, "name", getattr(key, "key", None))
        if isinstance(name, str) and name != "value":
            return name
    return ""
