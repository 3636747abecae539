"""The parameters an optimizer trains, as rows of a measurement."""

from __future__ import annotations

import warnings
from typing import Any

import jax
from flax import nnx

from nnx_probes.device.flow import Slot
from nnx_probes.device.leaves import key_name
from nnx_probes.device.stacked import layer_axes
from nnx_probes.errors import ArgumentError

__all__ = ["param_slots", "slots_of"]


def _param_arrays(model: Any, wrt: Any, *, graph: bool | None = None) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns (path, array) of the Variables that `wrt` selects, in the order in which an optimizer sees them."""
    state = nnx.state(model, wrt, graph=graph) if isinstance(model, nnx.Pytree) else nnx.filter_state(model, wrt)
    found, _ = jax.tree_util.tree_flatten_with_path(nnx.as_pure(state))
    return [(tuple(key_name(key) for key in keys), x) for keys, x in found]


def param_slots(model: Any, wrt: Any, *, graph: bool | None = None) -> tuple[tuple[Slot, ...], list[Any]]:
    """Returns the parameters that `wrt` selects, as slots and as arrays."""
    arrays = _param_arrays(model, wrt, graph=graph)
    axes = _axes(model, wrt, graph)
    return tuple(Slot(parts, tuple(x.shape), str(x.dtype), axes.get(parts)) for parts, x in arrays), [
        x for _, x in arrays
    ]


def slots_of(model: Any, optimizer: nnx.Optimizer[Any]) -> tuple[Slot, ...]:
    """Returns one slot for each parameter that `optimizer` trains.

    Raises:
      ArgumentError: the optimizer keeps state for parameters of other shapes.
    """
    graph = getattr(optimizer, "graph", None)
    slots, arrays = param_slots(model, optimizer.wrt, graph=graph)
    if not arrays:
        wrt = getattr(optimizer.wrt, "__name__", repr(optimizer.wrt))
        warnings.warn(
            f"watch(): the optimizer's wrt={wrt} selects no parameter of the {type(model).__name__}: it will train nothing. "
            "Pass the filter of the parameters to train, usually nnx.Optimizer(model, tx, wrt=nnx.Param).",
            UserWarning,
            stacklevel=3,
        )
    _check(model, optimizer, arrays)
    return slots


def _check(model: Any, optimizer: Any, arrays: list[Any]) -> None:
    shapes = {tuple(x.shape) for x in arrays}
    kept = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    own = [tuple(v.get_raw_value().shape) for v in kept if type(v).__name__ == "OptVariable" and _has_shape(v)]
    large = [shape for shape in own if shape]
    if arrays and large and not any(shape in shapes for shape in large):
        raise ArgumentError(
            f"watch(): the optimizer keeps state of shape {large[0]}, which no parameter of the {type(model).__name__} has. "
            "Pass the model that the optimizer was built from."
        )


def _has_shape(variable: Any) -> bool:
    return hasattr(variable.get_raw_value(), "shape")


def _axes(model: Any, wrt: Any, graph: bool | None) -> dict[tuple[Any, ...], int]:
    """Path -> axis of the layers, for stacked leaves."""
    if not isinstance(model, nnx.Pytree):
        return {}
    by_id = layer_axes(model)
    state = nnx.state(model, wrt, graph=graph)
    found, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return {tuple(key_name(key) for key in keys): by_id[id(v)] for keys, v in found if id(v) in by_id}
