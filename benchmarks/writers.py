"""What writing costs the training thread and the disk: 1000 leaves with 6 statistics each, a probe at a time.

    python benchmarks/writers.py [--quick]

All writers get the same numbers in turn. *Training thread* is what a call takes before it returns (median, 10th to 90th
percentile); *until written* the wall time of all probes, the closing included, over their number; *bytes a value* is the size
of the folder over the numbers written. `SummaryWriter.add_scalar` is called once a number, as loops do.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nnx_probes.host.record import Leaves, Record
from nnx_probes.writers.fanout import Fanout

STATISTICS = ("norm", "max_abs", "nonfinite", "zeros", "ratio", "absorbed")
LEAVES = 1000


def probes_of(n: int) -> list[Record]:
    """Probes of a training that moves: most values are new at each, counts are mostly 0."""
    rng = np.random.default_rng(0)
    table = Leaves(
        "params",
        tuple(f"blocks.{i // 4}.layer.{i % 4}.kernel" for i in range(LEAVES)),
        ("Param",) * LEAVES,
        ((64, 64),) * LEAVES,
        ("float32",) * LEAVES,
        (True,) * LEAVES,
    )
    found = []
    for step in range(n):
        values = {f"params.{name}": rng.lognormal(size=LEAVES).astype(np.float32) for name in STATISTICS}
        values["params.nonfinite"] = np.zeros(LEAVES, np.int32)
        found.append(Record(step, 1e9 + step, {"loss": 1.0, **values}, {"params": table}))
    return found


def ours(folder: str) -> tuple[Callable[[Record], None], Callable[[], None]]:
    out = Fanout.open(folder)
    return out.record, out.close


def tensorboardx(folder: str) -> tuple[Callable[[Record], None], Callable[[], None]]:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(folder)

    def write(record: Record) -> None:
        for name in STATISTICS:
            for path, value in zip(record.leaves["params"].paths, record.get(f"params.{name}"), strict=True):
                writer.add_scalar(f"params/{name}/{path}", value, record.step)

    return write, writer.close


def clu(folder: str) -> tuple[Callable[[Record], None], Callable[[], None]]:
    from clu import metric_writers

    writer = metric_writers.create_default_writer(folder, asynchronous=True)

    def write(record: Record) -> None:
        for name in STATISTICS:
            rows = zip(record.leaves["params"].paths, record.get(f"params.{name}"), strict=True)
            writer.write_scalars(record.step, {f"params/{name}/{path}": value for path, value in rows})

    return write, writer.close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few probes")
    n = 5 if parser.parse_args().quick else 50
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {n} probes\n")
    print(
        "| writer | training thread a probe, ms | until written a probe, ms | bytes a value |\n| --- | ---: | ---: | ---: |"
    )
    records = probes_of(n)
    for name, make in (
        ("ours: events, JSONL, console", ours),
        ("SummaryWriter.add_scalar", tensorboardx),
        ("clu", clu),
    ):
        with tempfile.TemporaryDirectory() as folder:
            try:
                write, close = make(folder)
            except ImportError as error:
                print(f"| {name} | not installed: {error.name} | | |")
                continue
            calls, began = [], time.perf_counter()
            for record in records:
                at = time.perf_counter()
                write(record)
                calls.append(1e3 * (time.perf_counter() - at))
                time.sleep(0.02)  # the training between two probes
            waited = 0.02 * n
            close()
            whole = 1e3 * (time.perf_counter() - began - waited) / n
            size = sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())
        low, middle, high = np.percentile(calls, [10, 50, 90])
        values = n * LEAVES * len(STATISTICS)
        print(f"| {name} | {middle:.2f} ({low:.2f} to {high:.2f}) | {whole:.1f} | {size / values:.1f} |", flush=True)


if __name__ == "__main__":
    main()
