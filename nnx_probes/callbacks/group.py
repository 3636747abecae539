"""From a sample of the device floor to named values of a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnx_probes.callbacks.base import Later
from nnx_probes.device.leaves import Leaf
from nnx_probes.device.probe import Probe, Sample
from nnx_probes.host.record import Leaves

__all__ = ["Group"]

_WORDS = {"params": "the model", "metric_arrays": "the metrics"}


class Group:
    """One named group of leaves: its probe and the table of its leaves.

    Args:
      name: prefix of the values, for example ``"params"``.
      fingerprints: method, or None for none.
      trained: decides which leaves the optimizer is meant to move; asked when the leaves change and after `renew`, with
        the source, the leaves and the ``id`` of the object behind each.
    """

    def __init__(
        self,
        name: str,
        *,
        fingerprints: str | None = None,
        trained: Callable[[Any, tuple[Leaf, ...], tuple[int, ...]], tuple[bool, ...]] | None = None,
    ) -> None:
        self.name = name
        self._source: Any = None
        self.probe = Probe(lambda: self._source, fingerprints=fingerprints, may_be_empty=name == "optimizer")
        self._trained = trained
        self._version = -1
        self._table: Leaves | None = None

    def renew(self) -> None:
        """Asks at the next measurement anew which leaves are trained."""
        self._version = -1

    def enqueue(self, source: Any, extra: Callable[[Sample, Leaves], Mapping[str, Any]] | None = None) -> Later:
        """Queues a measurement of `source`; `extra` may derive further values from the sample."""
        self._source = source
        try:
            pending = self.probe.enqueue()
            table = self._leaves(source)
        finally:
            self._source = None  # hold nothing of the user's between steps

        def read() -> tuple[Mapping[str, Any], Mapping[str, Leaves]]:
            sample = pending.fetch()
            values = self._values(sample)
            if extra is not None:
                values.update(extra(sample, table))
            return values, {self.name: table}

        return Later(pending.ready, read, pending.waited_s)

    def _values(self, sample: Sample) -> dict[str, Any]:
        name = self.name
        values: dict[str, Any] = {
            f"{name}.norm": sample.norm,
            f"{name}.max_abs": sample.max_abs,
            f"{name}.nonfinite": sample.nonfinite,
        }
        if "traced" in sample.unreadable.values():
            values["loop.traced"] = _WORDS.get(name, f"the {name}")
        if sample.fingerprints:
            values[f"{name}.fingerprint"] = sample.fingerprints
        return values

    def _leaves(self, source: Any) -> Leaves:
        tree = self.probe.tree
        if self._table is None or tree.version != self._version:
            found = tree.leaves
            self._table = Leaves(
                group=self.name,
                paths=tuple(leaf.path for leaf in found),
                kinds=tuple(leaf.kind for leaf in found),
                shapes=tuple(leaf.shape for leaf in found),
                dtypes=tuple(leaf.dtype for leaf in found),
                trained=self._trained(source, found, tree.ids) if self._trained else (False,) * len(found),
            )
            self._version = tree.version
        return self._table
