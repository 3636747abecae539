"""The first rows of a batch's array, brought to the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Rows", "queue_rows"]

_LARGEST = 1 << 16


class Rows:
    """Rows on their way to the host: a copy, so that the loop may donate or overwrite its own."""

    def __init__(self, copy: Any) -> None:
        self._copy = copy

    def ready(self) -> bool:
        """Whether `read` would return without waiting for the device."""
        ready = getattr(self._copy, "is_ready", None)
        return ready is None or bool(ready())

    def read(self) -> np.ndarray:
        """Returns them."""
        return np.asarray(jax.device_get(self._copy))


def queue_rows(x: Any) -> Rows | None:
    """Queues the copy of as many whole rows (entries of axis 0, one at least) as fit into 65,536 elements.

    None for what has no rows or cannot be read here: no array, 0-d, empty, deleted, traced, spread over other processes.
    Does not wait: on a device the copy comes after the training step that was queued before it.
    """
    if not hasattr(x, "dtype") or not getattr(x, "ndim", 0) or not x.size:
        return None
    rows = max(1, _LARGEST * x.shape[0] // x.size)
    if not isinstance(x, jax.Array):
        return Rows(np.array(x[:rows]))
    if isinstance(x, jax.core.Tracer) or x.is_deleted() or not x.is_fully_addressable:
        return None
    copy = jnp.copy(x) if rows >= x.shape[0] else jax.lax.slice_in_dim(x, 0, rows)
    copy.copy_to_host_async()
    return Rows(copy)
