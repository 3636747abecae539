"""One daemon thread that runs tasks in order, for a caller that must never wait long."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Background", "Ticket"]

MAX_KEPT = 4096
"""Tasks that may wait although they are never dropped for a full queue. Only a destination that hangs
for good gets there; then memory matters more."""

Ticket = threading.Event
"""Set when its task has run."""


class Background:
    """Runs tasks on one daemon thread, started by the first task.

    A droppable task is dropped and counted when `queue_size` tasks wait; others always wait their turn.
    After a wait has timed out, `wait` does not wait again until a task finishes: a hung disk delays the
    caller once, not once a call.

    Cost: a lock and a notification a task, some microseconds.

    Args:
      queue_size: tasks that may wait before droppable ones are dropped.

    Attributes:
      dropped: how many tasks were dropped.
    """

    def __init__(self, queue_size: int) -> None:
        self._size = queue_size
        self._waiting: deque[tuple[Callable[[], None], Ticket]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = self._stalled = self._lagging = False
        self._process = os.getpid()
        self.dropped = 0

    @property
    def orphaned(self) -> bool:
        """Whether this is a forked child, into which the thread did not come along: the parent writes what waits."""
        return os.getpid() != self._process

    def submit(self, task: Callable[[], None], *, droppable: bool = False) -> Ticket | None:
        """Queues `task`, which must not raise; returns its ticket, or ``None`` if it was dropped."""
        ticket = Ticket()
        with self._changed:
            if self._stopping or len(self._waiting) >= (self._size if droppable else MAX_KEPT):
                self.dropped += 1
                return None
            self._waiting.append((task, ticket))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="nnx_probes writers", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:  # the interpreter is shutting down: no thread any more
                    self._waiting.pop()
                    task()
                    ticket.set()
            else:
                self._changed.notify()
        return ticket

    def wait_briefly(self, ticket: Ticket, timeout_s: float) -> bool:
        """Returns whether the task has run within `timeout_s`; after a timeout it no longer waits until a task finishes."""
        if threading.current_thread() is self._thread or self._stalled or self._lagging:
            return ticket.is_set()
        self._lagging = not ticket.wait(timeout_s)
        return not self._lagging

    def wait(self, ticket: Ticket, timeout_s: float, *, insist: bool = False) -> bool:
        """Returns whether the task has run within `timeout_s`; `insist`: wait after a timeout too."""
        if threading.current_thread() is self._thread:
            return ticket.is_set()  # waiting for oneself
        done = ticket.wait(0 if self._stalled and not insist else timeout_s)
        if not done:
            self._stalled = True
        return done

    def stop(self, timeout_s: float) -> int:
        """Lets the thread finish what waits, for `timeout_s` at most; returns how many tasks were not run.

        Later tasks are dropped. May be called again.
        """
        if self.orphaned:
            return 0
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                with self._changed:
                    return len(self._waiting) + 1
        return 0

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._stopping:
                        return
                    self._changed.wait()
                task, ticket = self._waiting.popleft()
            task()
            del task  # it holds the writers; do not keep them while idle
            self._stalled = self._lagging = False
            ticket.set()


def remaining(deadline: float) -> float:
    """Returns the seconds until `deadline` (of ``time.monotonic``), at least 0."""
    return max(0.0, deadline - time.monotonic())
