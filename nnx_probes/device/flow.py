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
from jax import lax

from nnx_probes.device.rows import FLOATS, LARGE, Part, count, measure, parts_of

__all__ = ["Flow", "Layout", "Slot"]

_COUNTS = ("grad_bad", "update_bad")


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
      together: whether small ones that are alike may be stacked; those that are spread over devices better are not.

    Attributes:
      slots: the same.
      words: length of the vector.
    """

    def __init__(self, slots: Sequence[Slot], *, together: bool = True) -> None:
        self.slots = tuple(slots)
        self.together = together
        self._rows = np.array([slot.rows for slot in self.slots], np.int64)
        self._n = int(self._rows.sum())
        self.words = self._n * (len(FLOATS) + len(_COUNTS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self.slots, self.together) == (other.slots, other.together)

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

        Cost: 4 passes over the gradients, 4 over the updates, 4 over the parameters, and a copy of those leaves that are
        small; on the CPU backend also of one large leaf at a time.
        """
        found = self.statistics(grads, params, updates)
        with jax.named_scope("nnx_probes"):
            return jnp.concatenate([_bits(found[name]) for name in (*FLOATS, *_COUNTS)])

    def statistics(
        self,
        grads: Sequence[jax.Array] | None,
        params: Sequence[jax.Array] | None = None,
        updates: Sequence[jax.Array] | None = None,
    ) -> dict[str, jax.Array]:
        """Returns what `measure` packs, by name: float32 or int32, one element a row."""
        if grads is None and params is None and updates is None:
            nothing = {name: jnp.full((self._n,), jnp.nan, jnp.float32) for name in FLOATS}
            return {**nothing, **{name: jnp.zeros((self._n,), jnp.int32) for name in _COUNTS}}
        with jax.named_scope("nnx_probes"):
            parts = parts_of([slot.axis for slot in self.slots], grads, params, updates, together=self.together)
            measured = [measure(part) for part in parts]
            found = {name: _join([one[name] for one in measured]) for name in FLOATS}
            for name, kind in (("grad_bad", "grad"), ("update_bad", "update")):
                found[name] = self._count_bad(kind, parts, found[f"{kind}_max"])
            order = self._order(parts)
            if order is not None:
                found = {name: x[order] for name, x in found.items()}
        return {name: found[name] for name in (*FLOATS, *_COUNTS)}

    def _order(self, parts: Sequence[Part]) -> np.ndarray | None:
        """Where the rows of the slots are among those of `parts`, None if in that order."""
        ends = np.cumsum(self._rows)
        rows = [np.arange(ends[i] - self._rows[i], ends[i]) for part in parts for i in part.leaves]
        placed = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        return None if np.array_equal(placed, np.arange(self._n)) else np.argsort(placed)

    def _count_bad(self, kind: str, parts: Sequence[Part], largest: jax.Array) -> jax.Array:
        none = jnp.zeros((self._n,), jnp.int32)
        if not parts or kind not in parts[0].arrays:
            return none
        # Counting is the slowest reduction there is: done only where a maximum says that there is something to count.
        return jnp.asarray(
            lax.cond(
                jnp.all(jnp.isfinite(largest)),
                lambda: none,
                lambda: _join([count(part, kind) for part in parts], jnp.int32),
            )
        )

    def unpack(self, words: np.ndarray, *, stack: bool = False) -> Flow | None:
        """Returns the statistics in `words` (uint32[words]); with `stack`, None when no leaf is stacked."""
        names = (*FLOATS, *_COUNTS)
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
    return np.minimum(np.where((largest > 0) & np.isfinite(largest), largest, 1), LARGE)


def _flow(rows: Mapping[str, np.ndarray], sizes: np.ndarray) -> Flow:
    size = np.maximum(sizes, 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zeros = np.where(sizes > 0, 1 - rows["grad_nonzero"] / size, 0.0)
        absorbed = np.maximum(rows["update_nonzero"] - rows["moved"], 0) / size
        lengths = rows["grad_norm"] * rows["update_norm"]
        cosine = np.where(lengths > 0, rows["along"] / lengths, np.nan)
        ratio = np.where(rows["param_norm"] > 0, rows["update_norm"] / rows["param_norm"], np.nan)
        floats = {name: rows[name].astype(np.float32) for name in FLOATS}
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


def _join(parts: list[jax.Array], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), dtype)


def _bits(x: jax.Array) -> jax.Array:
    return jnp.asarray(lax.bitcast_convert_type(x, jnp.uint32))
