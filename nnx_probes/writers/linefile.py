"""A file to which whole lines are appended, by several processes if need be."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from nnx_probes.errors import WriterError
from nnx_probes.writers.folder import cannot_write

__all__ = ["LineFile"]


class LineFile:
    """Appends one line with one ``write``: what `append` returned from survives a kill of the process.

    A line that could not be written whole (disk full) is left behind incomplete, because another process
    may have appended since; the next line then begins on a new one. So does the first line after a file
    whose last writer was killed.

    Args:
      path: made if missing; its folder must exist.
      writer: the name to use in errors.

    Raises:
      WriterError: the file cannot be opened, or later: not written.
    """

    def __init__(self, path: Path, writer: str) -> None:
        self.path, self._writer = path, writer
        self._lock = threading.Lock()
        self._closed = self._unsynced = False
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            self._file = os.open(path, flags, 0o666)
            self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
            self._torn = self._regular and _ends_inside_a_line(path)
        except OSError as error:
            raise cannot_write(writer, path, error) from error

    def append(self, lines: bytes) -> None:
        """Writes `lines`, which end in a newline.

        Raises:
          WriterError: not written, or not whole; a later call may succeed.
        """
        with self._lock:
            if self._closed:
                raise WriterError(f"{self._writer}: {str(self.path)!r} is closed. Write before close().")
            data = b"\n" + lines if self._torn else lines
            try:
                written = os.write(self._file, data)
            except OSError as error:
                self._torn = True  # some systems fail after a part; the reader passes over an empty line
                raise cannot_write(self._writer, self.path, error) from error
            self._unsynced = True
            if written != len(data):
                self._torn = self._torn or written > 0
                raise WriterError(
                    f"{self._writer}: only {written} of {len(data)} bytes went into {str(self.path)!r}. "
                    "Expected room on the disk. Free some; later lines are written again."
                )
            self._torn = False

    def sync(self) -> None:
        """Makes what was written survive a power loss too. Cost: one ``fsync`` if there is anything new."""
        with self._lock:
            if self._unsynced and self._regular and not self._closed:
                try:
                    os.fsync(self._file)
                except OSError as error:
                    raise cannot_write(self._writer, self.path, error) from error
                self._unsynced = False

    def close(self) -> None:
        """Closes the file; again is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
