"""Loss and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np

from nnx_probes.callbacks.base import Callback, Context, Every, Later, check_every
from nnx_probes.callbacks.group import Group
from nnx_probes.device.leaves import is_array
from nnx_probes.device.probe import Sample
from nnx_probes.device.stats import PREFIX
from nnx_probes.host.record import Leaves

__all__ = ["LossProbe"]


class LossProbe(Callback):
    """Reads the loss and the metrics the loop hands over.

    Puts ``loss`` (float), ``metrics.<path>`` (float, for metrics of one element) and ``metric_arrays.nonfinite``
    (int32[n_leaves], of the metrics of any size) into the record. Both may be device arrays; they are fetched on due steps
    only, together. Metrics may be nested, with keys of any type; entries that are no arrays or numbers are passed over. Of a
    complex loss the real part is taken where the imaginary one is 0, else nothing. A loss of more than one element is not
    recorded either, but its number of elements, ``loss.size``; ``loop.traced`` says that the monitor got tracers.

    Args:
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget.

    Cost: one small launch and one copy of 16 bytes a value.
    """

    provides = ("loss", "loss.size", "loop.traced", "metrics.*", "metric_arrays.nonfinite")

    def __init__(self, *, every: Every = None) -> None:
        check_every(every, "LossProbe")
        self.every = every
        self._loss = Group("loss")
        self._metrics = Group("metric_arrays")

    def on_step_end(self, ctx: Context) -> None:
        """Queues the reading of loss and metrics."""
        if ctx.loss is not None and is_array(ctx.loss):
            later = self._loss.enqueue(_parts(ctx.loss), _read_loss)
            ctx.later.append(_only(later, {"loss", "loss.size", "loop.traced"}))
        metrics = _plain(ctx.metrics)
        if metrics is not None and _has_arrays(metrics):
            later = self._metrics.enqueue(metrics, _read_metrics)
            ctx.later.append(_without(later, {"metric_arrays.norm", "metric_arrays.max_abs"}))


def _only(later: Later, names: Set[str]) -> Later:
    def read() -> tuple[Mapping[str, Any], Mapping[str, Leaves]]:
        values, _ = later.read()
        return {name: value for name, value in values.items() if name in names}, {}

    return Later(later.ready, read, later.waited_s)


def _without(later: Later, names: Set[str]) -> Later:
    def read() -> tuple[Mapping[str, Any], Mapping[str, Leaves]]:
        values, tables = later.read()
        return {name: value for name, value in values.items() if name not in names}, tables

    return Later(later.ready, read, later.waited_s)


def _parts(loss: Any) -> dict[str, Any]:
    """The loss, of a complex one both parts."""
    if not np.iscomplexobj(loss) or (isinstance(loss, jax.Array) and loss.is_deleted()):
        return {"loss": loss}
    return {"loss": loss.real, "rest": loss.imag}


def _read_loss(sample: Sample, table: Leaves) -> Mapping[str, Any]:
    size = math.prod(sample.leaves[0].shape)
    if sample.unreadable:
        return {}
    if size != 1:
        return {"loss.size": size}
    real, *imaginary = sample.value.tolist()
    if not all(map(math.isfinite, imaginary)):
        return {"loss": math.nan}
    return {} if any(imaginary) else {"loss": real}


def _read_metrics(sample: Sample, table: Leaves) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    for leaf, value, bad in zip(sample.leaves, sample.value, sample.nonfinite, strict=True):
        if value == value or (bad and math.prod(leaf.shape) == 1):
            values[f"metrics.{leaf.path}"] = float(value)
    return values


def _plain(metrics: Any) -> Any:
    """The metrics in containers that jax can flatten, without what `step_stats` returned (`GradientProbe` reads that).

    jax sorts the keys of a mapping, so that all have to be of one type.
    """
    if isinstance(metrics, Mapping):
        found: dict[str, Any] = {}
        for key, value in metrics.items():
            name = str(key)
            while name in found:  # {1: ..., "1": ...}
                name += "#2"
            if not name.startswith(PREFIX):
                found[name] = _plain(value)
        return found
    return [_plain(value) for value in metrics] if type(metrics) in (list, tuple) else metrics


def _has_arrays(metrics: Any) -> bool:
    return any(is_array(leaf) for leaf in jax.tree.leaves(metrics))
