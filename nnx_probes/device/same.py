"""Whether an object is the one seen last, without keeping it alive and without trusting its ``id``."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["Same"]

_CONSTANTS = (str, int, float, type(None), type(...))


class Same:
    """Remembers one object weakly.

    The ``id`` of an object that is gone is soon given to another one, often to the very one that took its place. Tuples
    (optax's transformations, NNX's filters) are remembered by their entries. What Python cannot refer to weakly (a dict)
    is never the same: it may hold arrays, and those die when they are donated.
    """

    def __init__(self) -> None:
        self._kept: Any = _Nothing

    def turn_to(self, x: Any) -> bool:
        """Remembers `x`; returns whether it is another object than the one before."""
        other = not _is(self._kept, x)
        self._kept = _weakly(x)
        return other


class _Nothing:
    """Stands for what cannot be remembered."""


def _weakly(x: Any) -> Any:
    if isinstance(x, _CONSTANTS):
        return x
    if isinstance(x, tuple):
        return tuple(map(_weakly, x))
    try:
        return weakref.ref(x)
    except TypeError:
        return _Nothing


def _is(kept: Any, x: Any) -> bool:
    if isinstance(kept, weakref.ref):
        return x is not None and kept() is x
    if isinstance(kept, tuple):
        return isinstance(x, tuple) and len(x) == len(kept) and all(map(_is, kept, x))
    return kept is not _Nothing and type(kept) is type(x) and bool(kept == x)
