"""Destinations: where records, alerts and marks go.

Names are looked up on first use; importing this package imports no viewer, no protocol buffers and no
jax, tensorflow or torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_probes.writers.base import RecordWriter, Writer
    from nnx_probes.writers.console import ConsoleWriter
    from nnx_probes.writers.destination import open_destination
    from nnx_probes.writers.fanout import Fanout
    from nnx_probes.writers.jsonl import JsonlWriter
    from nnx_probes.writers.jsonl_read import read_jsonl
    from nnx_probes.writers.memory import MemoryWriter
    from nnx_probes.writers.tensorboard import TensorBoardWriter

__all__ = [
    "ConsoleWriter",
    "Fanout",
    "JsonlWriter",
    "MemoryWriter",
    "RecordWriter",
    "TensorBoardWriter",
    "Writer",
    "open_destination",
    "read_jsonl",
]

_HOMES = {
    "ConsoleWriter": "console",
    "Fanout": "fanout",
    "JsonlWriter": "jsonl",
    "MemoryWriter": "memory",
    "RecordWriter": "base",
    "TensorBoardWriter": "tensorboard",
    "Writer": "base",
    "open_destination": "destination",
    "read_jsonl": "jsonl_read",
}
"""Public name -> the module of this package that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from nnx_probes.errors import closest

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{closest(name, __all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next look-up finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
