"""What the monitor talks to: all writers at once, behind one thread, never in the way of training."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from nnx_probes.errors import ArgumentError
from nnx_probes.host.alert import Alert
from nnx_probes.host.record import Record
from nnx_probes.writers import tags
from nnx_probes.writers.background import Background, Ticket, remaining
from nnx_probes.writers.base import RecordWriter, Writer
from nnx_probes.writers.destination import check_writer, open_parts
from nnx_probes.writers.markdown import escape, settings_table

__all__ = ["ALERT_TIMEOUT_S", "Fanout"]

RECORD_TIMEOUT_S = 0.05
"""How long a record may hold up training until it is written."""

ALERT_TIMEOUT_S = 5.0
"""How long an alert may hold up training until it is on disk. Then the disk hangs, and training goes on."""

EXIT_TIMEOUT_S = 5.0
"""How long the interpreter's exit may wait for what is still queued when nobody called `close`."""

_LOG = logging.getLogger("nnx_probes")


@dataclass(frozen=True, slots=True)
class _Outlet:
    name: str
    writer: Writer
    records: RecordWriter | None  # the same object, if it takes whole records
    keep_open: bool


class Fanout:
    """Hands everything to all writers, on one daemon thread that the first item starts.

    Training never waits for a record: when `queue_size` items wait, a record (or scalars) is dropped and
    counted. Alerts, marks and the header are never dropped for that; they keep their place in the queue.
    `alert` returns once it is written and flushed everywhere, or after 5 s; it is then logged, written
    when the destination comes back, and no later call waits again until it does.

    A writer that raises is counted in `problems` and said once, at WARNING, to the logger ``nnx_probes``;
    the other writers carry on. A writer that takes no records (clu's) gets scalars and texts.
    What is queued at the interpreter's exit is written then. Values handed in must not change afterwards.

    Cost: some microseconds a call on the caller's thread.

    Args:
      writers: each with the methods of clu's MetricWriter.
      queue_size: items that may wait.
      keep_open: those of the writers that `close` only flushes.

    Attributes:
      problems: writer's name -> how many of its calls failed.

    Raises:
      ArgumentTypeError: something is not a writer.
      ArgumentError: `queue_size` is below 1.
    """

    def __init__(self, writers: Iterable[Writer], *, queue_size: int = 64, keep_open: Iterable[Writer] = ()) -> None:
        if queue_size < 1:
            raise ArgumentError(
                f"Fanout: queue_size is too small: got {queue_size!r}, expected 1 or more. Leave it out for 64."
            )
        open_ids = {id(writer) for writer in keep_open}
        seen: Counter[str] = Counter()
        outlets = []
        for writer in writers:
            name = type(check_writer(writer)).__name__
            seen[name] += 1
            outlets.append(
                _Outlet(
                    name if seen[name] == 1 else f"{name}#{seen[name]}",
                    writer,
                    cast(RecordWriter, writer) if isinstance(writer, RecordWriter) else None,
                    id(writer) in open_ids,
                )
            )
        self._outlets = tuple(outlets)
        self.problems: dict[str, int] = {}
        self._current = ""
        self._closed = self._said_dropped = False
        self._background = Background(queue_size)
        # At exit, and when the last reference goes: what is queued is written. It must not hold `self`.
        self._finalizer = weakref.finalize(self, Background.stop, self._background, EXIT_TIMEOUT_S)

    @classmethod
    def open(cls, destination: Any, *, queue_size: int = 64) -> Fanout:
        """Returns a fanout over `open_destination(destination)` that closes only the writers made here."""
        parts = open_parts(destination)
        given = [writer for writer, made in parts if not made]
        return cls([writer for writer, _ in parts], queue_size=queue_size, keep_open=given)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """The writers, in order."""
        return tuple(outlet.writer for outlet in self._outlets)

    @property
    def dropped(self) -> int:
        """How many records and other items were dropped."""
        return self._background.dropped

    def header(self, header: Mapping[str, Any]) -> None:
        """Writes what the run says about itself."""
        kept = dict(header)

        def write(to: _Outlet) -> None:
            if to.records is not None:
                to.records.write_header(kept)
            else:
                to.writer.write_texts(0, {"run/configuration": settings_table(kept)})

        self._submit(write)

    def record(self, record: Record) -> None:
        """Writes a record; drops it if the queue is full.

        Gives the thread up to 50 ms for the first writer (of a folder: the JSONL file), which needs about one of them: what
        has been handed over is then in that file when this returns, and a killed process loses no more than the probe that
        is still on the device. The other writers follow while training goes on.
        """
        landed = Ticket()

        def write(to: _Outlet) -> None:
            if to.records is not None:
                to.records.write_record(record)
            else:
                to.writer.write_scalars(record.step, tags.scalars(record))

        self._submit(write, droppable=True, landed=landed)

    def alert(self, alert: Alert) -> bool:
        """Writes and flushes an alert; returns whether that was over within 5 s, failed or not."""

        def write(to: _Outlet) -> None:
            if to.records is not None:
                to.records.write_alert(alert)
            else:
                to.writer.write_texts(alert.step, {f"alerts/{alert.rule}": tags.alert_markdown(alert)})
            to.writer.flush()

        if self._submit(write, timeout_s=ALERT_TIMEOUT_S):
            return True
        where = self._current or "the queue"
        _LOG.warning(
            "%s has not taken an alert in time; training goes on, and it is written when that destination "
            "comes back. %s at step %d: %s (%s)",
            *(where, alert.level.name, alert.step, alert.title, alert.rule),
        )
        return False

    def mark(self, step: int, name: str) -> None:
        """Writes a known event."""

        def write(to: _Outlet) -> None:
            if to.records is not None:
                to.records.write_mark(step, name)
            else:
                to.writer.write_texts(step, {"marks": escape(name)})

        self._submit(write)

    def scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes numbers (of the host: a device array would be fetched later, and may be gone by then)."""
        kept = dict(scalars)
        self._submit(lambda to: to.writer.write_scalars(step, kept), droppable=True)

    def flush(self, timeout_s: float = 10) -> bool:
        """Writes all that is queued and flushes the writers; returns whether that was over in time."""
        return self._submit(lambda to: to.writer.flush(), timeout_s=timeout_s, insist=True)

    def close(self, timeout_s: float = 10) -> None:
        """Writes all that is queued, flushes, closes the writers, ends the thread. Again is fine."""
        if self._closed:
            return
        deadline = time.monotonic() + timeout_s

        def write(to: _Outlet) -> None:
            try:
                to.writer.flush()
            finally:
                if not to.keep_open:
                    to.writer.close()

        self._submit(write, timeout_s=timeout_s, insist=True)
        self._closed = True
        left = self._background.stop(remaining(deadline))
        if left:
            _LOG.warning("%s does not come back; closing without it. %d items are not written.", self._current, left)
        self._finalizer.detach()

    def _submit(
        self,
        write: Callable[[_Outlet], None],
        *,
        droppable: bool = False,
        timeout_s: float | None = None,
        insist: bool = False,
        landed: Ticket | None = None,
    ) -> bool:
        """Runs `write` for each outlet on the thread; with a timeout, returns whether that is over.

        `landed` is set after the first outlet, and waited for briefly.
        """
        if not self._outlets or self._background.orphaned:
            return True

        def task() -> None:
            for outlet in self._outlets:
                self._current = outlet.name
                try:
                    write(outlet)
                except Exception as error:
                    self._count(outlet.name, error)
                if landed is not None:
                    landed.set()
            self._current = ""

        ticket = self._background.submit(task, droppable=droppable)
        if ticket is None:
            if not self._said_dropped and not self._closed:
                self._said_dropped = True
                _LOG.warning(
                    "%s is slower than the probes; training goes on, and records are dropped (Fanout.dropped "
                    "counts them). Said once. Probe less often, or write to a faster disk.",
                    self._current or "A writer",
                )
            return False
        if landed is not None:
            return self._background.wait_briefly(landed, RECORD_TIMEOUT_S)
        return timeout_s is None or self._background.wait(ticket, timeout_s, insist=insist)

    def _count(self, name: str, error: Exception) -> None:
        self.problems[name] = self.problems.get(name, 0) + 1
        if self.problems[name] == 1:
            _LOG.warning(
                "%s failed: %s: %s Training goes on; what this destination shows is incomplete. Later "
                "failures of it are only counted (Fanout.problems).",
                *(name, type(error).__name__, str(error).rstrip(". ") + "."),
            )
