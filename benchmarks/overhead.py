"""What watching costs a training loop: this library at several intervals, and what people use in its place.

    python benchmarks/overhead.py [--quick] [--only PART_OF_A_NAME] [--paste]

All of a program's variants run in one process, in turn, so drift of the machine hits all alike; a ratio is that of
neighbouring blocks of steps, given as median (10th to 90th percentile). Compilation is left out (`compile.py` has it).

*Probe* is the time of one due step of which the plain step knows nothing: the call of the monitor with its device programs
awaited (``sync=True``), and what measuring gradients and updates adds to the step, from pairs. *Share* is probe time over
interval times step time. It is what a budget is about: the whole-loop ratio beside it confirms it within its spread.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu" if "--gpu" not in sys.argv else "")

import flax
import jax
import numpy as np
from models import PROGRAMS, Program, adam, step_of
from paste import paste
from rivals import RIVALS, One, plain

import nnx_probes as probes
from nnx_probes.writers import MemoryWriter

INTERVALS = (1, 10, 100)
SUMMARY = (
    '| program, step | ours, every=100 | every=10 | every=1 | `every="auto"` |'
    + "".join(f" {name} |" for name in RIVALS)
    + "\n| --- |"
    + " ---: |" * (4 + len(RIVALS))
)
HEADER = "| program | watched by | probe, ms | share of loop time | loop time against plain |\n| --- | --- | ---: | ---: | ---: |"


def ours(program: Program, every: int | str, *, sync: bool) -> tuple[One, probes.Monitor, MemoryWriter]:
    """Default callbacks and `watch`, as README shows it, with all that it writes; the last record is kept beside."""
    model = program.build()
    optimizer, step = probes.watch(adam(model), model), step_of(program.loss)
    seen = MemoryWriter()
    monitor = probes.Monitor([tempfile.mkdtemp(), seen], model=model, optimizer=optimizer, every=every, sync=sync)
    count, feed = itertools.count(), program.feed()

    def one() -> float:
        batch = next(feed)
        loss = step(model, optimizer, batch)
        jax.block_until_ready(loss)
        began = time.perf_counter()
        monitor(next(count), loss=loss, batch=batch)
        return time.perf_counter() - began

    return one, monitor, seen


def seconds(one: One, steps: int = 1) -> tuple[float, float]:
    """Returns seconds of so many steps and, of them, those spent looking."""
    began = time.perf_counter()
    looking = sum(one() for _ in range(steps))
    return time.perf_counter() - began, looking


def spread(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return "not run"
    low, middle, high = np.percentile(ratios, [10, 50, 90])
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def each_step(program: Program, rounds: int) -> tuple[float, float, list[str], list[str]]:
    """Everything that looks at every step, step by step in turn: (step s, probe s, rows, cells of the summary)."""
    first = plain(program)
    watched, monitor, _ = ours(program, 1, sync=True)
    ones = {"plain": first, "every=1": watched, **{name: make(program) for name, make in RIVALS.items()}}
    total: dict[str, list[float]] = {name: [] for name in ones}
    looking: dict[str, list[float]] = {name: [] for name in ones}
    for one in ones.values():
        seconds(one, 4)  # both variants of a watched step are compiled
    for _ in range(rounds):
        for name, one in ones.items():
            took, looked = seconds(one)
            total[name].append(took)
            looking[name].append(looked)
    monitor.close()
    step_s = float(np.median(total["plain"]))
    hook_s = float(np.median(looking["every=1"]))
    surplus = [a - b - c for a, b, c in zip(total["every=1"], looking["every=1"], total["plain"], strict=True)]
    probe_s = hook_s + max(0.0, float(np.median(surplus)))
    rows, short = [], []
    for name in RIVALS:
        ratios = [a / b for a, b in zip(total[name], total["plain"], strict=True)]
        alone = float(np.median(looking[name]))
        cells = ("in the step", "") if np.isnan(alone) else (f"{1e3 * alone:.1f}", f"{alone / step_s:.2%}")
        rows.append(f"| {program.name} | {name} | {cells[0]} | {cells[1]} | {spread(ratios)} |")
        short.append(f"{float(np.median(ratios)) - 1:.1%}" if np.isnan(alone) else f"{alone / step_s:.1%}")
    return step_s, probe_s, rows, short


def blocks(program: Program, every: int, rounds: int) -> list[float]:
    """Whole loops in blocks of an interval, ours and plain in turn: their ratios."""
    first, (one, monitor, _) = plain(program), ours(program, every, sync=False)
    seconds(first, 3)
    seconds(one, every + 2)  # both variants of a watched step are compiled
    ratios = []
    for _ in range(rounds):
        base, _ = seconds(first, every)
        ratios.append(seconds(one, every)[0] / base)
    monitor.close()
    return ratios


def automatic(program: Program, budget_s: float) -> tuple[str, str]:
    """The interval that ``every="auto"`` settles on, and what it then costs: a row, and a cell of the summary."""
    one, monitor, seen = ours(program, "auto", sync=False)
    first = plain(program)
    seconds(first, 3)
    base = seconds(first, 3)[0] / 3
    warm = max(60, min(1200, int(budget_s / 3 / base)))
    early = [seconds(one) for _ in range(warm)]
    settled = int(seen.records[-1].get("probes.every"))
    steps = max(10, min(settled, int(budget_s / 6 / base)))
    ratios, looked, took = [], 0.0, 0.0
    for _ in range(3):
        base_s, _ = seconds(first, steps)
        total_s, looking_s = seconds(one, steps)
        ratios.append(total_s / base_s)
        looked, took = looked + looking_s, took + total_s
    monitor.close()
    compiled = sorted((looking for _, looking in early), reverse=True)[:2]  # the probe's programs, once each
    begun = (sum(looking for _, looking in early[:200]) - sum(compiled)) / (base * min(200, warm))
    row = (
        f'| {program.name} | ours, every="auto": {settled} after {warm} steps | | {looked / took:.2%} '
        f"(first {min(200, warm)} steps {begun:.2%}) | {spread(ratios)} |"
    )
    return row, f"{looked / took:.2%} (every={settled})"


def table(program: Program, *, quick: bool, say: Callable[[str], None]) -> str:
    """Says one program's rows; returns that of the summary."""
    budget_s = 5.0 if quick else 60.0  # for the loops of one interval
    step_s, probe_s, rivals, short = each_step(program, max(3, min(200, int(budget_s / 6 / program.seconds))))
    say(f"| **{program.name}** | nobody: {1e3 * step_s:.1f} ms a step | | | |")
    for every in INTERVALS:
        rounds = int(min(25, budget_s / (2 * every * step_s)))
        ratios = blocks(program, every, rounds) if rounds >= 2 else []
        say(
            f"| {program.name} | ours, every={every} | {1e3 * probe_s:.1f} | {probe_s / (every * step_s):.2%} "
            f"| {spread(ratios)} |"
        )
    row, auto = automatic(program, budget_s)
    for line in (row, *rivals):
        say(line)
    shares = [f"{probe_s / (every * step_s):.2%}" for every in reversed(INTERVALS)]
    return " | ".join([f"| {program.name}, {1e3 * step_s:.0f} ms", *shares, auto, *short]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, small programs")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--paste", action="store_true", help="put the table into README.md")
    parser.add_argument("--gpu", action="store_true", help="on the default accelerator")
    chosen = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    device = jax.devices()[0]
    say(
        f"{platform.machine()}, {os.cpu_count()} cores, {device.device_kind}, Python {platform.python_version()}, jax "
        f"{jax.__version__}, flax {flax.__version__}; default callbacks and `watch`, Adam, donated.\n"
    )
    say(HEADER)
    summary = [
        table(program, quick=chosen.quick, say=say)
        for program in PROGRAMS
        if chosen.only in program.name and (not chosen.quick or program.seconds < 0.3)
    ]
    short = "\n".join([lines[0], SUMMARY, *summary])
    print(f"\nIn short, share of loop time:\n\n{short}", flush=True)
    if chosen.paste:
        paste("python benchmarks/overhead.py --paste", short)


if __name__ == "__main__":
    main()
