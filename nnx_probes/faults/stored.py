"""Runs that are kept, so that new rules can be tried on them without training anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from nnx_probes.faults.recipe import Recipe
from nnx_probes.faults.run import Found, Outcome, run
from nnx_probes.host.judge import Judge
from nnx_probes.host.record import Record
from nnx_probes.host.rules import default
from nnx_probes.report.rebuilt import facts_of
from nnx_probes.writers.jsonl_read import Header, Mark, read_jsonl

if TYPE_CHECKING:
    from nnx_probes.faults.jobs import Job

__all__ = ["judged_again", "keep"]

_OUTCOME = "outcome.json"


def keep(store: Path, job: Job, recipe: Recipe, every: int) -> Outcome:
    """Runs `job` and stores its records and its end; returns the outcome."""
    folder = _folder(store, job)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probes.jsonl").unlink(missing_ok=True)  # of a run that was stopped
    outcome = run(recipe, seed=job.seed, every=every, folder=folder)
    row = {"score": _plain(outcome.score), "last_loss": _plain(outcome.last_loss), "error": outcome.error}
    (folder / _OUTCOME).write_text(json.dumps(row))
    return outcome


def judged_again(store: Path, job: Job) -> Outcome | None:
    """Returns what today's rules say about the stored run, None if there is none."""
    folder = _folder(store, job)
    if not (folder / _OUTCOME).exists():
        return None
    row = json.loads((folder / _OUTCOME).read_text())
    judge: Judge | None = None
    alerts = []
    for item in read_jsonl(folder):
        if isinstance(item, Header):
            judge = Judge(default(), facts_of(item.values)[0])
        elif judge is not None and isinstance(item, Mark):
            judge.mark(item.step)
        elif judge is not None and isinstance(item, Record):
            judge.observe(item)
            alerts += judge.verdicts(item)
    numbers = {name: math.nan if row[name] is None else row[name] for name in ("score", "last_loss")}
    return Outcome(numbers["score"], tuple(Found.of(alert) for alert in alerts), row["error"], numbers["last_loss"])


def _folder(store: Path, job: Job) -> Path:
    name = "_".join(str(part) for part in (job.kind, job.name, job.program, job.steps or "", job.seed) if part != "")
    return store / name


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
