"""The benchmark's runs, spread over processes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnx_probes.faults.run import Outcome

__all__ = ["Job", "run_all"]


@dataclass(frozen=True, order=True)
class Job:
    """One run.

    Attributes:
      kind: ``"fault"``, ``"twin"`` (the same program without a fault) or ``"habit"``.
      name: slug of the fault or habit, ``""`` for a twin.
      program: its program.
      seed: its seed.
      steps: length of a twin, 0 for what the entry says.
    """

    kind: str
    name: str
    program: str
    seed: int
    steps: int = 0


_HEALTHY_STEPS = 200
_LIFE = 40


def execute(job: Job, every: int, store: Path | None = None) -> Outcome:
    """Runs one job in this process.

    Args:
      job: which.
      every: the monitor's interval.
      store: where runs are kept; one that is there already is judged again and not run.
    """
    from nnx_probes.faults.catalogue import FAULTS
    from nnx_probes.faults.habits import HABITS
    from nnx_probes.faults.programs import PROGRAMS
    from nnx_probes.faults.run import run
    from nnx_probes.faults.stored import judged_again, keep

    plain = PROGRAMS[job.program]()
    if job.kind == "fault":
        fault = FAULTS[job.name]
        recipe = fault.apply(plain.but(steps=fault.steps))
    elif job.kind == "habit":
        recipe = HABITS[job.name].apply(plain.but(steps=_HEALTHY_STEPS))
    else:
        recipe = plain.but(steps=job.steps)
    if store is not None:
        return judged_again(store, job) or keep(store, job, recipe, every)
    if job.seed:
        return run(recipe, seed=job.seed, every=every)
    with tempfile.TemporaryDirectory(prefix="nnx-probes-run-") as folder:  # one seed: the rules are the same for all
        return run(recipe, seed=job.seed, every=every, folder=Path(folder))


def run_all(
    jobs: Sequence[Job], *, every: int, workers: int, store: Path | None = None
) -> Iterator[tuple[Job, Outcome]]:
    """Yields jobs with their outcomes, in the order in which they end; all run in other processes.

    A worker lives for 40 jobs, so that compiled programs do not pile up; what has been compiled once is read from
    a temporary cache by all of them, since the seeds of one program share it.
    """
    with tempfile.TemporaryDirectory(prefix="nnx-probes-faults-") as cache:
        pool = multiprocessing.get_context("spawn").Pool(workers, _prepare, (cache,), maxtasksperchild=_LIFE)
        with pool:
            yield from pool.imap_unordered(functools.partial(_execute, every=every, store=store), jobs)


def _execute(job: Job, every: int, store: Path | None) -> tuple[Job, Outcome]:
    return job, execute(job, every, store)


def _prepare(cache: str) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Most of the time goes into compilations; these programs are too small to gain from a good one.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    import jax

    jax.config.update("jax_compilation_cache_dir", str(Path(cache)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
