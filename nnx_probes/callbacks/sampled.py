"""The first rows of a batch's array, on the host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

__all__ = ["first_rows"]

_LARGEST = 1 << 16


def first_rows(x: Any) -> np.ndarray | None:
    """Returns as many whole rows (entries of axis 0, one at least) as fit into 65,536 elements.

    None for what has no rows or cannot be read here: no array, 0-d, empty, deleted, traced, spread over other processes.
    Copies at most that from the device, and waits for it.
    """
    if not hasattr(x, "dtype") or not getattr(x, "ndim", 0) or not x.size:
        return None
    rows = max(1, _LARGEST * x.shape[0] // x.size)
    if isinstance(x, jax.Array):
        if isinstance(x, jax.core.Tracer) or x.is_deleted() or not x.is_fully_addressable:
            return None
        x = jax.device_get(x if rows >= x.shape[0] else jax.lax.slice_in_dim(x, 0, rows))
    return np.asarray(x)[:rows]
