"""The whole benchmark: which runs, and what they come to."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nnx_probes.faults.catalogue import FAULTS, OUT_OF_REACH
from nnx_probes.faults.habits import HABITS
from nnx_probes.faults.jobs import Job, run_all
from nnx_probes.faults.programs import REPORTED
from nnx_probes.faults.run import Outcome
from nnx_probes.faults.score import Rate, Verdict, harmful, judge, rate

__all__ = ["Healthy", "Result", "measure", "plan"]


@dataclass(frozen=True)
class Healthy:
    """What was said about one healthy run."""

    name: str
    program: str
    seed: int
    score: float
    error: str
    alerts: tuple[str, ...]

    def level(self) -> str:
        """Returns the highest level of its alerts, empty without any."""
        return next((name for name in ("ERROR", "WARN", "INFO") if any(name in alert for alert in self.alerts)), "")


@dataclass
class Result:
    """All verdicts.

    Attributes:
      verdicts: of harmful faults.
      harmless: of faults that hurt nothing in some seed: they must not raise an ERROR.
      healthy: the healthy programs and the twins.
      errors: runs that raised something, or in which something failed inside the library.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    harmless: list[Verdict] = field(default_factory=list)
    healthy: list[Healthy] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def rates(self, programs: Sequence[str] = REPORTED) -> dict[str, Rate]:
        """Returns the rates over the given programs (the reported ones by default)."""
        own = [v for v in self.verdicts if v.program in programs]
        caught = [v for v in own if v.found != "missed"]
        must = [v for v in own if FAULTS[v.fault].kind]
        runs = [h for h in self.healthy if h.program in programs]
        return {
            "found": rate(v.found != "missed" for v in own),
            "in time": rate(v.found == "found" for v in own),
            "must be found": rate(v.found != "missed" for v in must),
            "cause first": rate(v.top1 for v in caught),
            "cause in three": rate(v.top3 for v in caught),
            "leaf named": rate(v.leaf for v in caught if v.leaf is not None),
            "healthy with ERROR": rate(h.level() == "ERROR" for h in runs),
            "healthy with WARN": rate(h.level() in ("WARN", "ERROR") for h in runs),
        }

    def as_json(self) -> dict[str, Any]:
        """Returns it as plain values."""
        return {
            "rates": {name: value.as_json() for name, value in self.rates().items()},
            "verdicts": [asdict(v) for v in self.verdicts],
            "harmless": [asdict(v) for v in self.harmless],
            "healthy": [{**asdict(h), "score": h.score if math.isfinite(h.score) else None} for h in self.healthy],
            "out_of_reach": dict(OUT_OF_REACH),
            "errors": self.errors,
        }


def plan(seeds: int, only: Sequence[str] = ()) -> list[Job]:
    """Returns the jobs: every fault in each of its programs, their twins, every habit.

    Args:
      seeds: how many of each.
      only: parts of slugs; empty for all.
    """
    jobs: set[Job] = set()
    for fault in FAULTS.values():
        if not only or any(part in fault.slug for part in only):
            for program in fault.on:
                for seed in range(seeds):
                    jobs.add(Job("fault", fault.slug, program, seed))
                    jobs.add(Job("twin", "", program, seed, fault.steps))
    for habit in HABITS.values():
        if not only or any(part in habit.slug for part in only):
            jobs.update(Job("habit", habit.slug, habit.on, seed) for seed in range(seeds))
    return sorted(jobs, key=lambda job: (job.program, job.name, job.kind, job.steps, job.seed))


def measure(
    jobs: Sequence[Job], *, every: int = 1, workers: int = 2, progress: Callable[[Job], None] = lambda job: None
) -> Result:
    """Runs all jobs and returns what they come to.

    Args:
      jobs: from `plan`.
      every: the monitors' interval.
      workers: processes.
      progress: called after each job.
    """
    outcomes: dict[Job, Outcome] = {}
    for job, outcome in run_all(jobs, every=every, workers=workers):
        outcomes[job] = outcome
        progress(job)
    return collect(outcomes, every=every)


def collect(outcomes: dict[Job, Outcome], *, every: int) -> Result:
    """Returns verdicts from outcomes."""
    result = Result()
    groups: dict[tuple[str, str], list[Job]] = defaultdict(list)
    for job in sorted(outcomes):
        outcome = outcomes[job]
        if outcome.error and (job.kind != "fault" or outcome.error.startswith("inside")):
            result.errors.append(f"{job.name or 'twin'} in {job.program}, seed {job.seed}: {outcome.error}")
        if job.kind == "fault":
            groups[job.name, job.program].append(job)
        else:
            alerts = tuple(f"{a.level} {a.rule}@{a.step} {' '.join(a.causes[:1])}" for a in outcome.alerts)
            name = job.name or f"plain, {job.steps} steps"
            result.healthy.append(Healthy(name, job.program, job.seed, outcome.score, outcome.error, alerts))
    for (slug, program), jobs in groups.items():
        fault = FAULTS[slug]
        twins = [outcomes[Job("twin", "", program, job.seed, fault.steps)] for job in jobs]
        verdicts = [judge(fault, program, job.seed, outcomes[job], every=every) for job in jobs]
        hurt = harmful([outcomes[job] for job in jobs], twins)
        (result.verdicts if hurt else result.harmless).extend(verdicts)
    return result
