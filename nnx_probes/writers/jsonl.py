"""The record of truth: one JSON object a line."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_probes.host.alert import Alert
from nnx_probes.host.record import Leaves, Record
from nnx_probes.writers.folder import as_path, make_folder
from nnx_probes.writers.jsonl_values import alert_row, dump, encode, leaves_id, leaves_row
from nnx_probes.writers.linefile import LineFile

__all__ = ["FILE_NAME", "JsonlWriter"]

FILE_NAME = "probes.jsonl"
"""The file's name when a folder is given."""

_LOG = logging.getLogger("nnx_probes")


class JsonlWriter:
    """Appends records, alerts and marks, unreduced, to a file of strict JSON lines.

    Each line has ``"kind"`` (``header``, ``leaves``, ``probe``, ``alert``, ``mark``, ``scalars``, ``text``,
    ``histogram``, ``hparams``, ``close``) and ``"run"``, a random name of this writer: several runs, even
    at the same time, share a file and stay apart. A table of leaves is written once, before the first
    probe that refers to it by its ``"id"``. `nnx_probes.writers.read_jsonl` reads it back, float32 values
    bit for bit (a NaN as a NaN).

    Cost: one ``write`` a line, no buffer; about 10 bytes a leaf and statistic, 25 a fingerprint.

    Args:
      folder_or_file: a folder, in which ``probes.jsonl`` is made, or a path that ends in ``.jsonl``.

    Raises:
      WriterError: the file cannot be opened, or later: something could not be written.
      ArgumentTypeError, ArgumentError: not a path.
    """

    def __init__(self, folder_or_file: Any) -> None:
        path = as_path(folder_or_file, "JsonlWriter")
        if path.suffix != ".jsonl" or path.is_dir():
            path = path / FILE_NAME
        make_folder(path.parent, "JsonlWriter")
        self._file = LineFile(path, "JsonlWriter")
        self.path = path
        self.run = secrets.token_hex(4)
        self._tables: dict[int, tuple[Leaves, str]] = {}
        self._written: set[str] = set()
        self._said: set[str] = set()

    def write_summaries(self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        """Writes arrays whole, as a line of scalars; `metadata` is left out."""
        self._line("scalars", step=int(step), values=_host(values))

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._line("scalars", step=int(step), values=_host(scalars))

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Does nothing but say once that it does nothing."""
        self._say_once("images")

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Does nothing but say once that it does nothing."""
        self._say_once("videos")

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        """Does nothing but say once that it does nothing."""
        self._say_once("audios")

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._line("text", step=int(step), texts={str(tag): str(text) for tag, text in texts.items()})

    def write_histograms(
        self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
    ) -> None:
        """Writes the counts and edges of 30 bins unless said; counts non-finite elements apart."""
        for tag, array in arrays.items():
            values = np.asarray(array).astype(np.float64).ravel()
            finite = values[np.isfinite(values)]
            counts, edges = np.histogram(np.clip(finite, -1e300, 1e300), bins=(num_buckets or {}).get(tag, 30))
            self._line(
                "histogram",
                step=int(step),
                tag=str(tag),
                counts=counts.tolist(),
                edges=edges.tolist(),
                nonfinite=values.size - finite.size,
            )

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        self._line("hparams", values=_encoded(hparams))

    def write_header(self, header: Mapping[str, Any]) -> None:
        self._line("header", time_s=time.time(), values=_encoded(header))

    def write_record(self, record: Record) -> None:
        ids = {group: self._table(leaves) for group, leaves in record.leaves.items()}
        self._line(
            "probe",
            step=int(record.step),
            time_s=encode(record.time_s),
            leaves=ids,
            values=_encoded(record.values),
        )

    def write_alert(self, alert: Alert) -> None:
        self._line("alert", **alert_row(alert))
        self._file.sync()

    def write_mark(self, step: int, name: str) -> None:
        self._line("mark", step=int(step), name=str(name))

    def flush(self) -> None:
        """Makes what was written survive a power loss; a kill of the process it survives anyway."""
        self._file.sync()

    def close(self) -> None:
        if not self._file.closed:
            try:
                self._line("close", time_s=time.time())
                self._file.sync()
            finally:
                self._file.close()

    def _line(self, kind: str, **fields: Any) -> None:
        self._file.append(dump({"kind": kind, "run": self.run, **fields}))

    def _table(self, leaves: Leaves) -> str:
        """Returns the table's name; writes it if this writer has not yet."""
        known = self._tables.get(id(leaves))
        if known is not None and known[0] is leaves:
            return known[1]
        row = leaves_row(leaves)
        name = leaves_id(row)
        if name not in self._written:
            self._line("leaves", id=name, **row)
            self._written.add(name)
        self._tables = {k: v for k, v in self._tables.items() if v[0].group != leaves.group}
        self._tables[id(leaves)] = (leaves, name)  # the reference keeps the id from being reused
        return name

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _LOG.warning("JsonlWriter leaves %s out: it holds numbers and texts. Said once.", what)


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): encode(value) for name, value in values.items()}


def _host(values: Mapping[str, Any]) -> dict[str, Any]:
    """As `_encoded`, for values that may be arrays of another library."""
    return {
        str(name): encode(np.asarray(value) if hasattr(value, "__array__") else value) for name, value in values.items()
    }
