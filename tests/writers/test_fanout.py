from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

from nnx_probes.errors import ArgumentError, ArgumentTypeError
from nnx_probes.host.record import Record
from nnx_probes.writers import Fanout, JsonlWriter, MemoryWriter, TensorBoardWriter, fanout, read_jsonl
from nnx_probes.writers.background import Background

from .samples import alert, points, record

LONG_S = 30.0
"""Longer than anything here may take; only a bug waits for it."""


class ClusShape:
    """What clu's writers have and no more; keeps the calls."""

    def __init__(self):
        self.calls = []

    def write_summaries(self, step, values, metadata=None): ...
    def write_images(self, step, images): ...
    def write_videos(self, step, videos): ...
    def write_audios(self, step, audios, *, sample_rate): ...
    def write_histograms(self, step, arrays, num_buckets=None): ...
    def write_hparams(self, hparams): ...

    def write_scalars(self, step, scalars):
        self.calls.append(("scalars", step, dict(scalars)))

    def write_texts(self, step, texts):
        self.calls.append(("texts", step, dict(texts)))

    def flush(self):
        self.calls.append(("flush",))

    def close(self):
        self.calls.append(("close",))


class Broken(MemoryWriter):
    """Raises on each record."""

    def write_record(self, record):
        raise RuntimeError("the disk is gone")


class Hung(MemoryWriter):
    """Does not come back from a record until it is let go."""

    def __init__(self):
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def write_record(self, record):
        self.entered.set()
        assert self.go.wait(LONG_S)
        super().write_record(record)


@pytest.fixture
def quick(monkeypatch):
    """Alerts wait a twentieth of a second."""
    monkeypatch.setattr(fanout, "ALERT_TIMEOUT_S", 0.05)


def test_everything_reaches_all_writers_in_order_on_one_other_thread():
    threads = set()

    class Watched(MemoryWriter):
        def write_record(self, record):
            threads.add(threading.current_thread())
            super().write_record(record)

    a, b = Watched(), Watched()
    out = Fanout([a, b])
    out.header({"every": 1})
    for step in range(20):
        out.record(record(step))
    out.mark(3, "x")
    out.scalars(4, {"s": 1.0})
    assert out.alert(alert())
    assert len(a.alerts) == 1 and a.flushes >= 1
    out.close()
    for writer in (a, b):
        assert [r.step for r in writer.records] == list(range(20))
        assert (writer.header, writer.marks, writer.scalars) == ({"every": 1}, [(3, "x")], [(4, {"s": 1.0})])
        assert writer.closed
    (thread,) = threads
    assert thread is not threading.current_thread() and thread.daemon and not thread.is_alive()


def test_a_writer_of_clus_shape_gets_scalars_and_texts():
    plain = ClusShape()
    out = Fanout([plain])
    out.header({"every": 1})
    out.record(Record(3, 0.0, {"loss": 2.0, "optimizer.step": 4}))
    out.alert(alert(5))
    out.mark(6, "a | b")
    out.close()
    kinds = [call[0] for call in plain.calls]
    assert kinds == ["texts", "scalars", "texts", "flush", "texts", "flush", "close"]
    assert plain.calls[1] == ("scalars", 3, {"loss": 2.0, "optimizer/step": 4.0, "nonfinite": 0.0})
    assert plain.calls[2][1] == 5 and list(plain.calls[2][2]) == ["alerts/frozen_params"]
    assert plain.calls[4] == ("texts", 6, {"marks": "a &#124; b"})


def test_no_thread_runs_before_the_first_item_or_without_writers():
    before = threading.active_count()
    out, empty = Fanout([MemoryWriter()]), Fanout([])
    empty.record(record(1))
    assert empty.alert(alert()) and empty.flush()
    empty.close()
    assert threading.active_count() == before
    out.close()


def test_a_broken_writer_is_counted_said_once_and_alone_in_it(caplog):
    broken, fine = Broken(), MemoryWriter()
    out = Fanout([broken, fine])
    for step in range(5):
        out.record(record(step))
    assert out.flush()
    assert out.problems == {"Broken": 5} and out.dropped == 0
    assert len(fine.records) == 5
    (said,) = caplog.records
    assert (said.name, said.levelno) == ("nnx_probes", logging.WARNING)
    assert "RuntimeError: the disk is gone. Training goes on; what this destination" in said.getMessage()
    out.close()
    assert broken.closed


def test_two_writers_of_one_class_are_counted_apart():
    out = Fanout([Broken(), Broken()])
    out.record(record(1))
    out.close()
    assert out.problems == {"Broken": 1, "Broken#2": 1}


def test_a_full_queue_drops_records_but_no_alert_and_counts_them(caplog, quick):
    hung = Hung()
    out = Fanout([hung], queue_size=3)
    out.record(record(0))
    assert hung.entered.wait(LONG_S)
    for step in range(1, 11):
        out.record(record(step))
    assert out.dropped == 7
    assert not out.alert(alert(rule="a")) and not out.alert(alert(rule="b"))
    out.mark(1, "x")
    hung.go.set()
    out.close()
    assert [r.step for r in hung.records] == [0, 1, 2, 3]
    assert [a.rule for a in hung.alerts] == ["a", "b"] and hung.marks == [(1, "x")]
    assert sum("records are dropped" in entry.getMessage() for entry in caplog.records) == 1


def test_a_hung_writer_delays_the_first_alert_only_and_the_alert_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(fanout, "ALERT_TIMEOUT_S", 0.2)
    hung = Hung()
    out = Fanout([hung])
    out.record(record(0))
    assert hung.entered.wait(LONG_S)
    start = time.monotonic()
    assert not out.alert(alert())
    first = time.monotonic() - start
    start = time.monotonic()
    for _ in range(50):
        assert not out.alert(alert())
    assert first >= 0.2 and time.monotonic() - start < 5  # not 50 x 0.2 s
    assert "Hung has not taken an alert in time" in caplog.records[0].getMessage()
    assert "ERROR at step 30: No parameter changes (frozen_params)" in caplog.records[0].getMessage()
    hung.go.set()
    assert out.flush()
    assert len(hung.alerts) == 51
    assert out.alert(alert())  # it came back, so alerts wait again
    out.close()


def test_closing_with_a_hung_writer_ends_and_says_so(caplog):
    hung = Hung()
    out = Fanout([hung])
    out.record(record(0))
    assert hung.entered.wait(LONG_S)
    out.record(record(1))
    start = time.monotonic()
    assert not out.flush(timeout_s=0.05)
    out.close(timeout_s=0.05)
    assert time.monotonic() - start < 5
    assert "Hung does not come back; closing without it" in caplog.records[-1].getMessage()
    hung.go.set()


def test_closing_again_and_writing_after_it_do_nothing():
    writer = MemoryWriter()
    out = Fanout([writer])
    out.record(record(0))
    out.close()
    out.close()
    out.record(record(1))
    assert not out.alert(alert())
    assert len(writer.records) == 1


def test_writers_of_the_user_stay_open_and_are_flushed(tmp_path):
    mine = MemoryWriter()
    out = Fanout.open([mine, str(tmp_path)])
    out.record(record(1))
    out.close()
    assert not mine.closed and mine.flushes == 1
    assert len(list(read_jsonl(tmp_path))) == 2


def test_a_mapping_that_changes_after_the_call_is_written_as_it_was():
    writer, values = MemoryWriter(), {"a": 1.0}
    out = Fanout([writer])
    out.scalars(1, values)
    values["a"] = 2.0
    out.close()
    assert writer.scalars == [(1, {"a": 1.0})]


def test_a_full_disk_neither_blocks_nor_raises_and_the_files_stay_readable(tmp_path, monkeypatch, caplog):
    writers = [TensorBoardWriter(tmp_path), JsonlWriter(tmp_path)]
    out = Fanout(writers, queue_size=1000)
    out.record(record(0))
    assert out.flush()
    real, full = os.write, threading.Event()

    def write(file, data):
        if full.is_set():
            real(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    full.set()
    for step in range(1, 50):
        out.record(record(step))
    assert out.alert(alert())
    full.clear()
    out.record(record(100))
    out.close()
    assert out.problems["TensorBoardWriter"] == 50 and out.problems["JsonlWriter"] == 50
    assert sum("No space left on device" in entry.getMessage() for entry in caplog.records) == 2
    assert [step for step, _ in points(tmp_path, "loss")] == [0, 100]
    assert 100 in [item.step for item in read_jsonl(tmp_path) if isinstance(item, Record)]


def test_a_device_without_room_is_counted_and_said_once(tmp_path, caplog):
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    out = Fanout([JsonlWriter(tmp_path / "full.jsonl")])
    for step in range(5):
        out.record(record(step))
    assert out.alert(alert())
    out.close()
    assert out.problems == {"JsonlWriter": 7}  # five records, an alert, the closing line
    assert len(caplog.records) == 1


def test_what_is_queued_at_exit_is_written_without_a_word(tmp_path):
    program = textwrap.dedent("""
        import sys
        from nnx_probes.host.record import Record
        from nnx_probes.writers import Fanout
        out = Fanout.open(sys.argv[1], queue_size=1000)
        for step in range(500):
            out.record(Record(step, 1.0, {"loss": float(step)}))
    """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert len(points(tmp_path, "loss")) == 500


def test_an_item_at_exit_is_written_even_when_no_thread_can_start(tmp_path):
    program = textwrap.dedent("""
        import atexit, sys
        from nnx_probes.host.record import Record
        from nnx_probes.writers import Fanout
        out = Fanout.open(sys.argv[1])
        atexit.register(lambda: (out.record(Record(1, 1.0, {"loss": 1.0})), out.close()))
    """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == "" and points(tmp_path, "loss") == [(1, 1.0)]


def test_a_hung_writer_does_not_keep_the_interpreter_from_ending():
    program = textwrap.dedent("""
        import threading
        from nnx_probes.host.record import Record
        from nnx_probes.writers import Fanout, MemoryWriter, fanout
        fanout.EXIT_TIMEOUT_S = 0.1
        class Hung(MemoryWriter):
            def write_record(self, record):
                threading.Event().wait()
        Fanout([Hung()]).record(Record(1, 1.0, {}))
        kept = Fanout([Hung()])
        kept.record(Record(1, 1.0, {}))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=LONG_S)
    assert done.stderr == ""


def test_a_fanout_that_is_dropped_ends_its_thread():
    writer = MemoryWriter()
    out = Fanout([writer])
    out.record(record(1))
    assert out.flush()
    thread = out._background._thread
    gone = weakref.ref(out)
    del out
    gc.collect()
    assert gone() is None
    thread.join(LONG_S)
    assert not thread.is_alive() and len(writer.records) == 1


def test_a_task_that_waits_for_its_own_thread_does_not_hang():
    background = Background(4)
    seen = []

    def task():
        inner = background.submit(lambda: None)
        seen.append(background.wait(inner, LONG_S))

    ticket = background.submit(task)
    assert background.wait(ticket, LONG_S) and seen == [False]
    assert background.stop(LONG_S) == 0


def test_wrong_arguments_are_errors_in_words():
    with pytest.raises(ArgumentTypeError, match="expected a folder"):
        Fanout([3])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="queue_size is too small: got 0"):
        Fanout([], queue_size=0)
