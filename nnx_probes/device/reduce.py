"""The measuring program: a flat list of arrays in, one small array of words out.

All leaves of a group go through one compiled program. What it returns is one uint32 vector, so a probe
costs one launch and one device-to-host copy, whatever the number of leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx_probes.device.mix64 import mix64
from nnx_probes.device.stacks import Stacks

__all__ = ["Measurement", "Program", "apart", "count_nonfinite", "on_one_device", "plain"]

_TINY = 1e-30
"""Sums of squares below this have lost digits to underflow in float32 (smallest normal: 1.2e-38)."""

_CHUNK = 1 << 12
"""Elements that are counted at once."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Statistics on the host, one row a leaf.

    Attributes:
      norm: float32[n], L2 norm over all elements; complex by modulus, integers and booleans as numbers.
      max_abs: float32[n], largest magnitude, NaN if any element is NaN.
      nonfinite: int32[n], number of NaN and infinite elements.
      lanes: uint32[n, 2], the `mix64` lanes, or None when the program does not hash.
      value: float64[n], the element itself for leaves of one element, else NaN. Exact for float32 and
        narrower floats and for integers below 2^32.
    """

    norm: np.ndarray
    max_abs: np.ndarray
    nonfinite: np.ndarray
    lanes: np.ndarray | None
    value: np.ndarray


class Program:
    """Measures lists of arrays; compiles once for each list of shapes, dtypes and shardings.

    Args:
      hashing: whether to compute `mix64` as well.

    Attributes:
      traces: how often it was traced. One over a whole run, unless shapes change.
    """

    def __init__(self, *, hashing: bool) -> None:
        self._hashing = hashing
        self.traces = 0
        self._compiled: dict[Any, Any] = {}

    def enqueue(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Queues the measurement and returns at once; nothing waits for the device.

        Args:
          arrays: device arrays on one set of devices, of any dtype.

        Returns:
          uint32[k], the packed result, to be handed to `unpack` together with the dtypes.
        """
        sharding = _replicated(arrays)
        if sharding not in self._compiled:
            self._compiled[sharding] = jax.jit(self._measure, out_shardings=sharding, static_argnames="together")
        packed: jax.Array = self._compiled[sharding](list(arrays), together=on_one_device(arrays))
        if not isinstance(packed, jax.core.Tracer):
            packed.copy_to_host_async()
        return packed

    def _measure(self, arrays: list[jax.Array], together: bool) -> jax.Array:
        self.traces += 1
        if not arrays:
            return jnp.zeros((0,), jnp.uint32)
        with jax.named_scope("nnx_probes"):
            stacks = Stacks(arrays, together=together)
            square = stacks.each(lambda x: _sum_of_squares(plain(apart(x))))
            largest = stacks.each(lambda x: _largest(plain(apart(x))))
            # A finite sum of squares proves all elements finite. Only where it is not, or where it lost its
            # digits, is there a second look; the branch costs nothing on a healthy step.
            odd = ~jnp.isfinite(square) | ((square < _TINY) & (largest > 0))
            norm, nonfinite = lax.cond(
                jnp.any(odd), lambda: _second_look(stacks, largest), lambda: (jnp.sqrt(square), _zeros(len(arrays)))
            )
            norm = jnp.where(odd, norm, jnp.sqrt(square))
            parts = [_bits(norm), _bits(largest), _bits(nonfinite), stacks.each(_single)]
            if self._hashing:
                parts.append(stacks.each(mix64).reshape(-1))
            return jnp.concatenate(parts)

    def unpack(self, packed: Any, arrays: Sequence[Any]) -> Measurement:
        """Returns the statistics in `packed` (what `enqueue` returned) on the host.

        Args:
          packed: uint32[k]; waits for the device if the program has not run yet.
          arrays: anything with the shapes and dtypes that were measured.
        """
        words = np.asarray(jax.device_get(packed))
        n = len(arrays)
        rows = words[: 4 * n].reshape(4, n)
        return Measurement(
            norm=rows[0].view(np.float32),
            max_abs=rows[1].view(np.float32),
            nonfinite=rows[2].view(np.int32),
            lanes=words[4 * n :].reshape(n, 2) if self._hashing else None,
            value=np.array([_read_single(w, x) for w, x in zip(rows[3], arrays, strict=True)], np.float64),
        )


def _replicated(arrays: Sequence[jax.Array]) -> NamedSharding | None:
    """The sharding that puts the result on every device, where the input lies on more than one."""
    for x in arrays:
        sharding = x.sharding
        if len(sharding.device_set) > 1 and isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
            return NamedSharding(mesh, PartitionSpec()) if isinstance(mesh, Mesh) else None
    return None


def on_one_device(arrays: Sequence[Any]) -> bool:
    """Whether none of `arrays` is known to be spread over devices."""
    return all(
        not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or len(x.sharding.device_set) == 1
        for x in arrays
    )


def apart(x: jax.Array) -> jax.Array:
    """Returns `x` such that reductions of it are not fused with others.

    XLA's CPU backend runs two or three reductions in one fused loop 3 to 7 times slower than one after another (2 instead
    of 8 to 22 GB/s here on two cores). Elsewhere one fused read is what one wants.
    """
    if jax.default_backend() != "cpu" or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    alone: jax.Array
    alone, _ = lax.optimization_barrier((x, x))
    return alone


def plain(x: jax.Array) -> Any:
    """`x` as real floats of at least 32 bits."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.where(jnp.isnan(x), jnp.nan, jnp.abs(x))  # |nan + inf j| is inf, or NaN, depending on jax's version
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _sum_of_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(x * x).astype(jnp.float32)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def _second_look(stacks: Stacks, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    def norm(original: jax.Array, top: jax.Array) -> jax.Array:
        x = plain(original)
        scale = jnp.where((top > 0) & jnp.isfinite(top), top, 1).astype(x.dtype)
        scaled = x / scale
        found: jax.Array = (jnp.sqrt(jnp.sum(scaled * scaled)) * scale).astype(jnp.float32)
        return found

    return stacks.each(norm, largest), stacks.each(count_nonfinite)


def count_nonfinite(x: jax.Array, axes: tuple[int, ...] | None = None) -> Any:
    """How many elements are NaN or infinite, over `axes` or over all: int32."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros(() if axes is None else [n for i, n in enumerate(x.shape) if i not in axes], jnp.int32)
    # Complex numbers by their parts: the modulus of two large finite parts may overflow. Narrow floats as float32.
    x = x if jnp.issubdtype(x.dtype, jnp.complexfloating) or x.dtype == jnp.float64 else x.astype(jnp.float32)
    if jax.default_backend() != "cpu" or x.size <= _CHUNK:
        return jnp.sum(~jnp.isfinite(x), axis=axes, dtype=jnp.int32)
    if axes is None or len(axes) == x.ndim:
        return _count_in_chunks(x)
    layers = next(i for i in range(x.ndim) if i not in axes)
    return lax.map(_count_in_chunks, jnp.moveaxis(x, layers, 0))


def _count_in_chunks(x: jax.Array) -> jax.Array:
    """The count over all of `x`.

    XLA's CPU backend writes down what it sums where that is a comparison, 4 bytes an element; over short pieces it does not,
    and is 4 times faster (5.6 instead of 1.3 GB/s here on two cores).
    """
    row = x.reshape(-1)
    whole = row.size // _CHUNK
    if whole == 0:
        return jnp.sum(~jnp.isfinite(row), dtype=jnp.int32)

    def add(i: jax.Array, count: jax.Array) -> jax.Array:
        piece = lax.dynamic_slice(row, (i * _CHUNK,), (_CHUNK,))
        return count + jnp.sum(~jnp.isfinite(piece), dtype=jnp.int32)

    count = lax.fori_loop(0, whole, add, jnp.int32(0))
    return jnp.asarray(count + jnp.sum(~jnp.isfinite(row[whole * _CHUNK :]), dtype=jnp.int32))


def _zeros(n: int) -> jax.Array:
    return jnp.zeros((n,), jnp.int32)


def _bits(x: jax.Array) -> Any:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _single_kind(x: Any) -> str:
    """How the element of a one-element leaf travels: ``"u"``, ``"i"`` or ``"f"``; ``""`` for other leaves."""
    dtype = x.dtype
    if x.size != 1 or jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return ""
    if dtype == np.bool_ or jnp.issubdtype(dtype, jnp.unsignedinteger):
        return "u"
    if jnp.issubdtype(dtype, jnp.integer):
        return "i"
    return "" if jnp.issubdtype(dtype, jnp.complexfloating) else "f"


def _single(x: jax.Array) -> Any:
    """The word that carries the element of a one-element leaf (0 for all others)."""
    kind = _single_kind(x)
    if not kind:
        return jnp.uint32(0)
    wide = {"u": jnp.uint32, "i": jnp.int32, "f": jnp.float32}[kind]
    return _bits(x.reshape(()).astype(wide))


def _read_single(word: np.uint32, x: Any) -> float:
    kind = _single_kind(x)
    if not kind:
        return float("nan")
    return float({"u": word, "i": word.view(np.int32), "f": word.view(np.float32)}[kind])
