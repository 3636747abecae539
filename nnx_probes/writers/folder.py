"""Checks and makes the folder a writer was given."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from nnx_probes.errors import ArgumentError, ArgumentTypeError, WriterError

__all__ = ["as_path", "make_folder"]


def as_path(value: Any, writer: str) -> Path:
    """Returns `value` as a path.

    Raises:
      ArgumentTypeError: not a str or a path of str.
      ArgumentError: empty, or an address of another machine.
    """
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise ArgumentTypeError(
            f"{writer}: the folder has the wrong type: got {type(value).__name__} {value!r:.80}, expected a "
            'str or a pathlib.Path. Pass for example "runs/a".'
        )
    if not given or "\0" in given:
        raise ArgumentError(
            f"{writer}: the folder is not a name: got {given!r}, expected the path of a folder. "
            'Pass for example "runs/a", or "." for the current folder.'
        )
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", given):
        raise ArgumentError(
            f"{writer}: the folder is on another machine: got {given!r}, expected a local folder. Write to a "
            "local folder and copy it, or pass a clu writer that can write there."
        )
    return Path(given)


def make_folder(folder: Path, writer: str) -> Path:
    """Makes `folder` (and its parents) unless it is there, and returns it.

    Raises:
      WriterError: it cannot be made, or is something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        blocking = next((p for p in (folder, *folder.parents) if p.exists() and not p.is_dir()), folder)
        raise WriterError(
            f"{writer}: cannot use {str(folder)!r}: {str(blocking)!r} is a file, expected a folder. "
            "Choose another folder, or move that file away."
        ) from error
    except OSError as error:
        raise cannot_write(writer, folder, error) from error
    return folder


def cannot_write(writer: str, path: Path, error: OSError) -> WriterError:
    """Returns the error to raise when the system refuses `path`."""
    return WriterError(
        f"{writer}: cannot write to {str(path)!r}: {error.strerror or error}. Expected a folder that this "
        "process may make and write files in. Choose another one, or change its permissions or free space."
    )
