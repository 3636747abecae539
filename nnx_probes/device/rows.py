"""What is measured of gradients, updates and parameters, row by row, with few instructions.

XLA compiles a kernel for each statistic of each leaf, and its time grows faster than their number. So leaves that are
small and alike are copied next to each other and measured as the layers of one stack; and on the CPU backend large ones that are
alike go through one loop, one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from nnx_probes.device.reduce import apart, count_nonfinite, plain

__all__ = ["FLOATS", "LARGE", "Part", "aside", "count", "measure", "parts_of"]

FLOATS = (
    "grad_norm",
    "grad_max",
    "grad_nonzero",
    "update_norm",
    "update_max",
    "update_nonzero",
    "param_norm",
    "moved",
    "along",
)
LARGE = 2.0**100
_HUGE = {4: 1e38, 8: 1e308}
"""By itemsize: what makes every normal number at least 1 when multiplied with it."""
_SMALL = 1 << 16
"""Bytes up to which an array is worth copying."""
_LOOPED = 3
"""So many large leaves that are alike are worth a loop."""

Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True, slots=True)
class Part:
    """Leaves that are measured together.

    Attributes:
      leaves: their positions.
      axis: the axis of an array's rows, None where it is one row.
      arrays: of ``"grad"``, ``"param"`` and ``"update"`` those that there are: one array, or one a leaf (a looped part).
    """

    leaves: tuple[int, ...]
    axis: int | None
    arrays: Mapping[str, list[jax.Array]]


def aside(arrays: Sequence[Any] | None) -> list[Any] | None:
    """The same arrays with an axis of size 1 at the end, so that measuring leaves the optimizer's last bits as they are.

    XLA moves a reshape of a gradient (of a kernel with one output, of a normalisation's scale) past the optimizer's
    multiplications, and then contracts other multiply-adds, only where nobody else reads the reshaped gradient. A reshape of
    ours is folded into the one before it and reads what that one read. It has to come before any branch, whose operands
    would be such readers, and the barrier before any stacking.
    """
    return None if arrays is None else [lax.optimization_barrier(x.reshape(*x.shape, 1)) for x in arrays]


def parts_of(
    axes: Sequence[int | None],
    grads: Sequence[jax.Array] | None,
    params: Sequence[jax.Array] | None,
    updates: Sequence[jax.Array] | None,
    *,
    together: bool,
) -> list[Part]:
    """Returns all leaves in parts; `axes` are those of the layers of stacked leaves, None for others."""
    given = {"grad": grads, "param": params, "update": updates}
    lists = {kind: list(xs) for kind, xs in given.items() if xs is not None}
    groups: dict[Any, list[int]] = {}
    for i, axis in enumerate(axes):
        own = [xs[i] for xs in lists.values()]
        key = (axis, *((x.shape, x.dtype) for x in own)) if together else i
        groups.setdefault(key, []).append(i)
    found: list[Part] = []
    for rows in groups.values():
        axis, first = axes[rows[0]], [xs[rows[0]] for xs in lists.values()]
        arrays = {kind: [xs[i] for i in rows] for kind, xs in lists.items()}
        if len(rows) > 1 and axis is None and all(x.size * x.dtype.itemsize <= _SMALL for x in first):
            found.append(Part(tuple(rows), 0, {kind: [jnp.stack(xs)] for kind, xs in arrays.items()}))
        elif len(rows) >= _LOOPED and jax.default_backend() == "cpu":
            found.append(Part(tuple(rows), axis, arrays))
        else:
            found += [Part((i,), axis, {kind: [xs[i]] for kind, xs in lists.items()}) for i in rows]
    return found


def measure(part: Part) -> dict[str, jax.Array]:
    """Returns `FLOATS`: float32, one element a row, those of one leaf after those of another."""
    return _each(part, lambda arrays: _floats(arrays, part.axis))


def count(part: Part, kind: str) -> jax.Array:
    """Returns how many elements of each row are not finite: int32."""
    return _each(part, lambda arrays: {kind: _count(arrays[kind], part.axis)}, (kind,))[kind]


def _each(part: Part, of: Any, kinds: Sequence[str] = ("grad", "param", "update")) -> dict[str, jax.Array]:
    """``of(arrays)`` of the part's one array, or of each of its leaves, joined."""
    used = {kind: xs for kind, xs in part.arrays.items() if kind in kinds}
    n = len(next(iter(used.values())))
    if n == 1:
        found: dict[str, jax.Array] = of({kind: xs[0] for kind, xs in used.items()})
        return found
    leaves = [{kind: xs[i] for kind, xs in used.items()} for i in range(n)]
    branches = [lambda leaf=leaf: leaf for leaf in leaves]
    rows = lax.map(lambda i: of(lax.switch(i, branches)), jnp.arange(n))
    return {name: x.reshape(-1) for name, x in rows.items()}


def _floats(arrays: Arrays, axis: int | None) -> dict[str, jax.Array]:
    g, p, u = (arrays.get(kind) for kind in ("grad", "param", "update"))
    rows = 1 if axis is None else next(iter(arrays.values())).shape[axis]
    blank = jnp.full((rows,), jnp.nan, jnp.float32)
    found, tops = dict.fromkeys(FLOATS, blank), {}
    for kind, x in arrays.items():
        tops[kind] = _max(x, axis)
        found[f"{kind}_norm"] = _norm(x, axis, tops[kind])
        if kind != "param":
            found[f"{kind}_max"] = tops[kind].reshape(-1).astype(jnp.float32)
            found[f"{kind}_nonzero"] = _nonzero(x, axis)
    if p is not None and u is not None:
        # Summed in the parameter's own dtype, as the optimizer does; the barrier keeps XLA from skipping the rounding.
        after = lax.optimization_barrier(optax.apply_updates(p, u))
        found["moved"] = _nonzero(_difference(after, p), axis)
    if g is not None and u is not None and not jnp.iscomplexobj(g) and not jnp.iscomplexobj(u):
        found["along"] = _along(g, u, axis, tops["grad"], tops["update"])
    return found


def _count(x: jax.Array, axis: int | None) -> jax.Array:
    return jnp.asarray(count_nonfinite(x, _others(x, axis))).reshape(-1)


def _others(x: jax.Array, axis: int | None) -> tuple[int, ...]:
    """The axes to reduce: all, or all but the one of the layers."""
    return tuple(i for i in range(x.ndim) if i != axis)


def _max(x: jax.Array, axis: int | None) -> jax.Array:
    """The largest magnitude of each row, in the shape that broadcasts against `x`."""
    return jnp.max(jnp.abs(plain(apart(x))), axis=_others(x, axis), initial=0, keepdims=True)


def _difference(after: jax.Array, before: jax.Array) -> jax.Array:
    """What an update changed, 0 exactly where it changed nothing; narrow floats are subtracted as float32."""
    return after - before if jnp.iscomplexobj(before) else jnp.asarray(plain(after) - plain(before))


def _scale(largest: jax.Array) -> jax.Array:
    """What to divide by so that squares neither overflow nor underflow."""
    sound = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return jnp.minimum(sound, LARGE)  # XLA multiplies with the reciprocal, which must not be subnormal


def _along(g: jax.Array, u: jax.Array, axis: int | None, g_largest: jax.Array, u_largest: jax.Array) -> jax.Array:
    """The scalar product of gradient and update, each over its largest magnitude."""
    product = (plain(apart(g)) / _scale(g_largest)) * (plain(apart(u)) / _scale(u_largest))
    return jnp.sum(product, axis=_others(g, axis)).reshape(-1).astype(jnp.float32)


def _norm(x: jax.Array, axis: int | None, largest: jax.Array) -> jax.Array:
    scale = _scale(largest)
    scaled = plain(apart(x)) / scale
    root = jnp.sqrt(jnp.sum(scaled * scaled, axis=_others(x, axis), keepdims=True)) * scale
    return root.reshape(-1).astype(jnp.float32)


def _nonzero(x: jax.Array, axis: int | None) -> jax.Array:
    """How many elements are not 0, counted in floats: XLA's CPU backend sums comparisons 7 times slower."""
    wide = plain(apart(x))
    ones = jnp.minimum(jnp.abs(wide) * _HUGE[wide.dtype.itemsize], 1)
    return jnp.sum(ones, axis=_others(x, axis)).reshape(-1).astype(jnp.float32)
