"""Builds ``Summary.Value`` messages that both of TensorBoard's loaders show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_probes.errors import ArgumentTypeError
from nnx_probes.writers import tags

__all__ = ["DEFAULT_BINS", "Summaries"]

DEFAULT_BINS = 30
"""Bins of a histogram: 587 bytes on disk, against 9.9 kB for tensorboardX's default; TensorBoard shows 30."""

_TENSOR_CLASS = b"\x20\x02"
"""``data_class: DATA_CLASS_TENSOR`` in SummaryMetadata: TensorBoard's fast loader shows a tensor only with
it, and tensorboardX's message lacks the field. As an unknown field it is kept and written."""

_LARGEST = 1e300
"""Histogram values are clipped here: the width of a range beyond it is infinite in float64."""


class Summaries:
    """Makes messages; imports tensorboardX's when the first one is made, not before."""

    def __init__(self) -> None:
        from tensorboardX.proto import summary_pb2, tensor_pb2, tensor_shape_pb2

        self._summary, self._tensor, self._shape = summary_pb2, tensor_pb2, tensor_shape_pb2

    def scalar(self, tag: str, value: Any) -> Any:
        """One number; beyond float32 it is shown as infinite."""
        return self._summary.Summary.Value(tag=tags.safe_tag(tag), simple_value=tags.number(value, tag))

    def text(self, tag: str, text: str) -> Any:
        """One Markdown text."""
        return self._value(tag, [text], (), self._metadata("text", b""))

    def vector_metadata(self, content: bytes) -> Any:
        """Metadata of a per-leaf tensor; `content` is JSON with the leaves' paths, or empty."""
        return self._metadata("nnx_probes", content)

    def tensor(self, tag: str, value: Any, metadata: Any = None) -> Any:
        """A tensor of numbers (stored as float32, or as int64 if integer) or of texts."""
        if metadata is None:
            metadata = self._metadata("", b"")
        else:  # another library's message of the same type; what it says about the class comes last, and wins
            metadata = self._summary.SummaryMetadata.FromString(_TENSOR_CLASS + metadata.SerializeToString())
        array = np.asarray(value)
        if array.dtype.kind in "USO":
            return self._value(tag, [_as_text(item) for item in array.ravel()], array.shape, metadata)
        if array.dtype.kind in "bui" and array.dtype.itemsize <= 8:
            kind, array = "DT_INT64", array.astype("<i8")
        else:
            try:
                with np.errstate(over="ignore"):
                    kind, array = "DT_FLOAT", array.astype("<f4")
            except (TypeError, ValueError) as error:
                raise ArgumentTypeError(
                    f"{tag!r} cannot be written as a tensor: got dtype {array.dtype}, expected numbers or "
                    "texts. Convert it to float32 first."
                ) from error
        tensor = self._tensor.TensorProto(
            dtype=kind, tensor_shape=self._dims(array.shape), tensor_content=array.tobytes()
        )
        return self._summary.Summary.Value(tag=tags.safe_tag(tag), metadata=metadata, tensor=tensor)

    def histogram(self, tag: str, array: Any, bins: int | None = None) -> list[Any]:
        """A histogram of the finite elements, and a count ``<tag>/nonfinite`` if there are others."""
        values = np.asarray(array).astype(np.float64).ravel()
        finite = values[np.isfinite(values)]
        made = []
        if finite.size:
            finite = np.clip(finite, -_LARGEST, _LARGEST)
            counts, edges = np.histogram(finite, bins=bins or DEFAULT_BINS)
            with np.errstate(over="ignore"):
                histogram = self._summary.HistogramProto(
                    min=float(finite.min()),
                    max=float(finite.max()),
                    num=float(finite.size),
                    sum=float(finite.sum()),
                    sum_squares=float(np.sum(finite * finite)),
                    bucket_limit=edges[1:].tolist(),
                    bucket=counts.tolist(),
                )
            made.append(self._summary.Summary.Value(tag=tags.safe_tag(tag), histo=histogram))
        if finite.size < values.size:
            made.append(self.scalar(f"{tag}/nonfinite", values.size - finite.size))
        return made

    def image(self, tag: str, image: np.ndarray) -> Any:
        """An image, or a batch of them side by side."""
        from tensorboardX import summary

        if image.dtype != np.uint8:
            image = image.astype(np.float32)
        value = summary.image(tag, image, dataformats="NHWC" if image.ndim == 4 else "HWC").value[0]
        value.tag = tags.safe_tag(tag)  # tensorboardX has replaced characters of it
        return value

    def hparams(self, flat: Mapping[str, Any]) -> list[Any]:
        """The three values of the HParams page: experiment, session start, session end."""
        from tensorboardX import summary

        plain = {}
        for name, value in flat.items():
            if isinstance(value, (bool, int, float, str)) or value is None:
                plain[tags.safe_tag(name)] = value
            else:
                plain[tags.safe_tag(name)] = repr(value)[:500]
        return [part.value[0] for part in summary.hparams(plain, {})]

    def _metadata(self, plugin: str, content: bytes) -> Any:
        data = self._summary.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        metadata = self._summary.SummaryMetadata(plugin_data=data)
        metadata.MergeFromString(_TENSOR_CLASS)
        return metadata

    def _dims(self, shape: tuple[int, ...]) -> Any:
        dims = [self._shape.TensorShapeProto.Dim(size=size) for size in shape]
        return self._shape.TensorShapeProto(dim=dims)

    def _value(self, tag: str, texts: list[str], shape: tuple[int, ...], metadata: Any) -> Any:
        tensor = self._tensor.TensorProto(
            dtype="DT_STRING",
            tensor_shape=self._dims(shape),
            string_val=[text.encode("utf-8", "backslashreplace") for text in texts],
        )
        return self._summary.Summary.Value(tag=tags.safe_tag(tag), metadata=metadata, tensor=tensor)


def _as_text(item: Any) -> str:
    return item.decode("utf-8", "backslashreplace") if isinstance(item, bytes) else str(item)
