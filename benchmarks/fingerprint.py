"""How fast parameters are fingerprinted: gigabytes a second of each method, beside one read of the same bytes.

    python benchmarks/fingerprint.py [--quick] [--gpu]

The methods run in turn on the same arrays, the parameters of a model of two tables; given are medians over rounds and the
median (10th to 90th percentile) of the time against one plain read in the same round. *Whole probe* is what a monitor does
with parameters on a due step: norm, largest magnitude, non-finite elements and fingerprint of every leaf.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "" if "--gpu" in sys.argv else "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from flax import nnx
from models import PROGRAMS, Embedding, size_of

import nnx_probes as probes
from nnx_probes.device.probe import Probe


def methods(model: nnx.Module) -> dict[str, Callable[[], object]]:
    """Name -> what to time; the first is the read that the others are compared with."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    host = [np.asarray(x) for x in leaves]
    words = [x.reshape(-1).view(np.uint64 if x.size % 2 == 0 else np.uint32) for x in host]
    on_device = jax.jit(lambda xs: jnp.stack([jnp.max(x) for x in xs]))
    whole = Probe(nnx.state(model, nnx.Param))
    plain = Probe(nnx.state(model, nnx.Param), fingerprints=None)
    where = leaves[0].devices().pop().platform

    def read() -> object:
        if where == "cpu":
            return [int(np.bitwise_xor.reduce(x)) for x in words]
        return jax.block_until_ready(on_device(leaves))

    return {
        "one read": read,
        "hash(np.asarray(p).tobytes())": lambda: [hash(np.asarray(x).tobytes()) for x in leaves],
        "hashlib.blake2b": lambda: [hashlib.blake2b(np.asarray(x), digest_size=8).digest() for x in leaves],
        "xxhash.xxh3_64": lambda: [xxhash.xxh3_64_intdigest(np.asarray(x)) for x in leaves],
        'fingerprint(method="xxh3")': lambda: probes.fingerprint(model, method="xxh3"),
        'fingerprint(method="mix64")': lambda: probes.fingerprint(model, method="mix64"),
        "statistics without fingerprint": lambda: plain.enqueue().fetch(),
        "whole probe": lambda: whole.enqueue().fetch(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument("--gpu", action="store_true", help="on the default accelerator")
    quick = parser.parse_args().quick
    model = Embedding(nnx.Rngs(0), 256, 8192) if quick else PROGRAMS[2].build()
    size, device = size_of(model), jax.devices()[0]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {device.device_kind}, jax {jax.__version__}; "
        f"{size / 1e6:.0f} MB of parameters\n"
    )
    table = methods(model)
    times: dict[str, list[float]] = {name: [] for name in table}
    for turn in range(4 if quick else 16):
        for name, call in table.items():
            began = time.perf_counter()
            call()
            if turn:  # the first compiles
                times[name].append(time.perf_counter() - began)
    print("| method | GB/s | reads | times faster than hash of bytes |\n| --- | ---: | ---: | ---: |")
    base, trick = np.array(times["one read"]), np.array(times["hash(np.asarray(p).tobytes())"])
    for name, taken in times.items():
        low, middle, high = np.percentile(np.array(taken) / base, [10, 50, 90])
        faster = float(np.median(trick / np.array(taken)))
        print(
            f"| {name} | {size / 1e9 / float(np.median(taken)):.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) "
            f"| {faster:.1f} |"
        )


if __name__ == "__main__":
    main()
