"""Keeps what it is given, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx_probes.host.alert import Alert
from nnx_probes.host.record import Record

__all__ = ["MemoryWriter"]


class MemoryWriter:
    """Appends everything to lists. Cost: a reference, or a shallow copy, a call; nothing is dropped.

    Attributes:
      scalars, summaries, images, videos, audios, texts, histograms: (step, mapping), in order.
      hparams: the mappings of `write_hparams`, merged.
      records, alerts: in order.
      marks: (step, name).
      header: the last one.
      flushes: how often `flush` was called.
      closed: whether `close` was called.
    """

    def __init__(self) -> None:
        self.scalars: list[tuple[int, dict[str, Any]]] = []
        self.summaries: list[tuple[int, dict[str, Any]]] = []
        self.images: list[tuple[int, dict[str, Any]]] = []
        self.videos: list[tuple[int, dict[str, Any]]] = []
        self.audios: list[tuple[int, dict[str, Any]]] = []
        self.texts: list[tuple[int, dict[str, str]]] = []
        self.histograms: list[tuple[int, dict[str, Any]]] = []
        self.hparams: dict[str, Any] = {}
        self.records: list[Record] = []
        self.alerts: list[Alert] = []
        self.marks: list[tuple[int, str]] = []
        self.header: dict[str, Any] = {}
        self.flushes = 0
        self.closed = False

    def write_summaries(self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        self.summaries.append((step, dict(values)))

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        self.scalars.append((step, dict(scalars)))

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        self.images.append((step, dict(images)))

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        self.videos.append((step, dict(videos)))

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        self.audios.append((step, dict(audios)))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self.texts.append((step, dict(texts)))

    def write_histograms(
        self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
    ) -> None:
        self.histograms.append((step, dict(arrays)))

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        self.hparams.update(hparams)

    def write_header(self, header: Mapping[str, Any]) -> None:
        self.header = dict(header)

    def write_record(self, record: Record) -> None:
        self.records.append(record)

    def write_alert(self, alert: Alert) -> None:
        self.alerts.append(alert)

    def write_mark(self, step: int, name: str) -> None:
        self.marks.append((step, name))

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        self.closed = True
