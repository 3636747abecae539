"""``nnx-probes faults``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nnx_probes.errors import ArgumentError
from nnx_probes.faults.bench import measure, plan
from nnx_probes.faults.data import digits_held_out
from nnx_probes.faults.jobs import Job
from nnx_probes.faults.show import markdown, text

__all__ = ["run"]


def run(*, seeds: int, only: Sequence[str], every: int, workers: int | None, form: str) -> int:
    """Runs the benchmark and prints its tables.

    Args:
      seeds: runs of each program.
      only: parts of slugs of faults and healthy programs; empty for all.
      every: the monitors' interval.
      workers: processes, None for one a core.
      form: ``"text"``, ``"json"`` or ``"markdown"``.

    Returns:
      0 when every harmful fault was found and every healthy run was quiet, else 1.

    Raises:
      ArgumentError: nothing is called like that.
    """
    digits_held_out()  # says at once what is not installed
    jobs = plan(seeds, only)
    if not jobs:
        raise ArgumentError(f"--only {' '.join(only)}: no fault or healthy program has that in its name.")
    began = time.monotonic()
    with _progress() as progress:
        bar = progress.add_task("runs", total=len(jobs), name="")

        def note(job: Job) -> None:
            progress.update(bar, advance=1, name=f"{job.name or 'twin'} in {job.program}")

        result = measure(jobs, every=every, workers=workers or os.cpu_count() or 1, progress=note)
    minutes = (time.monotonic() - began) / 60
    if form == "json":
        print(json.dumps({"seeds": seeds, "every": every, "minutes": minutes, **result.as_json()}, indent=1))
    elif form == "markdown":
        print(markdown(result, seeds=seeds, minutes=minutes))
    else:
        for line in text(result):
            print(line)
        print(f"{len(jobs)} runs in {minutes:.1f} minutes")
    missed = any(v.found == "missed" for v in result.verdicts)
    loud = any(h.level() in ("WARN", "ERROR") for h in result.healthy)
    return int(missed or loud or bool(result.errors) or any(v.worst == "ERROR" for v in result.harmless))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}"),
        console=Console(stderr=True),
    )
