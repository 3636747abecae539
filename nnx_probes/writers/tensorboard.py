"""Event files for TensorBoard."""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nnx_probes.errors import ArgumentError, ArgumentTypeError
from nnx_probes.host.alert import Alert
from nnx_probes.host.record import Record
from nnx_probes.writers import tags
from nnx_probes.writers.eventlog import EventLog
from nnx_probes.writers.folder import as_path
from nnx_probes.writers.markdown import MAX_ROWS, escape, flatten, settings_table
from nnx_probes.writers.summary import Summaries

__all__ = ["TensorBoardWriter"]

_LOG = logging.getLogger("nnx_probes")


class TensorBoardWriter:
    """Writes event files that TensorBoard shows, with either of its loaders, and without tensorflow.

    A record becomes scalars (``params/norm``, ``loss``, ``nonfinite``), one float32[n_leaves] tensor a
    statistic (``params_norm/<hash>``), and, if asked for, one scalar a leaf. An alert becomes a text
    ``alerts/<rule>``, a row of the table ``alerts/all`` and a step of ``alerts/count``, and is on disk when
    `write_alert` returns. Fingerprints are texts at the first record, at each alert and at `close`.
    Nothing is buffered. Use one writer a folder at a time; a new one in the same folder continues the run.

    Cost: one event and one ``write`` a call; 46 bytes a scalar, 4 bytes a leaf and statistic.

    Args:
      folder: made if missing.
      leaf_scalars: one scalar a leaf too: ``True`` for all, a regular expression to search for in the
        path, or a function of the path. TensorBoard needs 1 GB for 3000 leaves over 1000 steps.

    Raises:
      WriterError: the folder cannot be used, or later: something could not be written.
      ArgumentTypeError, ArgumentError: `folder` or `leaf_scalars` is not what is said above.
    """

    def __init__(self, folder: Any, *, leaf_scalars: bool | str | Callable[[str], bool] = False) -> None:
        path = as_path(folder, "TensorBoardWriter")
        self._accept = _as_filter(leaf_scalars)
        self._log = EventLog(path)
        self._make = Summaries()
        self._alerts: deque[Alert] = deque(maxlen=MAX_ROWS)
        self._count = 0
        self._alert_texts: dict[str, tuple[int, str]] = {}
        self._count_step = self._record_step = -1
        self._described: set[str] = set()
        self._last: Record | None = None
        self._marked_step: int | None = None
        self._said: set[str] = set()
        self._session_end: list[Any] = []

    def write_summaries(self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        """Writes tensors (numbers of any shape, or texts); `metadata` holds SummaryMetadata messages."""
        metadata = metadata or {}
        made = [self._make.tensor(tag, value, metadata.get(tag)) for tag, value in values.items()]
        self._log.append(step, made)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._log.append(step, [self._make.scalar(tag, value) for tag, value in scalars.items()])

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Writes [n, h, w, c] or [h, w, c] images, uint8 or floats in [0, 1]; needs Pillow."""
        made = []
        for tag, image in images.items():
            try:
                made.append(self._make.image(tag, np.asarray(image)))
            except Exception as error:  # a shape that is no image; Pillow may be missing
                self._say_once("images", f"{type(error).__name__}: {error}")
        self._log.append(step, made)

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Does nothing but say once that it does nothing."""
        self._say_once("videos", "not supported")

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        """Does nothing but say once that it does nothing."""
        self._say_once("audios", "not supported")

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes Markdown."""
        self._log.append(step, [self._make.text(tag, text) for tag, text in texts.items()])

    def write_histograms(
        self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
    ) -> None:
        """Writes histograms, 30 bins unless said; leaves non-finite elements out and counts them."""
        made: list[Any] = []
        for tag, array in arrays.items():
            made += self._make.histogram(tag, array, (num_buckets or {}).get(tag))
        self._log.append(step, made)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        made = self._make.hparams(flatten(hparams))
        self._log.append(None, made[:-1])
        self._session_end = made[-1:]

    def write_header(self, header: Mapping[str, Any]) -> None:
        self._log.append(None, [self._make.text("run/configuration", settings_table(header))])

    def write_record(self, record: Record) -> None:
        if record.step < self._record_step:  # the loop went back: so may what is cumulative
            self._alert_texts.clear()
            self._count_step = record.step
        shown = tags.scalars(record)
        if "alerts/count" in shown:
            shown["alerts/count"] = float(self._count)
            self._count_step = max(self._count_step, record.step)
        if self._accept is not None:
            shown |= tags.leaf_scalars(record, self._accept)
        made = [self._make.scalar(tag, value) for tag, value in shown.items()]
        vectors = tags.vectors(record)
        for tag, vector in vectors.items():
            made.append(self._make.tensor(tag, vector, self._description(record, tag)))
        first = self._marked_step is None
        if first:
            made += self._fingerprints(record)
        self._log.append(record.step, made, record.time_s)
        self._described.update(vectors)
        self._record_step, self._last = record.step, record
        if first:
            self._marked_step = record.step

    def write_alert(self, alert: Alert) -> None:
        self._alerts.append(alert)
        self._count += 1
        # Readers keep one text a tag and step, and drop later steps when an earlier one comes.
        step, text = self._alert_texts.get(alert.rule, (-1, ""))
        text = f"{text}\n\n" if alert.step <= step else ""
        text += tags.alert_markdown(alert)
        step = max(step, alert.step)
        self._alert_texts[alert.rule] = (step, text)
        self._log.append(step, [self._make.text(f"alerts/{alert.rule}", text)])
        self._count_step = max(self._count_step, alert.step)
        made = [
            self._make.text("alerts/all", tags.alert_table(list(self._alerts), total=self._count)),
            self._make.scalar("alerts/count", self._count),
        ]
        self._log.append(self._count_step, made)
        self._mark_last()
        self._log.sync()

    def write_mark(self, step: int, name: str) -> None:
        self._log.append(step, [self._make.text("marks", escape(name))])

    def flush(self) -> None:
        """Makes what was written survive a power loss; a kill of the process it survives anyway."""
        self._log.sync()

    def close(self) -> None:
        try:
            self._mark_last()
            self._log.append(None, self._session_end)
            self._session_end = []
            self._log.sync()
        finally:
            self._log.close()

    def _mark_last(self) -> None:
        if self._last is not None and self._last.step != self._marked_step:
            self._log.append(self._last.step, self._fingerprints(self._last))
            self._marked_step = self._last.step

    def _fingerprints(self, record: Record) -> list[Any]:
        return [self._make.text(tag, text) for tag, text in tags.fingerprint_tables(record).items()]

    def _description(self, record: Record, tag: str) -> Any:
        """Metadata with the leaves' paths for the first event of a tag in this file."""
        if tag in self._described:
            return self._make.vector_metadata(b"")
        prefix = tag.rpartition("/")[0]
        group = next((g for g in record.leaves if prefix.startswith(f"{g}_")), None)
        paths = [] if group is None else list(record.leaves[group].paths)
        return self._make.vector_metadata(json.dumps({"version": 0, "paths": paths}).encode())

    def _say_once(self, what: str, reason: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _LOG.warning("TensorBoardWriter leaves %s out (%s). Said once.", what, reason)


def _as_filter(given: Any) -> Callable[[str], bool] | None:
    if isinstance(given, bool):
        return (lambda _: True) if given else None
    if isinstance(given, str):
        try:
            pattern = re.compile(given)
        except re.error as error:
            raise ArgumentError(
                f"TensorBoardWriter: leaf_scalars is not a regular expression: got {given!r} ({error}). "
                "Expected one to search for in leaf paths, for example 'attn'. Escape it with re.escape."
            ) from error
        return lambda path: pattern.search(path) is not None
    if callable(given):
        return lambda path: bool(given(path))
    raise ArgumentTypeError(
        f"TensorBoardWriter: leaf_scalars has the wrong type: got {type(given).__name__} {given!r:.80}, "
        "expected a bool, a regular expression (str) or a function of the leaf's path. Pass True for all leaves."
    )
