from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nnx_probes.errors import WriterError
from nnx_probes.writers import TensorBoardWriter
from nnx_probes.writers.eventlog import EventLog
from nnx_probes.writers.summary import Summaries

from .samples import accumulate, points, texts


def _files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_names_are_unique_and_sort_by_time_within_one_second(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 1_800_000_000_000_000_005)
    logs = [EventLog(tmp_path) for _ in range(5)]
    assert _files(tmp_path) == [log.path.name for log in logs]
    for log in logs:
        log.close()


def test_a_clock_that_went_back_still_gives_the_last_name(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 1_800_000_000_000_000_000)
    EventLog(tmp_path).close()
    (tmp_path / "events.out.tfevents.1800000001.otherhost").write_bytes(b"")
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    log = EventLog(tmp_path)
    log.close()
    assert _files(tmp_path)[-1] == log.path.name


def test_a_name_has_what_tensorboard_looks_for(tmp_path):
    log = EventLog(tmp_path)
    log.close()
    assert re.fullmatch(rf"events\.out\.tfevents\.\d{{10}}\.\d{{9}}\.[\w-]+\.{os.getpid()}", log.path.name)


def test_two_writers_at_once_do_not_overwrite_each_other(tmp_path):
    first, second = TensorBoardWriter(tmp_path), TensorBoardWriter(tmp_path)
    first.write_scalars(1, {"a": 1.0})
    second.write_scalars(2, {"b": 2.0})
    first.close()
    second.close()
    assert points(tmp_path, "a") == [(1, 1.0)] and points(tmp_path, "b") == [(2, 2.0)]


def test_a_resumed_run_has_neither_duplicates_nor_losses(tmp_path):
    first = TensorBoardWriter(tmp_path)
    first.write_header({"launch": 1})
    for step in range(0, 60, 10):
        first.write_scalars(step, {"loss": float(step)})
    first.close()
    second = TensorBoardWriter(tmp_path)
    second.write_header({"launch": 2})
    for step in range(30, 80, 10):
        second.write_scalars(step, {"loss": step + 0.5})
    second.close()
    assert points(tmp_path, "loss") == [
        *[(step, float(step)) for step in (0, 10, 20)],
        *[(step, step + 0.5) for step in (30, 40, 50, 60, 70)],
    ]
    assert [step for step, _ in texts(tmp_path, "run/configuration")] == [0, 30]


def test_a_third_start_that_writes_nothing_loses_nothing(tmp_path):
    first = TensorBoardWriter(tmp_path)
    first.write_scalars(5, {"loss": 1.0})
    first.close()
    second = TensorBoardWriter(tmp_path)
    second.write_header({"a": 1})
    second.flush()
    second.close()
    assert points(tmp_path, "loss") == [(5, 1.0)]


def test_many_threads_write_whole_records(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: writer.write_scalars(0, {f"t{i}": float(i)}), range(200)))
    writer.close()
    assert len(accumulate(tmp_path).Tags()["scalars"]) == 200


@pytest.mark.parametrize("short", [0, 1, 13])
def test_a_short_write_is_taken_back_and_later_writes_succeed(tmp_path, monkeypatch, short):
    writer = TensorBoardWriter(tmp_path)
    writer.write_scalars(1, {"a": 1.0})
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: real(file, data[:short]))
        with pytest.raises(WriterError, match=f"only {short} of .* bytes"):
            writer.write_scalars(2, {"a": 2.0})
    writer.write_scalars(3, {"a": 3.0})
    writer.close()
    assert points(tmp_path, "a") == [(1, 1.0), (3, 3.0)]


def test_a_record_that_could_not_be_taken_back_is_cut_before_the_next_one(tmp_path, monkeypatch):
    writer = TensorBoardWriter(tmp_path)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: real(file, data[:7]))
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        with pytest.raises(WriterError):
            writer.write_scalars(2, {"a": 2.0})
    writer.write_scalars(3, {"a": 3.0})
    writer.close()
    assert points(tmp_path, "a") == [(3, 3.0)]


def test_a_full_disk_is_an_error_that_says_so(tmp_path, monkeypatch):
    writer = TensorBoardWriter(tmp_path)

    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(WriterError, match="No space left on device"):
            writer.write_scalars(1, {"a": 1.0})
    writer.close()


def test_a_real_limit_of_the_kernel_leaves_whole_records_and_recovers(tmp_path):
    program = textwrap.dedent("""
        import resource, sys
        from nnx_probes.errors import WriterError
        from nnx_probes.writers import TensorBoardWriter
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        writer = TensorBoardWriter(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        failed = 0
        for step in range(40):
            try:
                writer.write_scalars(step, {"loss": float(step)})
            except WriterError:
                failed += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.write_scalars(100, {"loss": 100.0})
        writer.close()
        print(failed)
    """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    failed = int(done.stdout)
    assert 0 < failed < 40
    steps = [step for step, _ in points(tmp_path, "loss")]
    assert steps == [*range(40 - failed), 100]


def test_writing_after_close_is_an_error_and_closing_again_is_not(tmp_path):
    log = EventLog(tmp_path)
    log.close()
    log.close()
    with pytest.raises(WriterError, match="is closed"):
        log.append(1, [Summaries().scalar("a", 1)])


def test_no_space_at_the_start_leaves_no_file_behind(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: 0)
        with pytest.raises(WriterError):
            EventLog(tmp_path)
    assert _files(tmp_path) == []
