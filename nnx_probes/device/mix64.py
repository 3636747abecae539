"""The device fingerprint ``mix64``: 64 bits a leaf that no sharding, reduction order or backend changes.

Definition, complete. Let the leaf have N elements, flattened in row-major (C) order.

1. Words. Each element becomes one or more unsigned 32-bit words:
   * 4-byte types: their bits. 2-byte and 1-byte types: their bits, zero-extended.
   * integers below one byte: the value modulo 16 (int4, uint4) or 4 (int2, uint2). float4: its 4 bits.
   * bool: 0 or 1.
   * 8-byte types (float64, int64, uint64): two words, low half first.
   * complex: the words of the real part, then those of the imaginary part.
   * typed PRNG keys: their uint32 key data, flattened.
   Word number i (from 0, modulo 2^32) has the value w; with k words an element, element j owns words
   k*j ... k*j + k - 1.
2. Mixing, modulo 2^32 throughout, ``>>`` logical. For lane A and lane B:
   ``x = w ^ (i * M + S)``; then ``x ^= x >> a; x *= P; x ^= x >> b; x *= Q; x ^= x >> c`` with

   ====  ==========  ==========  ==========  ==========  ==  ==  ==
   lane  M           S           P           Q           a   b   c
   ====  ==========  ==========  ==========  ==========  ==  ==  ==
   A     0x9E3779B1  0x243F6A88  0x21F0AAAD  0xD35A2D97  16  15  15
   B     0x85EBCA77  0x13198A2E  0x85EBCA6B  0xC2B2AE35  16  13  16
   ====  ==========  ==========  ==========  ==========  ==  ==  ==
3. Each lane is the sum of its mixed words modulo 2^32 (an empty leaf gives 0).
4. The text is ``"mix64:"`` and 16 lower-case hex digits, lane A first.

Each mixing is a bijection of w for a fixed i, so a change of one word always changes both lanes. Shape and
dtype are not part of the value: a reshape that keeps the row-major order keeps it. The finalizers are
published ones (lane A: C. Wellons' "lowbias32" of 2018 in its improved constants; lane B: A. Appleby's
MurmurHash3 fmix32); the index word and the sum, which makes the value independent of the order in which
devices add, are what this definition puts around them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["mix64", "mix64_text"]

_LANES = (
    (0x9E3779B1, 0x243F6A88, 0x21F0AAAD, 0xD35A2D97, 16, 15, 15),
    (0x85EBCA77, 0x13198A2E, 0x85EBCA6B, 0xC2B2AE35, 16, 13, 16),
)


def mix64(x: jax.Array) -> jax.Array:
    """Returns the two lanes of the fingerprint of `x` as uint32[2].

    Args:
      x: any array a device can hold, of any dtype and sharding, typed PRNG keys included.

    Cost: one read of `x`, about 20 integer operations a word; no reshape, so a sharded array is summed where
    it lies and only the two lanes cross devices.
    """
    words = _words(x)
    index = _index(words.shape)
    return jnp.stack([_lane(words, index, *constants) for constants in _LANES])


def mix64_text(lanes: Any) -> str:
    """Returns ``"mix64:"`` and 16 hex digits for one row of two uint32 lanes."""
    return f"mix64:{int(lanes[0]):08x}{int(lanes[1]):08x}"


def _lane(w: jax.Array, i: jax.Array, m: int, s: int, p: int, q: int, a: int, b: int, c: int) -> jax.Array:
    x = w ^ (i * jnp.uint32(m) + jnp.uint32(s))
    x = (x ^ (x >> a)) * jnp.uint32(p)
    x = (x ^ (x >> b)) * jnp.uint32(q)
    total: jax.Array = jnp.sum(x ^ (x >> c), dtype=jnp.uint32)
    return total


def _words(x: jax.Array) -> Any:
    """The words of `x`: uint32 of x.shape, or of x.shape + (k,) where an element has k > 1 words."""
    dtype = x.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x).astype(jnp.uint32)
    if dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        pair = [_words(jnp.real(x)), _words(jnp.imag(x))]
        deep = pair[0].ndim > x.ndim
        return jnp.concatenate(pair, axis=-1) if deep else jnp.stack(pair, axis=-1)
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
    if bits == 4 and not jnp.issubdtype(dtype, jnp.integer):  # float4 has a bitcast to its own width only
        return lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint32)
    if bits < 8:  # XLA does not bitcast int4 to uint8; the low bits of the value are the same thing
        return x.astype(jnp.int32).astype(jnp.uint32) & jnp.uint32((1 << bits) - 1)
    if bits == 64:
        return lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _index(shape: tuple[int, ...]) -> jax.Array:
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride & 0xFFFFFFFF)
        stride *= shape[axis]
    return index
