"""Device memory that watching takes, and whether anything stays behind after thousands of probes.

    python benchmarks/memory.py [--quick] [--gpu]

*Beyond one leaf* is what XLA says a compiled program needs beside its arguments and results, less the bytes of the largest
leaf: the parameters' measuring program by itself, and the measured step less the plain one. The second table calls a monitor
thousands of times and looks at live device arrays and the process's memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import sys

os.environ.setdefault("JAX_PLATFORMS", "" if "--gpu" in sys.argv else "cpu")

import jax
import jax.numpy as jnp
from flax import nnx
from models import PROGRAMS, Program, adam, floats, many_leaves, size_of, step_of

import nnx_probes as probes
from nnx_probes.device.reduce import Program as Measuring


def _temporary(compiled: jax.stages.Compiled) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def row(program: Program) -> str:
    model, step = program.build(), step_of(program.loss)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    size, largest = size_of(model), max(x.nbytes for x in leaves)
    measuring = Measuring(hashing=jax.default_backend() != "cpu")
    alone = _temporary(jax.jit(lambda xs: measuring._measure(xs, True)).lower(leaves).compile())
    optimizer = probes.watch(adam(model), model)
    batch = program.batches[0]
    plain = _temporary(step.lower(model, optimizer, batch).compile())
    jax.block_until_ready(step(model, optimizer, batch))  # only a step that was seen can be measured
    optimizer.arm(0)
    armed = _temporary(step_of(program.loss).lower(model, optimizer, batch).compile())
    optimizer.disarm(0)
    cells = (f"{1e-6 * x:.2f} ({max(0, x - largest) / size:.2%})" for x in (alone, armed - plain))
    return f"| {program.name} | {1e-6 * size:.1f} | {1e-6 * largest:.1f} | " + " | ".join(cells) + " |"


def _resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def leak(n: int) -> list[str]:
    model = many_leaves(20)
    optimizer = probes.watch(adam(model), model)
    step, batches = step_of(PROGRAMS[0].loss), floats(8, 32)
    monitor = probes.Monitor(None, model=model, optimizer=optimizer, every=1)
    rows = []
    for i in range(n + 1):
        loss = step(model, optimizer, batches[i % len(batches)])
        monitor(i, loss=loss, batch=batches[i % len(batches)])
        if i in (n // 10, n // 2, n):
            monitor.flush()
            gc.collect()
            live = [x for x in jax.live_arrays() if not x.is_deleted()]
            rows.append(f"| {i} | {len(live)} | {sum(x.nbytes for x in live)} | {_resident():.1f} |")
    monitor.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small programs, few probes")
    parser.add_argument("--gpu", action="store_true", help="on the default accelerator")
    quick = parser.parse_args().quick
    print(f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}; {jnp.float32.__name__}\n")
    print(
        "| program | parameters, MB | largest leaf, MB | measuring program, MB (beyond one leaf, of parameters) "
        "| measured step less plain, MB (likewise) |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for program in PROGRAMS[:1] if quick else PROGRAMS:
        print(row(program), flush=True)
    print("\n| probes | live device arrays | their bytes | resident memory, MB |\n| ---: | ---: | ---: | ---: |")
    print("\n".join(leak(300 if quick else 10_000)))


if __name__ == "__main__":
    main()
