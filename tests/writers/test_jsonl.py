from __future__ import annotations

import base64
import errno
import json
import os
import subprocess
import sys
import textwrap
import time
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nnx_probes.errors import ArgumentTypeError, WriterError
from nnx_probes.host.record import Record
from nnx_probes.writers import JsonlWriter, RecordWriter, Writer, read_jsonl
from nnx_probes.writers.jsonl_read import Header, Mark
from nnx_probes.writers.jsonl_values import decode, encode

from .samples import PARAMS, alert, points, record, same_record, same_value

FLOAT32_BITS = hnp.arrays(np.uint32, st.integers(0, 12)).map(lambda bits: bits.view(np.float32))
VALUES = st.dictionaries(
    st.text(max_size=6),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=6),
        st.sampled_from(["nan", "inf", "-inf"]),
        st.lists(st.text(max_size=4)).map(tuple),
        FLOAT32_BITS,
        hnp.arrays(hnp.integer_dtypes(endianness="=") | hnp.boolean_dtypes(), st.integers(0, 5)),
        hnp.arrays(hnp.floating_dtypes(endianness="=", sizes=(16, 64)), hnp.array_shapes(min_dims=1, min_side=0)),
    ),
    max_size=6,
)


def _lines(path):
    def no_constants(name):
        raise AssertionError(f"{name} is not strict JSON")

    return [json.loads(line, parse_constant=no_constants) for line in path.read_bytes().splitlines()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(values=VALUES, step=st.integers(), time_s=st.floats())
def test_a_record_is_read_back_as_it_was_written(tmp_path, values, step, time_s):
    path = tmp_path / "one.jsonl"
    path.unlink(missing_ok=True)
    written = Record(step, time_s, values, {"params": PARAMS})
    writer = JsonlWriter(path)
    writer.write_record(written)
    writer.close()
    assert [row["kind"] for row in _lines(path)] == ["leaves", "probe", "close"]
    reader = read_jsonl(path)
    _, found = reader
    assert same_record(written, found)
    assert reader.skipped == []


@given(FLOAT32_BITS)
def test_every_float32_is_read_back_bit_for_bit(values):
    text = json.dumps(encode(values), allow_nan=False)
    assert same_value(values, decode(json.loads(text)))


def test_float32_is_written_with_its_own_shortest_digits():
    assert encode(np.array([0.1, 1e-45, -0.0, np.inf, -np.inf, np.nan], np.float32))["data"] == [
        *(0.1, 1e-45, -0.0, "inf", "-inf", "nan")
    ]


def test_a_whole_range_of_float32_survives_the_two_roundings():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    for values in np.array_split(bits.view(np.float32), 4000):
        assert "data" in encode(values) and same_value(values, decode(encode(values)))


@given(
    hnp.arrays(
        st.one_of(
            hnp.integer_dtypes(endianness="="), hnp.floating_dtypes(endianness="=", sizes=(16, 32, 64)), st.just("bool")
        ),
        st.sampled_from([(64,), (65,), (8, 9), (1, 200), (4, 4, 4)]),
    )
)
def test_a_long_array_is_packed_and_read_back_bit_for_bit(values):
    row = json.loads(json.dumps(encode(values), allow_nan=False))
    found = decode(row)
    assert "packed" in row and found.dtype == values.dtype and found.shape == values.shape
    assert found.tobytes() == values.tobytes()


def test_the_layout_of_packed_numbers_is_the_documented_one():
    """By hand, for those who read the file without this package."""
    values = np.random.default_rng(0).normal(size=100).astype("<f4")
    raw = zlib.decompress(base64.b64decode(encode(values)["packed"]))
    assert np.frombuffer(raw, np.uint8).reshape(4, -1).T.tobytes() == values.tobytes()


def test_a_probe_of_many_leaves_takes_less_than_five_bytes_a_value():
    rng = np.random.default_rng(0)
    norms = {f"params.{i}": np.exp(rng.normal(size=1000)).astype(np.float32) for i in range(6)}
    assert len(json.dumps({name: encode(value) for name, value in norms.items()})) < 5 * 6000


@pytest.mark.parametrize("text", ["", "AAAA", "not base64", "eJwDAAAAAAE="])
def test_packed_numbers_that_are_damaged_are_an_error_of_a_known_kind(text):
    with pytest.raises((ValueError, zlib.error)):
        decode({"dtype": "float32", "packed": text, "shape": [70]})


def test_small_float_types_are_kept_as_float32():
    assert same_value(decode(encode(np.array([1.5, 2], ml_dtypes.bfloat16))), np.array([1.5, 2], np.float32))


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), np.array([1j]), b"x"])
def test_what_json_lacks_is_kept_as_text(value):
    assert isinstance(decode(encode(value)), str)


def test_a_numpy_number_keeps_its_type():
    assert same_value(decode(encode(np.float32(0.1))), np.float32(0.1))


def test_alerts_marks_and_headers_are_read_back_equal(tmp_path):
    writer = JsonlWriter(tmp_path)
    header = {"versions": {"jax": "0.10"}, "every": 100, "paths": ("a", "b"), "rate": float("inf")}
    writer.write_header(header)
    writer.write_mark(step=3, name="data switched\n")
    writer.write_alert(alert(values={"z": float("inf"), "n": 2.0}))
    writer.close()
    found = list(read_jsonl(tmp_path))
    assert isinstance(found[0], Header) and found[0].values == header and found[0].run == writer.run
    assert found[1:] == [Mark(3, "data switched\n"), alert(values={"z": float("inf"), "n": 2.0})]


def test_a_table_of_leaves_is_written_once_and_before_the_probe(tmp_path):
    other = type(PARAMS)("params", ("a",), ("Param",), ((),), ("float32",), (True,))
    writer = JsonlWriter(tmp_path)
    for step, leaves in enumerate([PARAMS, PARAMS, other, PARAMS]):
        writer.write_record(record(step, leaves=leaves))
    writer.close()
    kinds = [row["kind"] for row in _lines(writer.path)]
    assert kinds == ["leaves", "probe", "probe", "leaves", "probe", "probe", "close"]
    found = [item.leaves["params"] for item in read_jsonl(tmp_path) if isinstance(item, Record)]
    assert found == [PARAMS, PARAMS, other, PARAMS]


def test_two_runs_in_one_file_stay_apart(tmp_path):
    first, second = JsonlWriter(tmp_path), JsonlWriter(tmp_path)
    for step in range(3):
        first.write_record(record(step))
        second.write_record(record(step + 100))
    first.close()
    second.close()
    steps = [item.step for item in read_jsonl(tmp_path, run=second.run) if isinstance(item, Record)]
    assert steps == [100, 101, 102]
    reader = read_jsonl(tmp_path)
    runs = [reader.run for item in reader if isinstance(item, Record)]
    assert runs == [first.run, second.run] * 3 and reader.runs == [first.run, second.run]


def test_calls_shaped_as_clus_work_by_position_and_by_keyword(tmp_path, caplog):
    writer = JsonlWriter(folder_or_file=tmp_path)
    assert isinstance(writer, Writer) and isinstance(writer, RecordWriter)
    writer.write_scalars(1, {"a": np.float32(0.1), "b": np.array(float("nan"))})
    writer.write_scalars(step=np.int64(2), scalars={"a": 1})
    writer.write_texts(step=1, texts={"t": "x"})
    writer.write_histograms(step=1, arrays={"h": np.array([1.0, np.nan])}, num_buckets={"h": 2})
    writer.write_images(step=1, images={})
    writer.write_videos(step=1, videos={})
    writer.write_audios(step=1, audios={}, sample_rate=8)
    writer.write_audios(2, {}, sample_rate=8)
    writer.write_summaries(step=1, values={"s": np.zeros((2, 2), np.float32)}, metadata=None)
    writer.write_hparams(hparams={"rate": 0.1})
    writer.flush()
    writer.close()
    rows = _lines(writer.path)
    assert [r["kind"] for r in rows] == ["scalars", "scalars", "text", "histogram", "scalars", "hparams", "close"]
    assert {r["run"] for r in rows} == {writer.run}
    assert rows[3]["counts"] == [0, 1] and rows[3]["nonfinite"] == 1
    assert len(caplog.records) == 3
    reader = read_jsonl(tmp_path)
    assert list(reader) == [] and reader.skipped == []


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_skipped_and_the_next_run_begins_on_a_new_line(tmp_path, cut):
    first = JsonlWriter(tmp_path)
    first.write_record(record(1))
    first.write_record(record(2))
    with first.path.open("r+b") as file:
        file.truncate(first.path.stat().st_size - cut)
    second = JsonlWriter(tmp_path)
    second.write_record(record(3))
    second.close()
    first.close()
    reader = read_jsonl(tmp_path)
    steps = [item.step for item in reader if isinstance(item, Record)]
    if cut == 1:  # only the newline is missing
        assert steps == [1, 2, 3] and reader.skipped == []
    else:
        assert steps == [1, 3] and [number for number, _ in reader.skipped] == [3]


def test_a_file_that_ends_inside_a_line_says_so(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write_record(record(1))
    with writer.path.open("ab") as file:
        file.write(b'{"kind":"probe","ru')
    reader = read_jsonl(tmp_path)
    assert len(list(reader)) == 2
    assert reader.skipped == [(3, "cut off: the file ends inside the line")]
    writer.close()


def test_damaged_lines_are_skipped_with_a_reason(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write_record(record(1))
    bad = [
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"kind": "probe"}',
        b'{"kind": "poem", "run": "x"}',
        b'{"kind":"alert","run":"x","step":1,"rule":"r","level":"WORSE"}',
        b"",
        b'{"kind":"probe","run":"x","step":1,"time_s":0,"leaves":{"params":"gone"},"values":{}}',
        b'{"kind":"probe","run":"x","step":1,"time_s":0,"leaves":{},"values":{"a":{"dtype":"object","data":[1]}}}',
    ]
    with writer.path.open("ab") as file:
        file.write(b"\n".join(bad) + b"\n")
    writer.write_record(record(2))
    writer.close()
    reader = read_jsonl(tmp_path)
    assert [item.step for item in reader if isinstance(item, Record)] == [1, 1, 2]
    assert [number for number, _ in reader.skipped] == [3, 4, 5, 6, 7, 9, 10]
    assert "no field 'run'" in reader.skipped[2][1]
    assert "unknown kind 'poem'" in reader.skipped[3][1]
    assert "leaves of params" in reader.skipped[5][1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_no_damage_of_the_bytes_makes_reading_raise(tmp_path, data):
    path = tmp_path / "hurt.jsonl"
    if not (tmp_path / "whole.jsonl").exists():
        writer = JsonlWriter(tmp_path / "whole.jsonl")
        writer.write_header({"a": 1})
        writer.write_record(record(1))
        writer.write_alert(alert())
        writer.close()
    raw = bytearray((tmp_path / "whole.jsonl").read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, 1000))  # the file's length differs by some digits of a time
        raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    list(read_jsonl(path))


def test_a_short_write_costs_one_line_only(tmp_path, monkeypatch):
    writer = JsonlWriter(tmp_path)
    writer.write_record(record(1))
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: real(file, data[:10]))
        with pytest.raises(WriterError, match="only 10 of"):
            writer.write_record(record(2))
    writer.write_record(record(3))
    writer.close()
    reader = read_jsonl(tmp_path)
    assert [item.step for item in reader if isinstance(item, Record)] == [1, 3]
    assert len(reader.skipped) == 1


def test_a_table_that_could_not_be_written_is_written_later(tmp_path, monkeypatch):
    writer = JsonlWriter(tmp_path)

    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(WriterError, match="No space left"):
            writer.write_record(record(1))
    writer.write_record(record(2))
    writer.close()
    _, found = read_jsonl(tmp_path)
    assert found.leaves == {"params": PARAMS}


def test_a_device_without_room_is_an_error_of_the_call(tmp_path):
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    writer = JsonlWriter(tmp_path / "full.jsonl")
    for _ in range(2):
        with pytest.raises(WriterError, match="No space left on device"):
            writer.write_record(record(1))
    with pytest.raises(WriterError):
        writer.close()
    writer.close()


def test_a_kill_loses_nothing_that_was_written(tmp_path):
    program = textwrap.dedent("""
        import os, signal, sys
        from nnx_probes.writers import Fanout
        from nnx_probes.host.record import Record
        fanout = Fanout.open(sys.argv[1])
        fanout.header({"a": 1})
        for step in range(50):
            fanout.record(Record(step, 1.0, {"loss": float(step)}))
        assert fanout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    reader = read_jsonl(tmp_path)
    assert [item.step for item in reader if isinstance(item, Record)] == list(range(50))
    assert reader.skipped == []
    assert points(tmp_path, "loss") == [(step, float(step)) for step in range(50)]


def test_writing_is_quick_for_many_leaves(tmp_path):
    n = 600
    many = type(PARAMS)(
        *("params", tuple(f"layers.{i}.kernel" for i in range(n)), ("Param",) * n),
        *(((8, 8),) * n, ("float32",) * n, (True,) * n),
    )
    writer = JsonlWriter(tmp_path)
    writer.write_record(record(0, leaves=many))
    start = time.perf_counter()
    for step in range(10):
        writer.write_record(record(step, leaves=many))
    assert time.perf_counter() - start < 2  # 10 ms here; the limit is for a busy machine
    writer.close()


def test_what_is_no_path_or_no_file_is_an_error_in_words(tmp_path):
    with pytest.raises(ArgumentTypeError, match="JsonlWriter: the folder has the wrong type: got int 3"):
        JsonlWriter(3)
    (tmp_path / "taken").write_text("")
    with pytest.raises(WriterError, match="taken' is a file, expected a folder"):
        JsonlWriter(tmp_path / "taken")
    with pytest.raises(WriterError, match=r"read_jsonl: no file .*Check the path"):
        read_jsonl(tmp_path / "nothing.jsonl")
