"""One group of leaves, measured together: enqueue now, read later, hold nothing of the user's in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nnx_probes.device.fingerprint import check_method, choose_method, xxh3_texts
from nnx_probes.device.leaves import Leaf, Tree
from nnx_probes.device.mix64 import mix64_text
from nnx_probes.device.ready import seconds_until_ready
from nnx_probes.device.reduce import Measurement, Program
from nnx_probes.device.stacks import shares

__all__ = ["Pending", "Probe", "Sample"]

GONE = "deleted"
TRACED = "traced"


@dataclass(frozen=True, slots=True)
class Sample:
    """What one probe of one group found; arrays have one row a leaf, in the order of `leaves`.

    Attributes:
      leaves: the names; `version` changes whenever they do.
      norm, max_abs, nonfinite, value: as in `Measurement`; NaN (0 for `nonfinite`) where unreadable.
      fingerprints: one text a leaf, empty without fingerprints.
      unreadable: path to ``"deleted"`` (donated or freed) or ``"traced"`` (inside a transformation).
      replaced: paths whose Variable object is another one than at the first probe.
    """

    leaves: tuple[Leaf, ...]
    version: int
    norm: np.ndarray
    max_abs: np.ndarray
    nonfinite: np.ndarray
    value: np.ndarray
    fingerprints: tuple[str, ...]
    unreadable: dict[str, str]
    replaced: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: Any
    size: int


class Pending:
    """A queued measurement; keeps only the program's own output alive.

    Attributes:
      waited_s: seconds that queueing it waited for the step that made the arrays.
    """

    def __init__(
        self, parts: list[tuple[list[int], list[_Spec], Program, jax.Array]], sample: Sample, waited_s: float = 0.0
    ) -> None:
        self._parts = parts
        self._sample = sample
        self.waited_s = waited_s

    def ready(self) -> bool:
        """Whether `fetch` would return without waiting for the device."""
        return all(_is_ready(packed) for _, _, _, packed in self._parts)

    def fetch(self) -> Sample:
        """Returns the statistics; one device-to-host copy (one a device set where leaves lie on several)."""
        sample = self._sample
        texts = list(sample.fingerprints)
        for rows, specs, program, packed in self._parts:
            found = program.unpack(packed, specs)
            _scatter(sample, rows, found)
            if found.lanes is not None:
                for row, lanes in zip(rows, found.lanes, strict=True):
                    texts[row] = mix64_text(lanes)
        return replace(sample, fingerprints=tuple(texts))


class Probe:
    """Measures everything in one source (see `Tree` for what a source can be).

    Args:
      source: the live object, any pytree, or a getter.
      fingerprints: ``"auto"``, ``"mix64"``, ``"xxh3"`` or None for none.
      may_be_empty: as in `Tree`.

    Cost of `enqueue`: one flattening and one launch; with ``xxh3`` (the CPU backend) it also waits for the
    arrays and hashes them at once, at memory speed, since they may be donated to the next step.
    """

    def __init__(self, source: Any, *, fingerprints: str | None = "auto", may_be_empty: bool = False) -> None:
        if fingerprints is not None:
            check_method(fingerprints)
        self.tree = Tree(source, may_be_empty=may_be_empty)
        self._method = fingerprints
        self._programs: dict[bool, Program] = {}

    @property
    def traces(self) -> int:
        """How often the measuring program was traced."""
        return sum(p.traces for p in self._programs.values())

    def prefer(self, method: str) -> None:
        """Settles what ``"auto"`` means, so that fingerprints can be compared with others."""
        if self._method == "auto":
            self._method = method

    def enqueue(self) -> Pending:
        """Reads the source now and queues its measurement."""
        arrays = self.tree.read()
        unreadable = {leaf.path: why for leaf, x in zip(self.tree.leaves, arrays, strict=True) if (why := _why_not(x))}
        sample = _blank(self.tree, unreadable, hashing=self._method is not None)
        usable = [i for i, leaf in enumerate(self.tree.leaves) if leaf.path not in unreadable]
        on_device = [i for i in usable if isinstance(arrays[i], jax.Array)]
        method = choose_method([arrays[i] for i in on_device]) if self._method == "auto" else self._method
        if on_device:
            self._method = method  # for good; while nothing can be read it may yet turn out otherwise
        texts = list(sample.fingerprints)
        on_host = sorted(set(usable).difference(on_device))
        for i in on_host:
            _scatter(sample, [i], _measure_host(arrays[i]))
        parts, traced = [], set[int]()
        program = self._program(method == "mix64")
        placed = _by_devices(arrays, on_device)
        for rows in ([group[i] for i in part] for group in placed for part in shares([arrays[i] for i in group])):
            chosen = [arrays[i] for i in rows]
            specs = [_Spec(x.shape, x.dtype, x.size) for x in chosen]
            packed = program.enqueue(chosen)
            if isinstance(packed, jax.core.Tracer):  # called inside a compiled function, on arrays from outside it
                traced.update(rows)
            else:
                parts.append((rows, specs, program, packed))
        unreadable.update((self.tree.leaves[i].path, TRACED) for i in traced)
        waited_s = 0.0
        if method is not None:
            hashed = [i for i in (usable if method == "xxh3" else on_host) if i not in traced]
            waited_s = seconds_until_ready(arrays[i] for i in hashed)
            for i, text in zip(hashed, xxh3_texts([arrays[i] for i in hashed]), strict=True):
                texts[i] = text
        return Pending(parts, replace(sample, fingerprints=tuple(texts), unreadable=unreadable), waited_s)

    def _program(self, hashing: bool) -> Program:
        if hashing not in self._programs:
            self._programs[hashing] = Program(hashing=hashing)
        return self._programs[hashing]


def _is_ready(x: Any) -> bool:
    return bool(x.is_ready())


def _why_not(x: Any) -> str:
    if isinstance(x, jax.core.Tracer):
        return TRACED
    return GONE if isinstance(x, jax.Array) and x.is_deleted() else ""


def _blank(tree: Tree, unreadable: dict[str, str], *, hashing: bool) -> Sample:
    n = len(tree.leaves)
    return Sample(
        leaves=tree.leaves,
        version=tree.version,
        norm=np.full(n, np.nan, np.float32),
        max_abs=np.full(n, np.nan, np.float32),
        nonfinite=np.zeros(n, np.int32),
        value=np.full(n, np.nan),
        fingerprints=tuple(unreadable.get(leaf.path, "") for leaf in tree.leaves) if hashing else (),
        unreadable=unreadable,
        replaced=tree.replaced,
    )


def _scatter(sample: Sample, rows: Sequence[int], found: Measurement) -> None:
    sample.norm[rows] = found.norm
    sample.max_abs[rows] = found.max_abs
    sample.nonfinite[rows] = found.nonfinite
    sample.value[rows] = found.value


def _measure_host(x: Any) -> Measurement:
    """The same statistics of an array that lies on the host; no transfer, so guards stay content."""
    array = np.asarray(x)
    wide = np.float64 if array.dtype.itemsize > 4 else np.float32
    plain = (_modulus(array) if array.dtype.kind == "c" else array).reshape(-1).astype(wide, copy=False)
    single = array.size == 1 and array.dtype.kind != "c"
    with np.errstate(all="ignore"):
        square = float(np.dot(plain, plain))
        if not np.isfinite(square) or square < 1e-30:  # overflow, underflow, or an element that is not finite
            square = float(np.sum(np.square(plain, dtype=np.float64)))
        parts = array if array.dtype.kind == "c" else plain  # a modulus may overflow where no part does
        bad = 0 if np.isfinite(square) else int(plain.size - np.isfinite(parts).sum())
        return Measurement(
            norm=np.array([np.sqrt(square)], np.float32),
            max_abs=np.array([max(np.max(plain, initial=0), -np.min(plain, initial=0))], np.float32),
            nonfinite=np.array([bad], np.int32),
            lanes=None,
            value=np.array([float(array.reshape(())) if single else np.nan]),
        )


def _modulus(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        size: np.ndarray = np.where(np.isnan(x), np.nan, np.abs(x.astype(np.complex128)))
    return size


def _by_devices(arrays: Sequence[Any], rows: Sequence[int]) -> list[list[int]]:
    """Rows grouped by the devices they lie on, in order: one program cannot read from two groups."""
    groups: dict[tuple[int, ...], list[int]] = {}
    known: dict[Any, tuple[int, ...]] = {}
    for row in rows:
        sharding = arrays[row].sharding
        key = known.get(sharding)
        if key is None:
            key = known[sharding] = _devices(sharding)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _devices(sharding: Any) -> tuple[int, ...]:
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, Mesh):
        return tuple(d.id for d in mesh.devices.flat)
    return tuple(sorted(d.id for d in sharding.device_set))
