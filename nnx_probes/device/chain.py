"""What can be read off an optax transformation: where it clips, how many bad updates it skips, how many it gathers."""

from __future__ import annotations

from typing import Any

__all__ = ["accumulation", "clip_norm", "skip_limit"]

_DEEP = 50
_PARTIAL = {"masked", "multi_transform", "partition"}
"""Functions of optax whose inner transformations see a part of the parameters only."""


def clip_norm(tx: Any) -> float | None:
    """Returns the smallest ``max_norm`` of an ``optax.clip_by_global_norm`` in `tx`, None if there is none.

    One that sits behind a mask or a partition clips a part of the gradients only and is passed over.
    """
    found = [_number(v) for v in _free_variables(tx, "clip_by_global_norm", "max_norm")]
    return min((x for x in found if x is not None), default=None)


def skip_limit(tx: Any) -> float | None:
    """Returns ``max_consecutive_errors`` of an ``optax.apply_if_finite`` in `tx`, None if there is none."""
    found = [_number(v) for v in _free_variables(tx, "apply_if_finite", "max_consecutive_errors")]
    return next((x for x in found if x is not None), None)


def accumulation(tx: Any) -> int | None:
    """Returns k of an ``optax.MultiSteps`` over k mini-steps in `tx`, None if there is none or k changes over time."""
    found = [_number(v) for v in _free_variables(tx, "MultiSteps", "every_k_schedule")]
    return next((int(x) for x in found if x is not None and x >= 1), None)


def _free_variables(tx: Any, owner: str, name: str) -> list[Any]:
    """The values of variable `name` in functions that were made inside a function called `owner`."""
    found: list[Any] = []
    seen: set[int] = set()
    stack: list[tuple[Any, int]] = [(tx, 0)]
    while stack:
        node, depth = stack.pop()
        if id(node) in seen or depth > _DEEP:
            continue
        seen.add(id(node))
        qualified = getattr(node, "__qualname__", "")
        if "." in qualified and qualified.split(".")[0] in _PARTIAL:
            continue
        cells = _cells(node)
        if qualified.startswith(f"{owner}.") and name in cells:
            found.append(cells[name])
        inside = list(cells.values()) if cells else _parts(node)
        stack.extend((value, depth + 1) for value in inside)
    return found


def _cells(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return {}
    values = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return values


def _parts(node: Any) -> list[Any]:
    if isinstance(node, (tuple, list)):
        return list(node)
    if isinstance(node, dict):
        return list(node.values())
    if hasattr(node, "__wrapped__"):
        return [node.__wrapped__]
    if hasattr(node, "__self__"):  # a bound method: optax.MultiSteps hands out its own
        return [node.__self__]
    return list(vars(node).values()) if type(node).__module__.startswith("optax") and hasattr(node, "__dict__") else []


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
