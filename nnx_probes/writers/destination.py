"""From what a user names as destination to the writers behind it."""

from __future__ import annotations

import os
from typing import Any

from nnx_probes.errors import ArgumentTypeError
from nnx_probes.writers.base import Writer

__all__ = ["METHODS", "check_writer", "open_destination", "open_parts"]

METHODS = (
    "write_summaries",
    "write_scalars",
    "write_images",
    "write_videos",
    "write_audios",
    "write_texts",
    "write_histograms",
    "write_hparams",
    "flush",
    "close",
)
"""The methods of clu's MetricWriter, all of which a writer must have."""


def open_destination(destination: Any) -> list[Writer]:
    """Returns the writers of a destination.

    Args:
      destination: a folder (str or path): event files, ``probes.jsonl`` and the console; a writer; a
        list or tuple of destinations; ``None`` for nothing.

    Raises:
      ArgumentTypeError: none of these, or an object without some of a writer's methods.
      WriterError: the folder cannot be used.
    """
    return [writer for writer, _ in open_parts(destination)]


def open_parts(destination: Any) -> list[tuple[Writer, bool]]:
    """Returns the writers and, for each, whether it was made here (then it is ours to close)."""
    parts: list[tuple[Writer, bool]] = []
    try:
        _collect(destination, parts)
    except BaseException:
        for writer, made in parts:
            if made:
                writer.close()
        raise
    return parts


def _collect(destination: Any, parts: list[tuple[Writer, bool]]) -> None:
    if destination is None:
        return
    if isinstance(destination, (str, os.PathLike)):
        from nnx_probes.writers.console import ConsoleWriter
        from nnx_probes.writers.jsonl import JsonlWriter
        from nnx_probes.writers.tensorboard import TensorBoardWriter

        parts.append((JsonlWriter(destination), True))  # first: a record counts as handed over when it is in this file
        parts.append((TensorBoardWriter(destination), True))
        parts.append((ConsoleWriter(), True))
    elif isinstance(destination, (list, tuple)):
        for part in destination:
            _collect(part, parts)
    else:
        parts.append((check_writer(destination), False))


def check_writer(writer: Any) -> Writer:
    """Returns `writer` if it has all methods of one.

    Raises:
      ArgumentTypeError: it has not; says which are missing.
    """
    if isinstance(writer, type):
        raise ArgumentTypeError(
            f"the destination is a class: got {writer.__name__}, expected an instance. Call it: {writer.__name__}(...)."
        )
    missing = [name for name in METHODS if not callable(getattr(writer, name, None))]
    if len(missing) == len(METHODS):
        raise ArgumentTypeError(
            f"the destination has the wrong type: got {type(writer).__name__} {writer!r:.80}, expected a "
            'folder (str or path), a writer, a list of these, or None. Pass for example "runs/a".'
        )
    if missing:
        raise ArgumentTypeError(
            f"the destination is not a writer: got {type(writer).__name__} {writer!r:.80}, which lacks "
            f"{', '.join(missing)}. Expected the methods of clu's MetricWriter. Add them; each may be empty."
        )
    return writer  # type: ignore[no-any-return]
