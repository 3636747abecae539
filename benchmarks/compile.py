"""Seconds of compilation that watching adds, beside what the user's own step takes to compile.

    python benchmarks/compile.py [--quick] [--gpu]

Each row is a process of its own, so nothing is warm; its second half is another process that finds jax's persistent
compilation cache filled by the first. *Probes* are the monitor's programs over parameters, optimizer state and batch;
*measured variant* is the step that `nnx.jit` compiles a second time, with the measurement in it: never less than the user's own
step again. `GradientProbe(loss_fn=...)`, `step_stats` or ``when="inside"`` do without it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time

ROWS = ("10 leaves", "100 leaves", "600 leaves", "1000 leaves", "transformer, 10M")


def seconds_of(row: str, cache: str) -> dict[str, float]:
    """One process: the first calls of everything, each less a later call."""
    import jax

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import models

    import nnx_probes as probes

    program = next((p for p in models.PROGRAMS if p.name == row), None)
    loss = program.loss if program else models.PROGRAMS[0].loss
    batch = program.batches[0] if program else models.floats(8, 32)[0]

    def build() -> object:
        return program.build() if program else models.many_leaves(int(row.split()[0]))

    def timed(call) -> float:
        began = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - began

    def first_less_later(call) -> float:
        return timed(call) - min(timed(call) for _ in range(3))

    model, step = build(), models.step_of(loss)
    optimizer = models.adam(model)
    own = first_less_later(lambda: step(model, optimizer, batch))
    model, step = build(), models.step_of(loss)
    optimizer = probes.watch(models.adam(model), model)
    monitor = probes.Monitor(None, model=model, optimizer=optimizer, every=1, sync=True, rules=[])
    watched = first_less_later(lambda: step(model, optimizer, batch))
    value = step(model, optimizer, batch)
    began = time.perf_counter()
    monitor(0, loss=value, batch=batch)  # arms the next step
    first = time.perf_counter() - began
    began = time.perf_counter()
    value = jax.block_until_ready(step(model, optimizer, batch))
    armed = time.perf_counter() - began
    later, steps = [], []
    for i in range(1, 5):
        began = time.perf_counter()
        monitor(i, loss=value, batch=batch)
        middle = time.perf_counter()
        value = jax.block_until_ready(step(model, optimizer, batch))
        later.append(middle - began)
        steps.append(time.perf_counter() - middle)
    monitor.close()
    return {
        "own": own,
        "unarmed": watched,
        "probes": first - min(later) + max(0.0, later[0] - min(later)),  # at the second one the step has been seen
        "armed": armed - min(steps),
    }


def run(row: str, cache: str, gpu: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", row, "--cache", cache]
    environment = os.environ if gpu else {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the two smallest rows")
    parser.add_argument("--gpu", action="store_true", help="on the default accelerator")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(seconds_of(chosen.one, chosen.cache)))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(
        "| model | own step, s | probes, s | of own | measured variant, s | of own "
        "| from the cache: own, s | probes, s | measured variant, s |\n" + "| --- |" + " ---: |" * 8
    )
    for row in ROWS[:2] if chosen.quick else ROWS:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = run(row, cache, chosen.gpu), run(row, cache, chosen.gpu)
        own = cold["own"]
        print(
            f"| {row} | {own:.2f} | {cold['probes']:.2f} | {cold['probes'] / own:.0%} | {cold['armed']:.2f} "
            f"| {cold['armed'] / own:.0%} | {warm['own']:.2f} | {warm['probes']:.2f} | {warm['armed']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
