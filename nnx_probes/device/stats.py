"""`step_stats`: the same statistics for steps that return what they measure."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_probes.device.flow import Layout, Slot
from nnx_probes.errors import ArgumentError, ArgumentTypeError

__all__ = ["PREFIX", "step_stats"]

PREFIX = "probes/"
"""How the names of `step_stats` begin."""

_NAMES = {
    "grads": {"grad_norm": "grads_norm", "grad_max": "grads_max_abs", "grad_bad": "grads_nonfinite"},
    "updates": {"update_norm": "updates_norm", "update_max": "updates_max_abs", "update_bad": "updates_nonfinite"},
    "params": {"param_norm": "params_norm"},
}


def step_stats(*, grads: Any = None, updates: Any = None, params: Any = None, loss: Any = None) -> dict[str, jax.Array]:
    """Returns per-leaf statistics of one step, to be returned from it and handed on as ``monitor(step, metrics=...)``.

    Pure, to be called inside the compiled step, in any framework::

        stats = probes.step_stats(grads=grads, updates=updates, params=params)   # params before the update
        return loss, stats

    Args:
      grads: gradients, a pytree of arrays (State, Module, dict, ...); like the next two it may be left out.
      updates: what the optimizer adds to the parameters, of the same structure.
      params: the parameters *before* the update, of the same structure.
      loss: one number.

    Returns:
      Names that begin with ``"probes/"`` -> float32[n_leaves] (int32[n_leaves] for the counts), in the order of
      ``jax.tree.leaves``: ``grads_norm``, ``grads_max_abs``, ``grads_nonfinite``, ``grads_zeros`` (share of elements that
      are exactly 0), ``updates_norm``, ``updates_max_abs``, ``updates_nonfinite``, ``params_norm``, ``update_ratio``
      (update norm over parameter norm, NaN for parameters of 0) and ``absorbed`` (share of elements with u != 0 and
      p + u == p), as far as the arguments tell; ``loss`` (float32[]).

    Raises:
      ArgumentTypeError: nothing was given, or something without arrays.
      ArgumentError: the arguments differ in structure or shapes.

    Cost: 3 passes each over gradients, updates and parameters.
    """
    given = {n: x for n, x in (("grads", grads), ("updates", updates), ("params", params)) if x is not None}
    if not given and loss is None:
        raise ArgumentTypeError("step_stats() got nothing: expected grads=, updates=, params= or loss=.")
    arrays = {name: jax.tree.leaves(nnx.as_pure(tree)) for name, tree in given.items()}
    for name, leaves in arrays.items():
        if not leaves or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
            raise ArgumentTypeError(f"step_stats({name}={type(given[name]).__name__}): expected a pytree of arrays.")
    out: dict[str, jax.Array] = {}
    if arrays:
        out = _per_leaf(arrays)
    if loss is not None:
        out[f"{PREFIX}loss"] = jnp.asarray(loss, jnp.float32).reshape(())
    return out


def _per_leaf(arrays: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    first, model = next(iter(arrays.items()))
    layout = Layout([Slot((i,), tuple(x.shape), str(x.dtype)) for i, x in enumerate(model)])
    for name, leaves in arrays.items():
        if not layout.fits(leaves):
            raise ArgumentError(
                f"step_stats(): {name} has leaves of shapes {[x.shape for x in leaves][:4]}..., {first} of "
                f"{[x.shape for x in model][:4]}...: expected the same structure. Pass them as the optimizer sees them, "
                "for example nnx.state(model, nnx.Param)."
            )
    found = layout.statistics(arrays.get("grads"), arrays.get("params"), arrays.get("updates"))
    sizes = jnp.asarray([max(int(x.size), 1) for x in model], jnp.float32)
    out = {}
    for name in arrays:
        out.update({f"{PREFIX}{to}": found[of] for of, to in _NAMES[name].items()})
    if "grads" in arrays:
        out[f"{PREFIX}grads_zeros"] = (sizes - found["grad_nonzero"]) / sizes
    if "updates" in arrays and "params" in arrays:
        ratio = found["update_norm"] / found["param_norm"]
        out[f"{PREFIX}update_ratio"] = jnp.where(found["param_norm"] > 0, ratio, jnp.nan)
        out[f"{PREFIX}absorbed"] = (found["update_nonzero"] - found["moved"]) / sizes
    return out
