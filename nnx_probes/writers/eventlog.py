"""One event file: framing, names, session starts, and no torn record on a full disk.

The format is TFRecord: length (uint64), masked CRC-32C of it, the serialized ``Event``, masked CRC-32C of
that; all little-endian. tensorboardX is not used: its queue is lost when the process is killed, a write
error kills its thread and then blocks the caller for ever, and importing any part of it imports torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nnx_probes.errors import WriterError
from nnx_probes.writers.folder import cannot_write, make_folder

__all__ = ["EventLog"]

_STAMP = re.compile(r"events\.out\.tfevents\.(\d{10})(?:\.(\d{9}))?\b")
_MASK = 0xA282EAD8  # of the TFRecord format
_SECOND = 1_000_000_000  # nanoseconds


class EventLog:
    """Appends events to a new file of its own in `folder`.

    Readers go through the files of a folder in the order of their names, so a name starts with the time
    and sorts after every file already there. Each file begins with the format's version and a session
    start. A reader drops the points at and after a start's step: the first start in a folder is at step 0,
    a later one at the step of the first thing written, so that a resumed run replaces what it repeats and
    keeps what came before.

    Cost: one ``write`` a call, no buffer: what `append` returned from survives a kill of the process.

    Args:
      folder: made if missing.
      writer: the name to use in errors.

    Raises:
      WriterError: the folder or the file cannot be made.
    """

    def __init__(self, folder: Path, writer: str = "TensorBoardWriter") -> None:
        # Here and not above: importing nnx_probes.writers stays cheap.
        import crc32c
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._events, self._summaries, self._crc32c = event_pb2, summary_pb2, crc32c.crc32c
        self._writer = writer
        self._lock = threading.Lock()
        self._pending: list[list[Any]] = []
        self._length = self._last_step = 0
        self._torn = self._unsynced = self._closed = False
        make_folder(folder, writer)
        try:
            self.path, self._file, others = _create(folder)
        except OSError as error:
            raise cannot_write(writer, folder, error) from error
        self._started = not others
        first = self._frame(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if self._started:
            first += self._start(0)
        try:
            self._write(first)
        except WriterError:
            os.close(self._file)
            self.path.unlink(missing_ok=True)
            raise

    def append(self, step: int | None, values: Iterable[Any], wall_time: float | None = None) -> None:
        """Writes one event with all `values` (``Summary.Value``), or nothing if there are none.

        Args:
          step: of the event; ``None`` for what belongs to no step (a configuration): it is shown at the
            last step, and in a resumed run waits for the first one.
          values: of the summary.
          wall_time: seconds since the epoch; now if not given.

        Raises:
          WriterError: not written (disk full, closed). The file holds complete records only; a later
            call may succeed.
        """
        listed = list(values)
        if not listed:
            return
        with self._lock:
            if step is None and not self._started:
                self._pending.append(listed)
                return
            at = self._last_step if step is None else int(step)
            data = b"" if self._started else self._start(at)
            for waiting in self._pending:
                data += self._summary(at, waiting, wall_time)
            self._write(data + self._summary(at, listed, wall_time))
            self._started, self._last_step = True, at
            self._pending.clear()

    def sync(self) -> None:
        """Makes what was written survive a power loss too. Cost: one ``fsync`` if there is anything new."""
        with self._lock:
            if self._unsynced and not self._closed:
                try:
                    os.fsync(self._file)
                except OSError as error:
                    raise cannot_write(self._writer, self.path, error) from error
                self._unsynced = False

    def close(self) -> None:
        """Closes the file; again is fine. What waits for a first step that never came is dropped."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)

    def _start(self, step: int) -> bytes:
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        return self._frame(self._events.Event(wall_time=time.time(), step=step, session_log=log))

    def _summary(self, step: int, values: list[Any], wall_time: float | None) -> bytes:
        event = self._events.Event(
            wall_time=time.time() if wall_time is None else wall_time,
            step=step,
            summary=self._summaries.Summary(value=values),
        )
        return self._frame(event)

    def _frame(self, event: Any) -> bytes:
        body: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(body))
        return length + self._checksum(length) + body + self._checksum(body)

    def _checksum(self, data: bytes) -> bytes:
        """The CRC, masked so that a CRC over data with CRCs in it stays a good one."""
        crc = self._crc32c(data)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF)

    def _write(self, data: bytes) -> None:
        if self._closed:
            raise WriterError(f"{self._writer}: {str(self.path)!r} is closed. Write before close().")
        try:
            if self._torn:
                self._cut()
            self._torn = True  # until all of it is there
            written = os.write(self._file, data)
        except OSError as error:
            self._try_cut()
            raise cannot_write(self._writer, self.path, error) from error
        if written != len(data):
            self._try_cut()
            raise WriterError(
                f"{self._writer}: only {written} of {len(data)} bytes went into {str(self.path)!r}; they "
                "were taken back. Expected room on the disk. Free some; later values are written again."
            )
        self._length += written
        self._torn, self._unsynced = False, True

    def _cut(self) -> None:
        os.ftruncate(self._file, self._length)
        self._torn = False

    def _try_cut(self) -> None:
        with contextlib.suppress(OSError):  # stays torn: the next write cuts first
            self._cut()


def _create(folder: Path) -> tuple[Path, int, bool]:
    """Makes a file whose name sorts last; returns it, its descriptor, and whether there were others."""
    taken = [match for name in os.listdir(folder) if (match := _STAMP.match(name))]
    # Without nanoseconds (other writers' names) a file sorts after all of ours of the same second.
    last = max((int(m[1]) * _SECOND + int(m[2] or _SECOND - 1) for m in taken), default=0)
    host = re.sub(r"[^\w-]", "_", socket.gethostname()) or "host"
    stamp = max(time.time_ns(), last + 1)
    while True:
        seconds, rest = divmod(stamp, _SECOND)
        path = folder / f"events.out.tfevents.{seconds:010d}.{rest:09d}.{host}.{os.getpid()}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            return path, os.open(path, flags, 0o666), bool(taken)
        except FileExistsError:
            stamp += 1
