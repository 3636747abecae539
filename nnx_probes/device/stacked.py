"""Which parameters hold several layers along one axis: what ``nnx.vmap`` makes of a constructor and ``nnx.scan`` runs over."""

from __future__ import annotations

from typing import Any

from flax import nnx

__all__ = ["layer_axes"]


def layer_axes(model: Any) -> dict[int, int]:
    """Returns ``id`` of a Variable -> the axis along which its layers lie, for the Variables that are stacked.

    NNX marks nothing when it stacks, so this goes by what flax's own layers say of themselves: a ``Linear`` of 6 features
    in and 6 out whose kernel has shape (4, 6, 6) is a stack of 4. Other Variables of a module whose every known layer is
    stacked by the same number along the first axis are taken along when their own first axis has that length. A stack of
    a module that holds none of flax's layers is not recognised and is judged as one leaf.
    """
    found: dict[int, int] = {}
    if isinstance(model, nnx.Pytree):
        _visit(model, found, set())
    return found


def _visit(module: Any, found: dict[int, int], seen: set[int]) -> set[tuple[int, int]]:
    """Notes the stacked Variables below `module`; returns (depth, axis) of its known layers, (0, 0) for no stack."""
    if id(module) in seen:
        return set()
    seen.add(id(module))
    stacks: set[tuple[int, int]] = set()
    own: list[Any] = []
    for value in _values(module):
        if isinstance(value, nnx.Variable):
            own.append(value)
        elif isinstance(value, (nnx.Pytree, list, tuple, dict)):
            stacks |= _visit(value, found, seen)
    own = [v for v in own if hasattr(v.get_raw_value(), "shape")]
    rank = _rank(module)
    if rank is not None:
        kernel = getattr(module, rank[0], None)
        value = kernel.get_raw_value() if isinstance(kernel, nnx.Variable) else None
        shape = getattr(value, "shape", None)
        if shape is not None:
            axis = _extra_axis(shape, rank[1])
            stacks.add((0, 0) if axis is None else (shape[axis], axis))
            if axis is not None and kernel is not None:
                found[id(kernel)] = axis
    depth, axis = next(iter(stacks)) if len(stacks) == 1 else (0, 0)
    if depth and axis == 0:
        for variable in own:
            shape = variable.get_raw_value().shape
            if shape and shape[0] == depth:
                found.setdefault(id(variable), 0)
    return stacks


def _values(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, (list, tuple)) else list(vars(node).values())


def _rank(module: Any) -> tuple[str, tuple[int, ...]] | None:
    """Returns (name of the main Variable, shape it has in a single layer) for flax's own layers."""
    if isinstance(module, nnx.Linear):
        return "kernel", (module.in_features, module.out_features)
    if isinstance(module, nnx.Embed):
        return "embedding", (module.num_embeddings, module.features)
    if isinstance(module, (nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm)):
        return "scale", (module.num_features,)
    if isinstance(module, nnx.LinearGeneral):
        batch = [module.batch_axis[axis] for axis in sorted(module.batch_axis)]
        return "kernel", (*batch, *module.in_features, *module.out_features)
    if isinstance(module, nnx.Conv):
        return "kernel", tuple(module.kernel_shape)
    return None


def _extra_axis(shape: tuple[int, ...], single: tuple[int, ...]) -> int | None:
    """The axis without which `shape` is that of a single layer; None if there is none."""
    if len(shape) != len(single) + 1:
        return None
    return next((a for a in range(len(shape)) if shape[:a] + shape[a + 1 :] == single), None)
