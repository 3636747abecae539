"""Builds ``Summary.Value`` messages that both of TensorBoard's loaders show."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_probes.errors import ArgumentError, ArgumentTypeError
from nnx_probes.writers import tags

__all__ = ["DEFAULT_BINS", "Summaries"]

DEFAULT_BINS = 30
"""Bins of a histogram: 587 bytes on disk, as many as TensorBoard shows."""

_TENSOR_CLASS = b"\x20\x02"
"""``data_class: DATA_CLASS_TENSOR`` of a SummaryMetadata: without it TensorBoard's fast loader shows no
tensor. As bytes because it goes before another library's message, whose own class then wins."""

_LARGEST = 1e300
"""Histogram values are clipped here: the width of a range beyond it is infinite in float64."""


class Summaries:
    """Makes messages; imports TensorBoard's own, which need no tensorflow, when one is made."""

    def __init__(self) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2

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
        """An image, or a batch of them side by side: [n, h, w, c] or [h, w, c], uint8 or in [0, 1]."""
        from PIL import Image

        if image.ndim not in (3, 4) or image.shape[-1] not in (1, 3, 4):
            raise ArgumentError(
                f"{tag!r} cannot be written as an image: got shape {image.shape}, expected [n, h, w, c] or "
                "[h, w, c] with 1, 3 or 4 channels. Move the channels to the end."
            )
        if image.dtype != np.uint8:
            clear = np.nan_to_num(image.astype(np.float32), nan=0, posinf=1, neginf=0)
            image = (np.clip(clear, 0, 1) * 255).round().astype(np.uint8)
        if image.ndim == 4:
            image = np.concatenate(list(image), axis=1)
        height, width, channels = image.shape
        file = io.BytesIO()
        Image.fromarray(image[:, :, 0] if channels == 1 else image).save(file, "PNG")
        message = self._summary.Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=file.getvalue()
        )
        return self._summary.Summary.Value(tag=tags.safe_tag(tag), image=message)

    def hparams(self, flat: Mapping[str, Any]) -> list[Any]:
        """The three values of the HParams page: experiment, session start, session end."""
        from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

        start, infos = plugin_data_pb2.SessionStartInfo(), []
        for name, value in flat.items():
            tag = tags.safe_tag(name)
            if isinstance(value, bool):
                start.hparams[tag].bool_value, kind = value, "DATA_TYPE_BOOL"
            elif isinstance(value, (int, float)):
                start.hparams[tag].number_value, kind = tags.number(value, tag), "DATA_TYPE_FLOAT64"
            elif value is not None:
                text = value if isinstance(value, str) else repr(value)[:500]
                start.hparams[tag].string_value, kind = tags.safe_tag(text), "DATA_TYPE_STRING"
            else:
                continue
            infos.append(api_pb2.HParamInfo(name=tag, type=kind))
        parts = {
            "experiment": api_pb2.Experiment(hparam_infos=infos),
            "session_start_info": start,
            "session_end_info": plugin_data_pb2.SessionEndInfo(status="STATUS_SUCCESS"),
        }
        nothing = self._tensor.TensorProto(dtype="DT_FLOAT", tensor_shape=self._dims((0,)))
        made = []
        for name, part in parts.items():
            content = plugin_data_pb2.HParamsPluginData(version=0, **{name: part}).SerializeToString()
            metadata = self._metadata("hparams", content)
            made.append(self._summary.Summary.Value(tag=f"_hparams_/{name}", metadata=metadata, tensor=nothing))
        return made

    def _metadata(self, plugin: str, content: bytes) -> Any:
        data = self._summary.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        return self._summary.SummaryMetadata(plugin_data=data, data_class="DATA_CLASS_TENSOR")

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
