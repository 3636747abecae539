"""Microseconds of one call of the monitor: on a step that is not due, and on one that is.

usage: python benchmarks/hook.py [--quick]

Each figure is the median over calls, with the 10th and 90th percentile behind it; all rows come from one run. A due call
is timed with the probe's own device program awaited (sync=True), so it holds all that a probe costs, compilation apart.
"""

from __future__ import annotations

import argparse
import os
import platform
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_probes as probes


class Net(nnx.Module):
    """Many equal layers: `leaves` parameter leaves of `width` x `width`."""

    def __init__(self, leaves: int, width: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(leaves)])


def percentiles(seconds: list[float]) -> str:
    low, middle, high = np.percentile(np.array(seconds) * 1e6, [10, 50, 90])
    return f"{middle:,.1f} ({low:,.1f} to {high:,.1f})"


def timed(call, n: int) -> list[float]:
    found = []
    for i in range(n):
        began = time.perf_counter()
        call(i)
        found.append(time.perf_counter() - began)
    return found


def row(leaves: int, width: int, calls: int) -> str:
    model = Net(leaves, width, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    loss, batch = jnp.float32(1.0), {"x": np.ones((8, 8), np.float32)}
    far = probes.Monitor(None, model=model, optimizer=optimizer, every=10**9)
    far(1, loss=loss, batch=batch)
    far.flush()
    bare = timed(lambda i: far(i + 2), calls)
    full = timed(lambda i: far(i + 2 + calls, loss=loss, batch=batch, metrics={"a": loss}), calls)
    due = probes.Monitor(None, model=model, optimizer=optimizer, every=1, sync=True, rules=[])
    due(0, loss=loss, batch=batch)
    each = timed(lambda i: due(i + 1, loss=loss, batch=batch), max(5, calls // 200))
    far.close()
    due.close()
    size = leaves * width * width / 1e6
    return f"| {leaves} | {size:.2f} | {percentiles(bare)} | {percentiles(full)} | {percentiles(each)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls and sizes")
    quick = parser.parse_args().quick
    calls = 500 if quick else 5000
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}, "
        f"flax {flax.__version__}, n = {calls} calls"
    )
    print("| parameter leaves | million parameters | not due, µs | not due with loss, batch, metrics, µs | due, µs |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for leaves, width in [(10, 32), (100, 32)] if quick else [(10, 32), (100, 32), (100, 316), (600, 32)]:
        print(row(leaves, width, calls), flush=True)


if __name__ == "__main__":
    main()
