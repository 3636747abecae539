"""`step_stats`: the same statistics for steps that return what they measure."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_probes.device.flow import Layout, Slot
from nnx_probes.device.leaves import dotted, key_name
from nnx_probes.device.rows import aside
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

    Cost: 4 passes each over gradients, updates and parameters.
    """
    given = {n: x for n, x in (("grads", grads), ("updates", updates), ("params", params)) if x is not None}
    if not given and loss is None:
        raise ArgumentTypeError("step_stats() got nothing: expected grads=, updates=, params= or loss=.")
    named = {name: jax.tree_util.tree_flatten_with_path(nnx.as_pure(tree))[0] for name, tree in given.items()}
    arrays = {name: [_plain(x) for _, x in leaves] for name, leaves in named.items()}
    paths = {name: [dotted([key_name(k) for k in keys]) for keys, _ in leaves] for name, leaves in named.items()}
    for name, leaves in arrays.items():
        if not leaves or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
            raise ArgumentTypeError(f"step_stats({name}={type(given[name]).__name__}): expected a pytree of arrays.")
    out: dict[str, jax.Array] = {}
    if arrays:
        _check(arrays, paths)
        out = _per_leaf(arrays)
    if loss is not None:
        out[f"{PREFIX}loss"] = jnp.asarray(loss, jnp.float32).reshape(())
    return out


def _plain(x: Any) -> Any:
    """`x`, or zeros for typed PRNG keys, which a whole module may hold: they have no norm."""
    keys = hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jnp.zeros(x.shape, jnp.uint32) if keys else x


def _layout(arrays: dict[str, list[jax.Array]]) -> Layout:
    slots = [Slot((i,), tuple(x.shape), str(x.dtype)) for i, x in enumerate(next(iter(arrays.values())))]
    return Layout(slots, together=jax.device_count() == 1)  # a traced array does not say where it lies


def _check(arrays: dict[str, list[jax.Array]], paths: dict[str, list[str]]) -> None:
    first, model = next(iter(arrays.items()))
    layout = _layout(arrays)
    for name, leaves in arrays.items():
        if paths[name] != paths[first] and len(leaves) == len(model):
            i = next(i for i, (a, b) in enumerate(zip(paths[name], paths[first], strict=True)) if a != b)
            raise ArgumentError(
                f"step_stats(): leaf {i} of {name} is {paths[name][i]!r}, that of {first} {paths[first][i]!r}: expected "
                "the same structure. Pass them as the optimizer sees them, for example nnx.state(model, nnx.Param)."
            )
        if not layout.fits(leaves):
            raise ArgumentError(
                f"step_stats(): {name} has leaves of shapes {[x.shape for x in leaves][:4]}..., {first} of "
                f"{[x.shape for x in model][:4]}...: expected the same structure. Pass them as the optimizer sees them, "
                "for example nnx.state(model, nnx.Param)."
            )


def _per_leaf(arrays: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    model = next(iter(arrays.values()))
    found = _layout(arrays).statistics(*(aside(arrays.get(name)) for name in ("grads", "params", "updates")))
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
