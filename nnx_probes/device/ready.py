"""Waiting for what the loop has queued, so that it is not taken for the library's own time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import jax

__all__ = ["seconds_until_ready"]


def seconds_until_ready(arrays: Iterable[Any]) -> float:
    """Waits until `arrays` are computed and returns the seconds that took; passes over what is deleted or no array."""
    began = time.perf_counter()
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.is_deleted():
            x.block_until_ready()
    return time.perf_counter() - began
