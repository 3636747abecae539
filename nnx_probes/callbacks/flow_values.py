"""From measured gradients and updates to named values of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_probes.device.flow import Flow, Layout
from nnx_probes.device.leaves import Leaf, Tree, dotted
from nnx_probes.device.same import Same
from nnx_probes.host.record import Leaves

__all__ = ["FlowTable"]

_Values = tuple[Mapping[str, Any], Mapping[str, Leaves]]

_STATS = {
    "grads_norm": "grads.norm",
    "grads_max_abs": "grads.max_abs",
    "grads_nonfinite": "grads.nonfinite",
    "grads_zeros": "grads.zeros",
    "updates_norm": "updates.norm",
    "updates_max_abs": "updates.max_abs",
    "updates_nonfinite": "updates.nonfinite",
    "update_ratio": "updates.ratio",
    "absorbed": "updates.absorbed",
}
"""What `step_stats` calls it -> the name in a record."""


class FlowTable:
    """Names the rows of measured gradients and updates; keeps the tables while the leaves stay the same."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[Any, ...], Leaf] = {}
        self._source: Any = None
        self._tree = Tree(lambda: self._source)
        self._model, self._filter = Same(), Same()
        self._version = -1
        self._tables: dict[Any, dict[str, Leaves]] = {}
        self._trained: list[tuple[Any, ...]] = []

    def adopt(self, model: Any, optimizer: Any) -> None:
        """Learns the names of the model's leaves."""
        if model is None:
            return
        wrt = optimizer.wrt if isinstance(optimizer, nnx.Optimizer) else nnx.Param
        refiltered = self._filter.turn_to(wrt)
        if self._model.turn_to(model):
            self._source = model
            try:
                self._tree.read()
            finally:
                self._source = None  # hold nothing of the user's between steps
        if refiltered or self._tree.version != self._version:
            self._learn(wrt)

    def _learn(self, wrt: Any) -> None:
        self._version, self._tables = self._tree.version, {}
        self._leaves = {leaf.parts: leaf for leaf in self._tree.leaves}
        chosen = nnx.filterlib.to_predicate(wrt)
        kinds = [(leaf.parts, leaf.variable) for leaf in self._tree.leaves]
        self._trained = [parts for parts, kind in kinds if kind is not None and _selects(chosen, parts, kind)]

    def values(self, layout: Layout, words: np.ndarray) -> _Values:
        """Returns the values and tables of a packed measurement."""
        flow, tables = layout.unpack(words), self._tables_of(layout)
        values: dict[str, Any] = {}
        if flow is not None:
            values.update(_named(flow, "grads.", "updates."))
        slices = layout.unpack(words, stack=True)
        if slices is not None:
            values.update(_named(slices, "slices.grads_", "slices.updates_"))
        return values, {group: table for group, table in tables.items() if _any_of(values, group)}

    def from_stats(self, stats: Mapping[str, Any]) -> _Values:
        """Returns the values and tables of what `step_stats` returned; leaves are named where their number fits."""
        fetched = jax.device_get({to: stats[of] for of, to in _STATS.items() if of in stats})  # all in one go
        found = {to: _last_row(np.asarray(fetched[to])) for to in _STATS.values() if to in fetched}
        n = len(next(iter(found.values())))
        parts = self._trained if len(self._trained) == n else [(i,) for i in range(n)]
        key = tuple(parts)
        if key not in self._tables:
            self._tables = {
                key: {group: self._table(group, parts, [()] * n, [""] * n) for group in ("grads", "updates")}
            }
        tables = self._tables[key]
        return found, {group: table for group, table in tables.items() if _any_of(found, group)}

    def _tables_of(self, layout: Layout) -> dict[str, Leaves]:
        if layout not in self._tables:
            slots = layout.slots
            parts, shapes, dtypes = [s.parts for s in slots], [s.shape for s in slots], [s.dtype for s in slots]
            tables = {group: self._table(group, parts, shapes, dtypes) for group in ("grads", "updates")}
            paths = dict(zip(parts, tables["grads"].paths, strict=True))
            stacks = [s for s in slots if s.axis is not None for _ in range(s.rows)]
            tables["slices"] = Leaves(
                group="slices",
                paths=tuple(layout.stack_paths(paths)),
                kinds=tuple(self._kind(s.parts) for s in stacks),
                shapes=tuple(s.shape[: s.axis] + s.shape[(s.axis or 0) + 1 :] for s in stacks),
                dtypes=tuple(s.dtype for s in stacks),
                trained=(True,) * len(stacks),
            )
            self._tables = {layout: tables}
        return self._tables[layout]

    def _table(self, group: str, parts: list[Any], shapes: list[Any], dtypes: list[str]) -> Leaves:
        known = [self._leaves.get(p) for p in parts]
        return Leaves(
            group=group,
            paths=tuple(leaf.path if leaf else dotted(p) for leaf, p in zip(known, parts, strict=True)),
            kinds=tuple(self._kind(p) for p in parts),
            shapes=tuple(shape or (leaf.shape if leaf else ()) for leaf, shape in zip(known, shapes, strict=True)),
            dtypes=tuple(dtype or (leaf.dtype if leaf else "") for leaf, dtype in zip(known, dtypes, strict=True)),
            trained=(True,) * len(parts),
        )

    def _kind(self, parts: tuple[Any, ...]) -> str:
        leaf = self._leaves.get(parts)
        return leaf.kind if leaf else "array"


def _last_row(values: np.ndarray) -> np.ndarray:
    """One number a leaf; of several steps at once (out of a scan) those of the last."""
    return values.reshape(-1, values.shape[-1])[-1] if values.ndim > 1 else values.reshape(-1)


def _selects(chosen: Any, parts: tuple[Any, ...], kind: type) -> bool:
    try:
        return bool(chosen(parts, object.__new__(kind)))
    except Exception:  # a filter that looks into the Variable's value
        return issubclass(kind, nnx.Param)


def _named(flow: Flow, grads: str, updates: str) -> dict[str, np.ndarray]:
    """What was measured, by name."""
    found = {}
    if not _all_nan(flow.grad_norm) or flow.grad_bad.any():
        found.update(
            {
                f"{grads}norm": flow.grad_norm,
                f"{grads}max_abs": flow.grad_max,
                f"{grads}nonfinite": flow.grad_bad,
                f"{grads}zeros": flow.grad_zeros,
            }
        )
    if not _all_nan(flow.update_norm) or flow.update_bad.any():
        found.update(
            {
                f"{updates}norm": flow.update_norm,
                f"{updates}max_abs": flow.update_max,
                f"{updates}nonfinite": flow.update_bad,
                f"{updates}ratio": flow.ratio,
            }
        )
        if not _all_nan(flow.cosine):
            found[f"{updates}cosine"] = flow.cosine
        if not _all_nan(flow.param_norm):
            found[f"{updates}absorbed"] = flow.absorbed
    return found


def _all_nan(x: np.ndarray) -> bool:
    return bool(np.isnan(x).all())


def _any_of(values: Mapping[str, Any], group: str) -> bool:
    return any(name.startswith(f"{group}.") for name in values)
