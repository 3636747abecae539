"""What one step's gradients and updates do to each parameter, as one vector of words.

Used inside the user's compiled step (`watch`), on what a loop hands over, and on recomputed gradients: one
set of formulas for all three. A stacked leaf (the parameters of vmapped or scanned layers) has one row a
layer, every other leaf one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from nnx_probes.device.reduce import apart, count_nonfinite, plain

__all__ = ["Flow", "Layout", "Slot"]

_FLOATS = (
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
_COUNTS = ("grad_bad", "update_bad")
_HUGE = {4: 1e38, 8: 1e308}
"""By itemsize: what makes every normal number at least 1 when multiplied with it."""

_LARGE = 2.0**100


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter leaf.

    Attributes:
      parts: path as a tuple, as in `Leaf`.
      shape, dtype: of the parameter.
      axis: axis along which the layers of a stack lie, None for a leaf of one layer.
    """

    parts: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str
    axis: int | None = None

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return 1 if self.axis is None else self.shape[self.axis]


@dataclass(frozen=True)
class Flow:
    """Statistics on the host, one row a leaf (``stack=True``: one row a layer of a stacked leaf).

    Attributes:
      grad_norm, grad_max, update_norm, update_max, param_norm: float32[n], L2 norms and largest magnitudes.
      grad_bad, update_bad: int32[n], NaN and infinite elements.
      grad_zeros: float32[n], share of elements that are exactly 0 (float32 subnormals count as 0).
      absorbed: float32[n], share of elements with u != 0 and p + u == p in the parameter's dtype.
      ratio: float32[n], update norm over parameter norm; NaN for a parameter that is all 0.
      cosine: float32[n], of the angle between gradient and update: -1 for plain descent, above 0 uphill.

    What was not measured is NaN (0 for the counts); so are the shares of a row that holds NaN.
    """

    grad_norm: np.ndarray
    grad_max: np.ndarray
    grad_bad: np.ndarray
    grad_zeros: np.ndarray
    update_norm: np.ndarray
    update_max: np.ndarray
    update_bad: np.ndarray
    param_norm: np.ndarray
    absorbed: np.ndarray
    ratio: np.ndarray
    cosine: np.ndarray


class Layout:
    """Which rows a vector of words holds.

    Args:
      slots: the parameters, in the order in which their arrays come.

    Attributes:
      slots: the same.
      words: length of the vector.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self._rows = np.array([slot.rows for slot in self.slots], np.int64)
        self._n = int(self._rows.sum())
        self.words = self._n * (len(_FLOATS) + len(_COUNTS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.slots == other.slots

    def __hash__(self) -> int:
        return hash(self.slots)

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Whether `arrays` have the parameters' shapes."""
        return len(arrays) == len(self.slots) and all(
            getattr(x, "shape", None) == slot.shape for x, slot in zip(arrays, self.slots, strict=True)
        )

    def measure(
        self,
        grads: Sequence[jax.Array] | None,
        params: Sequence[jax.Array] | None = None,
        updates: Sequence[jax.Array] | None = None,
    ) -> jax.Array:
        """Returns uint32[words]; traceable. `params` are those *before* the update.

        Cost: 4 passes over the gradients, 4 over the updates, 4 over the parameters; no memory beyond the result.
        """
        found = self.statistics(grads, params, updates)
        with jax.named_scope("nnx_probes"):
            return jnp.concatenate([_bits(found[name]) for name in (*_FLOATS, *_COUNTS)])

    def statistics(
        self,
        grads: Sequence[jax.Array] | None,
        params: Sequence[jax.Array] | None = None,
        updates: Sequence[jax.Array] | None = None,
    ) -> dict[str, jax.Array]:
        """Returns what `measure` packs, by name: float32 or int32, one element a row."""
        found: dict[str, list[jax.Array]] = {name: [] for name in _FLOATS}
        with jax.named_scope("nnx_probes"):
            after = None
            if params is not None and updates is not None:
                # Summed in the parameter's own dtype, as the optimizer does; the barrier keeps XLA from skipping the rounding.
                after = lax.optimization_barrier(optax.apply_updates(list(params), list(updates)))
            for i, slot in enumerate(self.slots):
                g, u, p = (None if xs is None else xs[i] for xs in (grads, updates, params))
                moved = None if after is None or p is None else _difference(after[i], p)
                blank = jnp.full((slot.rows,), jnp.nan, jnp.float32)
                tops: dict[str, jax.Array] = {}
                for kind, of in (("grad", g), ("update", u), ("param", p)):
                    largest = None
                    if of is not None:
                        largest = tops[kind] = _max(of, slot)
                    if kind != "param":
                        found[f"{kind}_max"].append(
                            blank if largest is None else largest.reshape(-1).astype(jnp.float32)
                        )
                        found[f"{kind}_nonzero"].append(blank if of is None else _nonzero(of, slot))
                    found[f"{kind}_norm"].append(blank if of is None or largest is None else _norm(of, slot, largest))
                found["moved"].append(blank if moved is None else _nonzero(moved, slot))
                found["along"].append(
                    blank if g is None or u is None else _along(g, u, slot, tops["grad"], tops["update"])
                )
            joined = {name: _join(parts) for name, parts in found.items()}
            joined["grad_bad"] = self._count_bad(grads, joined["grad_max"])
            joined["update_bad"] = self._count_bad(updates, joined["update_max"])
        return {name: joined[name] for name in (*_FLOATS, *_COUNTS)}

    def _count_bad(self, arrays: Sequence[jax.Array] | None, largest: jax.Array) -> jax.Array:
        none = jnp.zeros((self._n,), jnp.int32)
        if arrays is None or not self.slots:
            return none

        def count() -> jax.Array:
            rows = [
                count_nonfinite(x, _others(x, slot)).reshape(-1) for x, slot in zip(arrays, self.slots, strict=True)
            ]
            return _join(rows, jnp.int32)

        # Counting is the slowest reduction there is: done only where a maximum says that there is something to count.
        return jnp.asarray(lax.cond(jnp.all(jnp.isfinite(largest)), lambda: none, count))

    def unpack(self, words: np.ndarray, *, stack: bool = False) -> Flow | None:
        """Returns the statistics in `words` (uint32[words]); with `stack`, None when no leaf is stacked."""
        names = (*_FLOATS, *_COUNTS)
        table = np.asarray(words, np.uint32).reshape(len(names), self._n)
        rows: dict[str, np.ndarray] = {
            name: table[i].view(np.int32 if name in _COUNTS else np.float32).astype(np.float64)
            for i, name in enumerate(names)
        }
        with np.errstate(over="ignore", invalid="ignore"):
            rows["along"] = rows["along"] * _host_scale(rows["grad_max"]) * _host_scale(rows["update_max"])
        sizes = np.concatenate([np.full(s.rows, _size(s) / max(s.rows, 1)) for s in self.slots] or [np.zeros(0)])
        if stack:
            keep = np.concatenate([np.full(s.rows, s.axis is not None) for s in self.slots] or [np.zeros(0, bool)])
            return _flow({name: x[keep] for name, x in rows.items()}, sizes[keep]) if keep.any() else None
        with np.errstate(over="ignore", invalid="ignore"):
            merged = {name: self._merge(name, x) for name, x in rows.items()}
        return _flow(merged, self._sum(sizes))

    def _merge(self, name: str, x: np.ndarray) -> np.ndarray:
        if name.endswith("_norm"):
            return np.asarray(np.sqrt(self._sum(x * x)))
        if name.endswith("_max"):
            return self._each(np.maximum, x)
        return self._sum(x)

    def _sum(self, x: np.ndarray) -> np.ndarray:
        return self._each(np.add, x)

    def _each(self, join: np.ufunc, x: np.ndarray) -> np.ndarray:
        """`x` joined over the rows of each leaf (0 for a stack of no layers)."""
        ends = np.cumsum(self._rows)
        return np.array([join.reduce(x[e - n : e]) if n else 0.0 for e, n in zip(ends, self._rows, strict=True)])

    def stack_paths(self, paths: Mapping[tuple[Any, ...], str]) -> list[str]:
        """Returns ``"<path>[<layer>]"`` for each row of ``unpack(..., stack=True)``."""
        return [
            f"{paths[slot.parts]}[{layer}]"
            for slot in self.slots
            if slot.axis is not None
            for layer in range(slot.rows)
        ]


def _host_scale(largest: np.ndarray) -> np.ndarray:
    return np.minimum(np.where((largest > 0) & np.isfinite(largest), largest, 1), _LARGE)


def _flow(rows: Mapping[str, np.ndarray], sizes: np.ndarray) -> Flow:
    size = np.maximum(sizes, 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zeros = np.where(sizes > 0, 1 - rows["grad_nonzero"] / size, 0.0)
        absorbed = np.maximum(rows["update_nonzero"] - rows["moved"], 0) / size
        lengths = rows["grad_norm"] * rows["update_norm"]
        cosine = np.where(lengths > 0, rows["along"] / lengths, np.nan)
        ratio = np.where(rows["param_norm"] > 0, rows["update_norm"] / rows["param_norm"], np.nan)
        floats = {name: rows[name].astype(np.float32) for name in _FLOATS}
        ratio = ratio.astype(np.float32)
    return Flow(
        grad_norm=floats["grad_norm"],
        grad_max=floats["grad_max"],
        grad_bad=rows["grad_bad"].astype(np.int32),
        grad_zeros=zeros.astype(np.float32),
        update_norm=floats["update_norm"],
        update_max=floats["update_max"],
        update_bad=rows["update_bad"].astype(np.int32),
        param_norm=floats["param_norm"],
        absorbed=absorbed.astype(np.float32),
        ratio=ratio,
        cosine=np.clip(cosine, -1, 1).astype(np.float32),
    )


def _size(slot: Slot) -> int:
    return int(np.prod(slot.shape, dtype=np.int64))


def _others(x: jax.Array, slot: Slot) -> tuple[int, ...]:
    """The axes to reduce: all, or all but the one of the layers."""
    return tuple(i for i in range(x.ndim) if i != slot.axis)


def _max(x: jax.Array, slot: Slot) -> jax.Array:
    """The largest magnitude of each row, in the shape that broadcasts against `x`."""
    return jnp.max(jnp.abs(plain(apart(x))), axis=_others(x, slot), initial=0, keepdims=True)


def _difference(after: jax.Array, before: jax.Array) -> jax.Array:
    """What an update changed, 0 exactly where it changed nothing; narrow floats are subtracted as float32."""
    return after - before if jnp.iscomplexobj(before) else jnp.asarray(plain(after) - plain(before))


def _scale(largest: jax.Array) -> jax.Array:
    """What to divide by so that squares neither overflow nor underflow."""
    sound = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return jnp.minimum(sound, _LARGE)  # XLA multiplies with the reciprocal, which must not be subnormal


def _along(g: jax.Array, u: jax.Array, slot: Slot, g_largest: jax.Array, u_largest: jax.Array) -> jax.Array:
    """The scalar product of gradient and update, each over its largest magnitude (complex ones by their moduli)."""
    if jnp.iscomplexobj(g) or jnp.iscomplexobj(u):
        return jnp.full((slot.rows,), jnp.nan, jnp.float32)
    product = (plain(apart(g)) / _scale(g_largest)) * (plain(apart(u)) / _scale(u_largest))
    return jnp.sum(product, axis=_others(g, slot)).reshape(-1).astype(jnp.float32)


def _norm(x: jax.Array, slot: Slot, largest: jax.Array) -> jax.Array:
    scale = _scale(largest)
    scaled = plain(apart(x)) / scale
    root = jnp.sqrt(jnp.sum(scaled * scaled, axis=_others(x, slot), keepdims=True)) * scale
    return root.reshape(-1).astype(jnp.float32)


def _nonzero(x: jax.Array, slot: Slot) -> jax.Array:
    """How many elements are not 0, counted in floats: XLA's CPU backend sums comparisons 7 times slower."""
    wide = plain(apart(x))
    ones = jnp.minimum(jnp.abs(wide) * _HUGE[wide.dtype.itemsize], 1)
    return jnp.sum(ones, axis=_others(x, slot)).reshape(-1).astype(jnp.float32)


def _join(parts: list[jax.Array], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), dtype)


def _bits(x: jax.Array) -> jax.Array:
    return jnp.asarray(lax.bitcast_convert_type(x, jnp.uint32))
