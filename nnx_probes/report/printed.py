"""A report as text for a person, or as one JSON object."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from nnx_probes.host.alert import Alert, Level
from nnx_probes.report.differences import Difference
from nnx_probes.report.replay import Replay, RunReplay
from nnx_probes.writers.console import ConsoleWriter, printable, write_text
from nnx_probes.writers.jsonl_values import alert_row

__all__ = ["print_report"]

_SHOWN = 10
"""Skipped lines, and differences, that are listed."""


def print_report(found: Replay, *, as_json: bool = False, file: IO[str] | None = None) -> None:
    """Prints a report.

    Args:
      found: what `replay` returned.
      as_json: one JSON object (strict; alerts have the form they have in ``probes.jsonl``) instead of text.
      file: where to print; standard output if not given.
    """
    output = sys.stdout if file is None else file
    if as_json:
        write_text(output, json.dumps(_as_json(found), indent=2, allow_nan=False) + "\n")
        return
    console = ConsoleWriter(output, Level.INFO)
    for run in found.runs:
        _print(output, _head(run))
        for alert in run.alerts:
            console.write_alert(alert)
        _print(output, *_remarks(run))
        if len(found.runs) > 1:
            _print(output, _counts(run.alerts), "")
    _print(output, *_listed(found.skipped))
    alerts = [alert for run in found.runs for alert in run.alerts]
    start = f"{len(found.runs)} runs: " if len(found.runs) > 1 else ""
    _print(output, f"{start}{_counts(alerts)}, {_number(len(found.skipped), 'line')} skipped")
    output.flush()


def _print(output: IO[str], *lines: str) -> None:
    for line in lines:
        write_text(output, printable(line) + "\n")


def _number(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _counts(alerts: Sequence[Alert]) -> str:
    of = Counter(alert.level for alert in alerts)
    parts = [
        _number(of[level], noun)
        for level, noun in ((Level.ERROR, "error"), (Level.WARN, "warning"), (Level.INFO, "info"))
    ]
    return f"{_number(len(alerts), 'alert')} ({', '.join(parts)})"


def _versions(run: RunReplay) -> dict[str, str]:
    versions = run.header.get("versions")
    return {str(name): str(version) for name, version in versions.items()} if isinstance(versions, Mapping) else {}


def _head(run: RunReplay) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in _versions(run).items()) or "versions unknown"
    steps = "no step" if run.first_step is None else f"steps {run.first_step} to {run.last_step}"
    counts = f"{_number(run.probes, 'probe')}, {_number(len(run.rules), 'rule')}"
    marks = f", {_number(run.marks, 'mark')}" if run.marks else ""
    return f"run {run.run}: {versions}; {steps}, {counts}{marks}"


def _remarks(run: RunReplay) -> Iterator[str]:
    for text, reason in run.left_out:
        yield f"left out: {text:.100}: {reason}; its alerts are as stored"
    yield from (f"note: {note}" for note in run.notes)
    yield from (f"difference: {_in_words(one)}" for one in run.differences[:_SHOWN])
    if len(run.differences) > _SHOWN:
        yield f"difference: {len(run.differences) - _SHOWN} more"


def _in_words(one: Difference) -> str:
    what = f"{one.alert.level.name} {one.alert.rule} at step {one.alert.step}"
    if one.kind == "missing":
        return f"{what} is in the file and is not raised here"
    if one.kind == "new":
        return f"{what} is raised here and is not in the file"
    return f"{what} has another {', '.join(one.fields)} than in the file"


def _listed(skipped: Sequence[tuple[int, str]]) -> Iterator[str]:
    yield from (f"skipped line {number}: {reason}" for number, reason in skipped[:_SHOWN])
    if len(skipped) > _SHOWN:
        yield f"skipped {len(skipped) - _SHOWN} more"


def _as_json(found: Replay) -> dict[str, Any]:
    return {
        "file": str(found.path),
        "runs": [_run_row(run) for run in found.runs],
        "alerts": [{"run": run.run, **alert_row(alert)} for run in found.runs for alert in run.alerts],
        "differences": [
            {"run": run.run, "kind": one.kind, "fields": list(one.fields), "alert": alert_row(one.alert)}
            for run in found.runs
            for one in run.differences
        ],
        "skipped": [{"line": number, "reason": reason} for number, reason in found.skipped],
    }


def _run_row(run: RunReplay) -> dict[str, Any]:
    return {
        "run": run.run,
        "versions": _versions(run),
        "first_step": run.first_step,
        "last_step": run.last_step,
        "probes": run.probes,
        "marks": run.marks,
        "rules": [repr(rule) for rule in run.rules],
        "left_out": [{"rule": text, "reason": reason} for text, reason in run.left_out],
        "notes": list(run.notes),
    }
