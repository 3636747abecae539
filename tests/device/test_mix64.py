"""Fingerprints against independent references, and against damage.

The reference of mix64 is written from the module docstring of `nnx_probes.device.mix64` alone. Two places of that
text leave room; the readings taken here:

* "the value modulo 16" of types below one byte says nothing for float4: read as its four bits.
* "flattened in row-major order" for typed PRNG keys: the key data's own trailing axis comes last.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from bitwise import KINDS, NAMES, corruptions

from nnx_probes.device.fingerprint import choose_method, fingerprint, xxh3_texts
from nnx_probes.device.mix64 import mix64, mix64_text

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5), (2, 3, 5), (1, 1, 7, 2)]
LANES = [
    dict(M=0x9E3779B1, S=0x243F6A88, P=0x21F0AAAD, Q=0xD35A2D97, a=16, b=15, c=15),
    dict(M=0x85EBCA77, S=0x13198A2E, P=0x85EBCA6B, Q=0xC2B2AE35, a=16, b=13, c=16),
]


def words(kind, raw):
    """Step 1 of the definition: uint64[number of words], each below 2^32."""
    flat = raw.reshape(-1).astype(np.uint64)  # complex: real part first; keys: their data
    if kind.bits < 64:
        return flat
    return np.stack([flat & np.uint64(0xFFFFFFFF), flat >> np.uint64(32)], axis=-1).reshape(-1)  # low half first


def reference(w):
    """Steps 2 and 3 over the last axis of the words: uint64[..., 2]."""
    mod = np.uint64(0xFFFFFFFF)
    i = np.arange(w.shape[-1], dtype=np.uint64)
    lanes = []
    for k in LANES:
        k = {name: np.uint64(value) for name, value in k.items()}
        x = w ^ ((i * k["M"] + k["S"]) & mod)
        x ^= x >> k["a"]
        x = (x * k["P"]) & mod
        x ^= x >> k["b"]
        x = (x * k["Q"]) & mod
        x ^= x >> k["c"]
        lanes.append(x.sum(axis=-1, dtype=np.uint64) & mod)
    return np.stack(lanes, axis=-1)


@pytest.fixture(params=KINDS, ids=NAMES)
def kind(request):
    with request.param.mode():
        yield request.param


def test_mix64_is_what_its_docstring_defines(kind):
    rng = np.random.default_rng(1)
    raws = [kind.random(rng, *shape) for shape in SHAPES]
    found = jax.jit(lambda xs: [mix64(x) for x in xs])([kind.device(raw) for raw in raws])
    for shape, raw, lanes in zip(SHAPES, raws, found, strict=True):
        expected = reference(words(kind, raw))
        assert lanes.dtype == jnp.uint32 and lanes.shape == (2,)
        assert np.array_equal(np.asarray(lanes), expected), (kind.name, shape)
        assert mix64_text(lanes) == "mix64:{:08x}{:08x}".format(*map(int, expected))
    assert mix64_text(found[1]) == "mix64:0000000000000000"  # an empty leaf


def test_mix64_misses_none_of_10000_corruptions(kind):
    program = jax.jit(jax.vmap(mix64))
    rows = 0
    for name, (before, after) in corruptions(kind, np.random.default_rng(2), 2600).items():
        kept = len(before)
        pad = np.resize(before, (2600, *before.shape[1:])), np.resize(after, (2600, *after.shape[1:]))
        one, two = (np.asarray(program(kind.device(raw)))[:kept] for raw in pad)
        missed = np.flatnonzero((one == two).all(axis=1))
        assert not len(missed), (name, len(missed), kept, before[missed[0]], after[missed[0]])
        if name in ("one bit", "the sign of a zero"):
            assert (one != two).all()  # a bijection of each word: both lanes change
        rows += kept
    assert rows >= 10_000


def test_mix64_of_many_rows_is_the_reference_too(kind):
    raw = kind.random(np.random.default_rng(3), 50, 12)
    found = np.asarray(jax.jit(jax.vmap(mix64))(kind.device(raw)))
    assert np.array_equal(found, np.stack([reference(words(kind, row)) for row in raw]))


def test_mix64_sees_what_is_cut_off_at_the_end(kind):
    raw = kind.random(np.random.default_rng(4), 40)
    programs = jax.jit(lambda x: jnp.stack([mix64(x[:n]) for n in (40, 39, 20, 1, 0)]))
    assert len(np.unique(np.asarray(programs(kind.device(raw))), axis=0)) == 5


def test_xxh3_is_xxh3_of_the_row_major_bytes(kind):
    rng = np.random.default_rng(5)
    for shape in SHAPES:
        raw = kind.random(rng, *shape)
        expected = "xxh3:" + xxhash.xxh3_64_hexdigest(kind.host(raw).tobytes())
        assert xxh3_texts([kind.device(raw), kind.host(raw)]) == [expected, expected]


def test_xxh3_misses_none_of_1000_corruptions(kind):
    rows = 0
    for name, (before, after) in corruptions(kind, np.random.default_rng(6), 260).items():
        for one, two in zip(kind.host(before), kind.host(after), strict=True):
            first, second = xxh3_texts([one, two])
            assert first != second, name
        rows += len(before)
    assert rows >= 1000


@pytest.mark.parametrize("method", ["mix64", "xxh3"])
@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_payloads_of_nans_and_signs_of_zeros_count(method, wrap):
    patterns = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001, 0x7F800000, 0x00000000, 0x80000000], np.uint32)
    texts = [fingerprint(wrap(p.reshape(1).view(np.float32)), method=method)["value"] for p in patterns]
    assert len(set(texts)) == len(patterns)


@pytest.mark.parametrize("method", ["mix64", "xxh3"])
def test_a_reshape_in_row_major_order_keeps_the_value_and_a_transposition_does_not(method):
    x = jnp.asarray(np.random.default_rng(7).normal(size=(4, 6)).astype(np.float32))
    value = fingerprint({"x": x}, method=method)
    for shape in [(24,), (6, 4), (2, 3, 4), (1, 24)]:
        assert fingerprint({"x": x.reshape(shape)}, method=method) == value
    assert fingerprint({"x": x.T}, method=method) != value


@pytest.mark.parametrize("method", ["mix64", "xxh3"])
def test_host_arrays_and_numbers_have_the_value_of_the_same_bits_on_the_device(method):
    on_host = {"f": np.arange(5, dtype=np.float32), "i": np.int32(7), "b": True}
    on_device = {"f": jnp.arange(5, dtype=jnp.float32), "i": jnp.int32(7), "b": jnp.bool_(True)}
    assert fingerprint(on_host, method=method) == fingerprint(on_device, method=method)


@pytest.mark.parametrize("method", ["mix64", "xxh3"])
def test_host_numbers_of_64_bits_keep_all_their_bits(method):
    near = np.nextafter(0.1, 1)
    pairs = [
        (np.array([0.1]), np.array([near])),
        (0.1, float(near)),
        (np.int64(1), np.int64(1 + 2**32)),
        (2**40, 2**40 + 1),
    ]
    for one, two in pairs:
        assert fingerprint(one, method=method) != fingerprint(two, method=method)
    with jax.enable_x64(True):
        assert fingerprint(np.array([0.1]), method=method) == fingerprint(jnp.array([0.1]), method=method)


def test_a_big_leaf_counts_every_index():
    raw = np.random.default_rng(8).integers(0, 2**32, (300, 257), dtype=np.uint32)
    assert np.array_equal(np.asarray(jax.jit(mix64)(raw)), reference(raw.reshape(-1).astype(np.uint64)))


def test_auto_is_xxh3_on_the_cpu_and_each_value_says_its_method():
    assert choose_method([jnp.ones(2), np.ones(2), 1.0]) == "xxh3"
    tree = {"a": jnp.ones(2), "k": jax.random.key(0)}
    assert {v.split(":")[0] for v in fingerprint(tree).values()} == {"xxh3"}
    assert {v.split(":")[0] for v in fingerprint(tree, method="mix64").values()} == {"mix64"}


def test_an_unknown_method_is_told_with_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'mix64'"):
        fingerprint({"a": 1.0}, method="mix46")
