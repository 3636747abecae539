"""The parameters an optimizer trains, as rows of a measurement."""

from __future__ import annotations

import warnings
from typing import Any

import jax
from flax import nnx

from nnx_probes.device.flow import Slot
from nnx_probes.device.leaves import key_name, objects
from nnx_probes.device.same import Same
from nnx_probes.device.stacked import layer_axes
from nnx_probes.errors import ArgumentError

__all__ = ["Params", "slots_of"]


class Params:
    """The parameters a filter selects; works out names and layers anew only where the model is built otherwise.

    Cost of a read: as of `Tree`, once the names are known.
    """

    def __init__(self) -> None:
        self._filter = Same()
        self._key: Any = None
        self._places: list[int] = []
        self._specs: list[Any] = []
        self._slots: tuple[Slot, ...] = ()

    def read(self, model: Any, wrt: Any) -> tuple[tuple[Slot, ...], list[Any]]:
        """Returns the parameters that `wrt` selects of `model`, as slots and as arrays, in the order an optimizer sees them."""
        found, structure = objects(model)
        first: dict[int, int] = {}
        key = structure, [type(x) for x in found], [first.setdefault(id(x), i) for i, x in enumerate(found)]
        if not self._filter.turn_to(wrt) and self._key is not None and key == self._key:
            arrays, specs = _inside([found[place] for place in self._places])
            if specs == self._specs:
                return self._slots, arrays
        self._key = None
        self._slots, arrays, chosen = _select(model, wrt, None)
        _, self._specs = _inside(chosen)
        if all(id(x) in first for x in chosen):
            self._key, self._places = key, [first[id(x)] for x in chosen]
        return self._slots, arrays


def _select(model: Any, wrt: Any, graph: bool | None) -> tuple[tuple[Slot, ...], list[Any], list[Any]]:
    """Returns slots, arrays, and the objects (Variables, mostly) that hold them."""
    module = isinstance(model, nnx.Pytree)
    state = nnx.state(model, wrt, graph=graph) if module else nnx.filter_state(model, wrt)
    axes = layer_axes(model) if module else {}
    slots: list[Slot] = []
    arrays: list[Any] = []
    chosen, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for keys, item in chosen:
        inside, _ = jax.tree_util.tree_flatten_with_path(nnx.as_pure(item))
        for deeper, x in inside:
            parts = tuple(key_name(key) for key in (*keys, *deeper))
            slots.append(Slot(parts, tuple(x.shape), str(x.dtype), axes.get(id(item)) if not deeper else None))
            arrays.append(x)
    return tuple(slots), arrays, [item for _, item in chosen]


def _inside(items: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the arrays in `items`, and what their names and slots follow from."""
    arrays: list[Any] = []
    specs: list[Any] = []
    for item in items:
        x = item.get_raw_value() if isinstance(item, nnx.Variable) else item
        found, structure = ([x], None) if isinstance(x, jax.Array) else jax.tree.flatten(nnx.as_pure(x))
        arrays += found
        specs += [structure, *((y.shape, y.dtype) for y in found)]
    return arrays, specs


def slots_of(model: Any, optimizer: nnx.Optimizer[Any]) -> tuple[Slot, ...]:
    """Returns one slot for each parameter that `optimizer` trains.

    Raises:
      ArgumentError: the optimizer keeps state for parameters of other shapes.
    """
    graph = getattr(optimizer, "graph", None)
    slots, arrays, _ = _select(model, optimizer.wrt, graph)
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
