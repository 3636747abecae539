from __future__ import annotations

from nnx_probes.writers import MemoryWriter, RecordWriter, Writer

from .samples import alert, record


def test_everything_is_kept_in_order():
    writer = MemoryWriter()
    assert isinstance(writer, Writer) and isinstance(writer, RecordWriter)
    writer.write_scalars(1, {"a": 1.0})
    writer.write_scalars(step=2, scalars={"a": 2.0})
    writer.write_texts(step=1, texts={"t": "x"})
    writer.write_histograms(step=1, arrays={"h": [1]}, num_buckets=None)
    writer.write_images(step=1, images={"i": 1})
    writer.write_videos(step=1, videos={"v": 1})
    writer.write_audios(step=1, audios={"u": 1}, sample_rate=1)
    writer.write_summaries(step=1, values={"s": 1}, metadata=None)
    writer.write_hparams(hparams={"rate": 1})
    writer.write_header({"every": 1})
    first, found = record(1), alert()
    writer.write_record(first)
    writer.write_alert(found)
    writer.write_mark(1, "x")
    writer.flush()
    assert not writer.closed
    writer.close()
    assert writer.scalars == [(1, {"a": 1.0}), (2, {"a": 2.0})]
    assert (writer.texts, writer.marks) == ([(1, {"t": "x"})], [(1, "x")])
    assert writer.records[0] is first and writer.alerts == [found]
    assert (writer.header, writer.hparams) == ({"every": 1}, {"rate": 1})
    assert (writer.flushes, writer.closed) == (1, True)


def test_a_mapping_that_changes_later_is_not_changed_here():
    writer, values = MemoryWriter(), {"a": 1.0}
    writer.write_scalars(1, values)
    values["a"] = 2.0
    assert writer.scalars == [(1, {"a": 1.0})]
