"""The benchmark's tables, as text and as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from nnx_probes.faults.bench import Result
from nnx_probes.faults.catalogue import FAULTS, OUT_OF_REACH
from nnx_probes.faults.habits import HABITS
from nnx_probes.faults.programs import REPORTED, TUNING
from nnx_probes.faults.score import Verdict

__all__ = ["markdown", "text"]


def text(result: Result) -> Iterator[str]:
    """Yields the lines of the report."""
    for title, programs in (("reported programs", REPORTED), ("tuning programs", TUNING)):
        yield f"{title}: {', '.join(programs)}"
        for name, value in result.rates(programs).items():
            yield f"  {name:20} {value}"
    yield ""
    yield f"{'fault':32} {'program':12} found late missed  cause 1  cause 3  steps after onset"
    for slug, program, verdicts in _grouped(result.verdicts):
        yield _line(slug, program, verdicts)
    if result.harmless:
        yield "harmless here, so no ERROR is allowed:"
    for slug, program, verdicts in _grouped(result.harmless):
        errors = sum(v.worst == "ERROR" for v in verdicts)
        yield _line(slug, program, verdicts) + (f"  {errors} with ERROR" if errors else "")
    loud = [h for h in result.healthy if h.level() in ("WARN", "ERROR")]
    yield f"healthy runs with an alert above INFO: {len(loud)} of {len(result.healthy)}"
    for h in loud:
        yield f"  {h.name} ({h.program}, seed {h.seed}): {'; '.join(h.alerts)}"
    early = [v for v in (*result.verdicts, *result.harmless) if v.early]
    for v in early:
        yield f"  before the onset: {v.fault} ({v.program}, seed {v.seed}): {', '.join(v.early)}"
    for error in result.errors:
        yield f"error: {error}"
    yield "out of reach without a reference: " + ", ".join(OUT_OF_REACH)


def _grouped(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, str, list[Verdict]]]:
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.fault, verdict.program].append(verdict)
    for (slug, program), group in groups.items():
        yield slug, program, group


def _line(slug: str, program: str, verdicts: list[Verdict]) -> str:
    counts = [sum(v.found == word for v in verdicts) for word in ("found", "late", "missed")]
    caught = [v for v in verdicts if v.step >= 0]
    delays = sorted(v.step - FAULTS[slug].onset for v in caught)
    line = f"{slug:32} {program:12} {counts[0]:5} {counts[1]:4} {counts[2]:6}"
    line += f"  {sum(v.top1 for v in caught):7}  {sum(v.top3 for v in caught):7}  {', '.join(map(str, delays)) or '–'}"
    wrong = {f"{v.rule}: {' '.join(v.causes)}" for v in caught if not v.top1}
    missed = {" ".join(v.others[:3]) or "nothing said" for v in verdicts if v.step < 0}
    unnamed = {"leaf not named" for v in caught if v.leaf is False}
    notes = [*sorted(wrong), *sorted(missed), *sorted(unnamed)]
    return line + (f"  [{'; '.join(notes)}]" if notes else "")


def markdown(result: Result, *, seeds: int, minutes: float) -> str:
    """Returns the README's table."""
    reported, tuning = result.rates(REPORTED), result.rates(TUNING)
    faults = len({v.fault for v in result.verdicts})
    lines = [
        f"{faults} harmful faults in 2 or 3 of 5 programs, {len(HABITS)} healthy programs, {seeds} seeds each "
        f"({minutes:.0f} minutes on 2 cores). Thresholds were chosen on the tuning programs ({', '.join(TUNING)}); rates "
        f"count on the reported ones ({', '.join(REPORTED)}). In brackets the share and its 95 % Wilson interval.",
        "",
        "| | reported programs | tuning programs |",
        "|---|---|---|",
    ]
    names = {
        "found": "faults found (WARN or ERROR)",
        "in time": "found within the delay that is promised",
        "must be found": "non-finite, frozen, lost update, repeated batch: found",
        "cause first": "right cause named first",
        "cause in three": "right cause among the first three",
        "leaf named": "right leaf named, where one is at fault",
        "healthy with ERROR": "healthy runs with an ERROR",
        "healthy with WARN": "healthy runs with a WARN",
    }
    lines += [f"| {words} | {reported[name]} | {tuning[name]} |" for name, words in names.items()]
    missed = sorted({f"`{v.fault}` in {v.program}" for v in result.verdicts if v.found == "missed"})
    lines += ["", "Missed: " + (", ".join(missed) or "none") + "."]
    loud = sorted({f"{h.name} ({h.program})" for h in result.healthy if h.level() in ("WARN", "ERROR")})
    lines += ["False alarms: " + (", ".join(loud) or "none") + "."]
    lines += ["Out of reach without a reference, and not counted: " + ", ".join(f"`{n}`" for n in OUT_OF_REACH) + "."]
    return "\n".join(lines)
