"""Loss and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from nnx_probes.callbacks.base import Callback, Context, Every, Later, check_every
from nnx_probes.callbacks.group import Group
from nnx_probes.device.leaves import is_array
from nnx_probes.device.probe import Sample
from nnx_probes.device.stats import PREFIX
from nnx_probes.host.record import Leaves

__all__ = ["LossProbe"]


class LossProbe(Callback):
    """Reads the loss and the metrics the loop hands over.

    Puts ``loss`` (float), ``metrics.<path>`` (float, for metrics of one element) and ``metrics.nonfinite``
    (int32[n_leaves]) into the record. Both may be device arrays; they are fetched on due steps only, together.
    Metrics may be nested; entries that are no arrays or numbers are passed over.

    Args:
      every: interval in steps, None for the monitor's, ``"auto"`` for one under its budget.

    Cost: one small launch and one copy of 16 bytes a value.
    """

    provides = ("loss", "loss.size", "metrics.*")

    def __init__(self, *, every: Every = None) -> None:
        check_every(every, "LossProbe")
        self.every = every
        self._loss = Group("loss")
        self._metrics = Group("metrics")

    def on_step_end(self, ctx: Context) -> None:
        """Queues the reading of loss and metrics."""
        if ctx.loss is not None and is_array(ctx.loss):
            later = self._loss.enqueue({"loss": ctx.loss}, _read_loss)
            ctx.later.append(_only(later, ("loss", "loss.size", "loop.traced")))
        metrics = _without_stats(ctx.metrics)
        if metrics is not None and _has_arrays(metrics):
            ctx.later.append(self._metrics.enqueue(metrics, _read_metrics))


def _only(later: Later, names: tuple[str, ...]) -> Later:
    def read() -> tuple[Mapping[str, Any], Mapping[str, Leaves]]:
        values, _ = later.read()
        return {name: values[name] for name in names if name in values}, {}

    return Later(later.ready, read, later.waited_s)


def _read_loss(sample: Sample, table: Leaves) -> Mapping[str, Any]:
    size = 1
    for n in sample.leaves[0].shape:
        size *= n
    if sample.unreadable:
        return {}
    return {"loss": float(sample.value[0])} if size == 1 else {"loss.size": size}


def _read_metrics(sample: Sample, table: Leaves) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    for leaf, value, bad in zip(sample.leaves, sample.value, sample.nonfinite, strict=True):
        if bad or value == value:
            values[f"metrics.{leaf.path}"] = float(value)
    values["metrics.nonfinite"] = sample.nonfinite
    return values


def _without_stats(metrics: Any) -> Any:
    """The metrics without what `step_stats` returned, which `GradientProbe` reads."""
    if not isinstance(metrics, Mapping):
        return metrics
    plain = {k: v for k, v in metrics.items() if not (isinstance(k, str) and k.startswith(PREFIX))}
    return {k: _without_stats(v) if isinstance(v, Mapping) else v for k, v in plain.items()}


def _has_arrays(metrics: Any) -> bool:
    return any(is_array(leaf) for leaf in jax.tree.leaves(metrics))
