from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from nnx_probes.errors import ArgumentError, ArgumentTypeError, WriterError
from nnx_probes.host.record import Leaves, Record
from nnx_probes.writers import RecordWriter, TensorBoardWriter, Writer

from .samples import PARAMS, accumulate, alert, points, record, texts


def test_it_has_both_shapes(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    assert isinstance(writer, Writer) and isinstance(writer, RecordWriter)
    writer.close()


def test_calls_shaped_as_clus_work_by_position_and_by_keyword(tmp_path, caplog):
    writer = TensorBoardWriter(str(tmp_path))
    writer.write_scalars(1, {"a": np.float32(1)})
    writer.write_scalars(step=2, scalars={"a": np.array(2.0)})
    writer.write_texts(1, {"t": "x"})
    writer.write_texts(step=2, texts={"t": "y"})
    writer.write_histograms(1, {"h": np.arange(10.0)})
    writer.write_histograms(step=2, arrays={"h": np.arange(10.0)}, num_buckets={"h": 5})
    writer.write_images(1, {"i": np.zeros((2, 4, 4, 3), np.uint8)})
    writer.write_images(step=2, images={"i": np.zeros((2, 4, 4, 3), np.float32)})
    writer.write_videos(step=1, videos={"v": np.zeros((1, 2, 4, 4, 3))})
    writer.write_audios(step=1, audios={"u": np.zeros((1, 8, 1))}, sample_rate=8)
    writer.write_audios(2, {"u": np.zeros((1, 8, 1))}, sample_rate=8)
    writer.write_summaries(1, {"s": np.zeros((2, 2))})
    writer.write_summaries(step=2, values={"s": np.ones((2, 2))}, metadata=None)
    writer.write_hparams(hparams={"rate": 0.1, "net": {"depth": 3, "act": np.tanh}})
    writer.flush()
    writer.close()
    found = accumulate(tmp_path)
    assert points(tmp_path, "a") == [(1, 1.0), (2, 2.0)]
    assert [text for _, text in texts(tmp_path, "t")] == ["x", "y"]
    assert [len(event.histogram_value.bucket) for event in found.Histograms("h")] == [30, 5]
    assert [(image.width, image.height) for image in found.Images("i")] == [(8, 4)] * 2
    assert "_hparams_/session_start_info" in found.summary_metadata
    said = [entry.message for entry in caplog.records]
    assert sum("audios" in line for line in said) == 1 and sum("videos" in line for line in said) == 1


def test_a_number_beyond_float32_is_shown_as_infinite(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_scalars(1, {"a": 1e300, "b": -(10**400)})
    writer.close()
    assert points(tmp_path, "a") == [(1, math.inf)] and points(tmp_path, "b") == [(1, -math.inf)]


def test_one_call_is_one_event(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    before = next(tmp_path.iterdir()).stat().st_size
    writer.write_scalars(1, {f"metric_{i}": float(i) for i in range(100)})
    per_scalar = (next(tmp_path.iterdir()).stat().st_size - before) / 100
    writer.close()
    assert per_scalar < 40


def test_a_record_becomes_scalars_and_vectors(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_record(record(3))
    writer.write_record(record(4, params__norm=np.array([3, 4], np.float32), loss=math.nan))
    writer.close()
    found = accumulate(tmp_path)
    assert points(tmp_path, "params/norm") == [(3, pytest.approx(math.sqrt(5))), (4, 5.0)]
    assert points(tmp_path, "nonfinite") == [(3, 0.0), (4, 1.0)]
    assert found.Scalars("loss")[0].wall_time == 1_700_000_003.0
    (tag,) = [tag for tag in found.Tags()["tensors"] if tag.startswith("params_norm/")]
    vectors = [np.frombuffer(e.tensor_proto.tensor_content, "<f4").tolist() for e in found.Tensors(tag)]
    assert vectors == [[1.0, 2.0], [3.0, 4.0]]


def test_a_vectors_metadata_names_its_leaves_and_its_class(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_record(record(3))
    writer.close()
    found = accumulate(tmp_path)
    (tag,) = [tag for tag in found.Tags()["tensors"] if tag.startswith("params_norm/")]
    metadata = found.SummaryMetadata(tag)
    assert metadata.data_class == 2  # DATA_CLASS_TENSOR
    assert json.loads(metadata.plugin_data.content)["paths"] == list(PARAMS.paths)


def test_metadata_of_another_library_is_kept(tmp_path):
    from tensorboard.compat.proto import summary_pb2

    theirs = summary_pb2.SummaryMetadata(data_class=3)
    theirs.plugin_data.plugin_name = "images"
    writer = TensorBoardWriter(tmp_path)
    writer.write_summaries(1, {"s": np.array([b"a", b"b"])}, {"s": theirs})
    writer.close()
    metadata = accumulate(tmp_path).SummaryMetadata("s")
    assert (metadata.data_class, metadata.plugin_data.plugin_name) == (3, "images")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, {"kernel", "bias"}),
        ("bias$", {"bias"}),
        (lambda path: "kernel" in path, {"kernel"}),
        (False, set()),
    ],
)
def test_leaf_scalars_are_opt_in(tmp_path, given, expected):
    writer = TensorBoardWriter(tmp_path, leaf_scalars=given)
    writer.write_record(record(1))
    writer.close()
    tags = accumulate(tmp_path).Tags()["scalars"]
    assert {tag.rpartition(".")[2] for tag in tags if tag.startswith("params_norm/")} == expected


def test_strange_paths_are_read_back_as_they_are(tmp_path):
    paths = ("a/b c[0]", "é.ü|`<x>", "")
    leaves = Leaves("params", paths, ("Param",) * 3, ((),) * 3, ("float32",) * 3, (True,) * 3)
    writer = TensorBoardWriter(tmp_path, leaf_scalars=True)
    writer.write_record(Record(1, 1.0, {"params.norm": np.arange(3, dtype=np.float32)}, {"params": leaves}))
    writer.close()
    assert {f"params_norm/{path}" for path in paths} <= set(accumulate(tmp_path).Tags()["scalars"])


def test_an_alert_is_a_text_a_row_and_a_count(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_alert(alert(10))
    writer.write_alert(alert(20, rule="spike"))
    writer.write_alert(alert(30))
    # No close: it is on disk already.
    assert [step for step, _ in texts(tmp_path, "alerts/frozen_params")] == [10, 30]
    assert [step for step, _ in texts(tmp_path, "alerts/spike")] == [20]
    assert texts(tmp_path, "alerts/all")[-1][1].count("\n| ") == 4
    assert points(tmp_path, "alerts/count") == [(10, 1.0), (20, 2.0), (30, 3.0)]
    assert accumulate(tmp_path).SummaryMetadata("alerts/all").plugin_data.plugin_name == "text"
    writer.close()


def test_two_alerts_of_one_rule_at_one_step_are_both_in_the_last_text(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_alert(alert(10, title="first"))
    writer.write_alert(alert(10, title="second"))
    writer.close()
    last = texts(tmp_path, "alerts/frozen_params")[-1][1]
    assert "first" in last and "second" in last


def test_an_alert_about_an_earlier_step_purges_nothing(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_record(record(100, alerts__count=0))
    writer.write_alert(alert(200))
    writer.write_record(record(300, alerts__count=1))
    writer.write_alert(alert(150))
    writer.close()
    assert points(tmp_path, "alerts/count") == [(100, 0.0), (200, 1.0), (300, 1.0), (300, 2.0)]
    assert points(tmp_path, "loss")[-1][0] == 300
    assert len(texts(tmp_path, "alerts/frozen_params")) == 2


def test_fingerprints_are_texts_at_the_first_record_at_alerts_and_at_the_end(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step in range(6):
        writer.write_record(record(step))
        if step == 3:
            writer.write_alert(alert(3))
    writer.close()
    assert [step for step, _ in texts(tmp_path, "fingerprints/params")] == [0, 3, 5]


def test_histograms_leave_nonfinite_elements_out_and_count_them(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_histograms(1, {"h": np.array([1, 2, np.nan, np.inf]), "all": np.full(3, np.nan)})
    writer.write_histograms(2, {"h": np.array([-1e308, 1e308]), "empty": np.zeros(0)})
    writer.close()
    found = accumulate(tmp_path)
    assert [event.histogram_value.num for event in found.Histograms("h")] == [2, 2]
    assert points(tmp_path, "h/nonfinite") == [(1, 2.0)] and points(tmp_path, "all/nonfinite") == [(1, 3.0)]


def test_an_image_that_cannot_be_shown_is_said_once_and_the_others_are_written(tmp_path, caplog):
    writer = TensorBoardWriter(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in range(2):
            writer.write_images(step, {"bad": np.zeros(3), "good [1]": np.zeros((4, 4, 1))})
    writer.close()
    assert accumulate(tmp_path).Tags()["images"] == ["good [1]"]
    assert len(caplog.records) == 1


def test_a_mark_and_a_header_are_texts(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_header({"version": "1", "model": {"depth": 3}, "long": "x" * 9000})
    writer.write_mark(7, "data | <switched>")
    writer.close()
    assert texts(tmp_path, "marks") == [(7, "data &#124; &lt;switched&gt;")]
    ((step, header),) = texts(tmp_path, "run/configuration")
    assert step == 0 and "| `model.depth` | 3 |" in header and len(header) < 1000


def test_a_loop_that_starts_again_gets_its_alerts_at_its_own_steps(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_record(record(50))
    writer.write_alert(alert(50))
    writer.write_record(record(0))
    writer.write_alert(alert(1))
    writer.close()
    assert texts(tmp_path, "alerts/frozen_params")[-1][0] == 1


def _file(tmp_path: Path) -> Path:
    path = tmp_path / "taken"
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda tmp: _file(tmp), WriterError, r"taken' is a file, expected a folder\. Choose another"),
        (lambda tmp: _file(tmp) / "a" / "b", WriterError, r"taken' is a file, expected a folder"),
        (lambda tmp: "/proc/nothing/here", WriterError, r"cannot write to '/proc/nothing/here'.*Choose another"),
        (lambda tmp: "", ArgumentError, r"got '', expected the path of a folder.*runs/a"),
        (lambda tmp: "gs://bucket/a", ArgumentError, r"on another machine: got 'gs://bucket/a'"),
        (lambda tmp: 3, ArgumentTypeError, r"got int 3, expected a str or a pathlib.Path"),
        (lambda tmp: b"runs", ArgumentTypeError, r"got bytes"),
    ],
)
def test_a_bad_folder_is_an_error_in_words_at_construction(tmp_path, make, error, text):
    with pytest.raises(error, match=text):
        TensorBoardWriter(make(tmp_path))


def test_a_bad_leaf_filter_is_an_error_before_anything_is_made(tmp_path):
    with pytest.raises(ArgumentError, match=r"not a regular expression: got '\('"):
        TensorBoardWriter(tmp_path / "a", leaf_scalars="(")
    with pytest.raises(ArgumentTypeError, match="got int 3"):
        TensorBoardWriter(tmp_path / "a", leaf_scalars=3)  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()
