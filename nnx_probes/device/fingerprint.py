"""Fingerprints: a short text a leaf that changes when any bit of the leaf does.

Two methods, each value labelled with its own: ``mix64`` is computed where the array lies (`mix64` module),
``xxh3`` is XXH3-64 over the row-major bytes on the host, which on the CPU backend needs no copy and runs at
memory speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
import xxhash

from nnx_probes.device.leaves import Tree
from nnx_probes.device.mix64 import mix64, mix64_text
from nnx_probes.errors import ArgumentError, closest

__all__ = ["METHODS", "Method", "choose_method", "fingerprint", "xxh3_texts"]

Method = Literal["auto", "mix64", "xxh3"]
METHODS: tuple[str, ...] = ("auto", "mix64", "xxh3")


def fingerprint(tree: Any, *, method: Method = "auto") -> dict[str, str]:
    """Returns the fingerprint of every leaf: path to ``"xxh3:..."`` or ``"mix64:..."`` (16 hex digits).

    Two leaves of the same method, shape and dtype have equal fingerprints exactly when all their bits are
    equal (a chance collision has probability 2^-64). NaN payloads and the sign of zero count. Values of
    different methods cannot be compared.

    Args:
      tree: Module, State, Optimizer, any pytree of arrays, or a function without arguments that returns one.
      method: ``"auto"`` takes ``xxh3`` where all arrays lie on the CPU and this process can address them
        whole, else ``mix64``, which is the same under every sharding and on every host.

    Raises:
      ArgumentError: the method is unknown.
      ArgumentTypeError: there is no array in `tree`.

    Cost: one read of the bytes. Waits for the arrays to be computed.
    """
    check_method(method)
    source = Tree(tree)
    arrays = source.read()
    chosen = choose_method(arrays) if method == "auto" else method
    if chosen == "xxh3":
        texts = xxh3_texts(arrays)
    else:
        texts = [mix64_text(np.asarray(jax.device_get(_mix64(_on_device(x))))) for x in arrays]
    return {leaf.path: text for leaf, text in zip(source.leaves, texts, strict=True)}


_mix64 = jax.jit(mix64)


def _on_device(x: Any) -> jax.Array:
    """`x` as a device array with the same words (jax would narrow 64-bit numbers of the host to 32 bits)."""
    if isinstance(x, jax.Array):
        return x
    array = np.ascontiguousarray(x)
    if array.dtype.itemsize >= 8:
        array = array.reshape(-1).view(np.uint32)
    moved: jax.Array = jax.device_put(array)
    return moved


def check_method(method: str) -> None:
    """Raises `ArgumentError` unless `method` is one of `METHODS`."""
    if method not in METHODS:
        raise ArgumentError(
            f"method={method!r} is not a fingerprint method: expected one of {METHODS}.{closest(str(method), METHODS)}"
        )


def choose_method(arrays: Sequence[Any]) -> Literal["mix64", "xxh3"]:
    """Returns the cheaper method that gives every process the same values for these arrays."""
    on_device = [x for x in arrays if isinstance(x, jax.Array)]
    if any(not x.is_fully_addressable for x in on_device):
        return "mix64"
    platforms = {getattr(d, "platform", "") for x in on_device for d in x.sharding.device_set}
    return "xxh3" if platforms <= {"cpu"} else "mix64"


def xxh3_texts(arrays: Sequence[Any]) -> list[str]:
    """Returns ``"xxh3:"`` and 16 hex digits over the row-major bytes of each array.

    Cost: one call of ``jax.device_get`` for all of them, a view on the CPU backend and a copy elsewhere; memory speed.
    """
    return ["xxh3:" + xxhash.xxh3_64_hexdigest(x.data if x.size else b"") for x in map(_bytes, _on_host(arrays))]


def _on_host(arrays: Sequence[Any]) -> list[Any]:
    found = list(arrays)
    there = [i for i, x in enumerate(arrays) if isinstance(x, jax.Array)]
    if there:
        moved = jax.device_get([_words_of_key(arrays[i]) for i in there])
        for i, x in zip(there, moved, strict=True):
            found[i] = x
    return found


def _words_of_key(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _bytes(x: Any) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
