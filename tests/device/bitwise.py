"""Arrays of every dtype made from bit patterns, and ways to damage them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Kind:
    """One dtype. Bit patterns are unsigned integers, `parts` of them an element (re and im; words of a key)."""

    name: str
    dtype: object
    bits: int
    parts: int = 1
    signed_zero: bool = False
    x64: bool = False

    @property
    def pattern(self):
        return np.dtype(f"uint{max(8, self.bits)}")

    def shape(self, *elements):
        return (*elements, *((self.parts,) if self.parts > 1 else ()))

    def random(self, rng, *elements):
        raw = rng.integers(0, 2**63, self.shape(*elements), dtype=np.uint64)
        raw = raw ^ (rng.integers(0, 2, raw.shape, dtype=np.uint64) << np.uint64(63))
        return (raw & np.uint64(2**self.bits - 1)).astype(self.pattern)

    def host(self, raw):
        """The NumPy array with these bits; of keys, their data."""
        if self.name == "key":
            return raw
        if self.name == "bool":
            return raw.astype(np.bool_)
        if self.name.startswith("int") and self.bits < 8:
            half = 1 << (self.bits - 1)
            return ((raw.astype(np.int16) ^ half) - half).astype(np.int8).astype(self.dtype)
        if self.bits < 8 and not self.name.startswith("float"):
            return raw.astype(self.dtype)
        typed = np.ascontiguousarray(raw).view(self.dtype)
        return typed.reshape(raw.shape[:-1]) if self.parts > 1 else typed

    def device(self, raw):
        if self.name == "key":
            return jax.random.wrap_key_data(jnp.asarray(raw))
        x = jnp.asarray(self.host(raw))
        assert x.dtype == self.dtype
        return x

    def mode(self):
        return jax.enable_x64(True) if self.x64 else contextlib.nullcontext()


KINDS = (
    Kind("float32", np.float32, 32, signed_zero=True),
    Kind("float16", np.float16, 16, signed_zero=True),
    Kind("bfloat16", ml_dtypes.bfloat16, 16, signed_zero=True),
    Kind("float64", np.float64, 64, signed_zero=True, x64=True),
    Kind("float8_e4m3fn", ml_dtypes.float8_e4m3fn, 8, signed_zero=True),
    Kind("float8_e5m2", ml_dtypes.float8_e5m2, 8, signed_zero=True),
    Kind("float8_e4m3b11fnuz", ml_dtypes.float8_e4m3b11fnuz, 8),
    Kind("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, 8),
    Kind("float4_e2m1fn", ml_dtypes.float4_e2m1fn, 4, signed_zero=True),
    Kind("int2", ml_dtypes.int2, 2),
    Kind("uint2", ml_dtypes.uint2, 2),
    Kind("int4", ml_dtypes.int4, 4),
    Kind("uint4", ml_dtypes.uint4, 4),
    Kind("int8", np.int8, 8),
    Kind("uint8", np.uint8, 8),
    Kind("int16", np.int16, 16),
    Kind("uint16", np.uint16, 16),
    Kind("int32", np.int32, 32),
    Kind("uint32", np.uint32, 32),
    Kind("int64", np.int64, 64, x64=True),
    Kind("uint64", np.uint64, 64, x64=True),
    Kind("bool", np.bool_, 1),
    Kind("complex64", np.complex64, 32, parts=2, signed_zero=True),
    Kind("complex128", np.complex128, 64, parts=2, signed_zero=True, x64=True),
    Kind("key", None, 32, parts=2),
)
NAMES = [kind.name for kind in KINDS]


def corruptions(kind, rng, each, n=12):
    """Returns name -> (before, after): bit patterns [rows, n(, parts)] that differ in every row."""
    found = {}

    def add(name, before, after):
        differs = (before != after).reshape(each, -1).any(axis=1)
        found[name] = before[differs], after[differs]

    rows = np.arange(each)
    top = np.array(1, kind.pattern)

    def pick(flat, k):  # k different positions a row
        return np.argsort(rng.random((each, flat.shape[1])), axis=1)[:, :k]

    def fresh():
        raw = kind.random(rng, each, n)
        return raw, raw.reshape(each, -1)

    raw, flat = fresh()
    after = flat.copy()
    after[rows, pick(flat, 1)[:, 0]] ^= top << rng.integers(0, kind.bits, each).astype(kind.pattern)
    add("one bit", raw, after.reshape(raw.shape))

    raw, flat = fresh()
    after, (i, j) = flat.copy(), pick(flat, 2).T
    bit = top << rng.integers(0, kind.bits, each).astype(kind.pattern)
    after[rows, i] ^= bit
    after[rows, j] ^= bit
    add("the same bit in two places", raw, after.reshape(raw.shape))

    raw, _ = fresh()
    i, j = np.argsort(rng.random((each, n)), axis=1)[:, :2].T
    raw[rows[::2], j[::2]] = raw[rows[::2], i[::2]]  # near ones: half of the pairs differ in one bit only
    raw.reshape(each, n, -1)[rows[::2], j[::2], 0] ^= top << rng.integers(0, kind.bits, len(rows[::2])).astype(
        kind.pattern
    )
    after = raw.copy()
    after[rows, i], after[rows, j] = raw[rows, j], raw[rows, i]
    add("two elements swapped", raw, after)

    raw, _ = fresh()
    order = np.argsort(rng.random((each, n)), axis=1)
    add("a permutation", raw, raw[rows[:, None], order])

    if kind.signed_zero:
        raw, flat = fresh()
        i = pick(flat, 1)[:, 0]
        flat[rows, i] = 0
        after = flat.copy()
        after[rows, i] = top << np.array(kind.bits - 1, kind.pattern)
        add("the sign of a zero", flat.reshape(raw.shape), after.reshape(raw.shape))

    raw, _ = fresh()
    first, last = np.sort(np.argsort(rng.random((each, n + 1)), axis=1)[:, :2], axis=1).T
    inside = (np.arange(n) >= first[:, None]) & (np.arange(n) < last[:, None])
    low = np.array((1 << max(1, kind.bits // 2)) - 1, kind.pattern)
    mask = inside.reshape(each, n, *(1,) * (raw.ndim - 2))
    add("a slice truncated to half its bits", raw, np.where(mask, raw & ~low, raw))

    raw, _ = fresh()
    add("a slice set to zero", raw, np.where(mask, np.array(0, kind.pattern), raw))
    return found
