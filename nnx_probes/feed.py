"""The loop's data, passed through: how long it waits for a batch, and which batch it got last."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Feed"]


class Feed:
    """Yields the items of `batches` unchanged.

    Attributes:
      last: the batch handed out last, None before the first and after the end.
      wait_s: seconds spent waiting for `batches`, over all items so far.
      items: how many were handed out.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = iter(batches)
        self.last: Any = None
        self.wait_s = 0.0
        self.items = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        self.last = None  # the loop may have let go of it: do not keep it alive while the next one is made
        try:
            batch = next(self._batches)
        finally:
            self.wait_s += time.perf_counter() - began
        self.last = batch
        self.items += 1
        return batch
