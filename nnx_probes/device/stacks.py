"""Many arrays measured with few instructions.

XLA compiles some instructions for each statistic of each array, and its time grows faster than their number. So small
arrays of one shape and type are copied next to each other, which costs next to nothing, and one reduction over the stack
stands for hundreds; and large arrays of one kind share a program of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Stacks", "shares"]

_SMALL = 1 << 16
"""Bytes up to which an array is worth copying."""
_SHARE = 16


class Stacks:
    """Arrays, those that are small and alike stacked along a new first axis.

    Args:
      arrays: device arrays.
      together: whether to stack at all; arrays that are spread over devices are better left where they lie.
    """

    def __init__(self, arrays: Sequence[jax.Array], *, together: bool) -> None:
        groups = _alike(arrays) if together else [[i] for i in range(len(arrays))]
        rows = [part for group in groups for part in ([group] if _small(arrays[group[0]]) else [[i] for i in group])]
        self._parts = [(arrays[r[0]] if len(r) == 1 else jnp.stack([arrays[i] for i in r]), len(r)) for r in rows]
        order = np.array([i for part in rows for i in part])
        self._order = None if np.array_equal(order, np.arange(len(order))) else order

    def each(self, of: Callable[..., Any], *beside: jax.Array) -> jax.Array:
        """Returns ``of(array, *row)`` for each array, stacked in the arrays' order; `row` are the entries of `beside`."""
        if self._order is not None:
            beside = tuple(x[self._order] for x in beside)
        found, at = [], 0
        for x, n in self._parts:
            rows = [b[at : at + n] for b in beside]
            found.append(of(x, *(r[0] for r in rows))[None] if n == 1 else jax.vmap(of)(x, *rows))
            at += n
        together = jnp.concatenate(found)
        return together if self._order is None else together[np.argsort(self._order)]


def shares(arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the rows of `arrays` in parts that are compiled apart: equal ones are then compiled once.

    Of large arrays of one kind, 16 make a part; what is left over, and all small arrays, make one more.
    """
    rest: list[int] = []
    found: list[list[int]] = []
    for group in _alike(arrays):
        whole = 0 if _small(arrays[group[0]]) or len(group) < 2 * _SHARE else len(group) // _SHARE * _SHARE
        found += [group[i : i + _SHARE] for i in range(0, whole, _SHARE)]
        rest += group[whole:]
    return [*found, sorted(rest)] if rest else found


def _small(x: Any) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) and x.size * x.dtype.itemsize <= _SMALL


def _alike(arrays: Sequence[jax.Array]) -> list[list[int]]:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, x in enumerate(arrays):
        groups.setdefault((x.shape, x.dtype), []).append(i)
    return list(groups.values())
