"""Feeds the records of a file to the rules, as the live monitor did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_probes import __version__
from nnx_probes.errors import ArgumentError, closest
from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.judge import Judge
from nnx_probes.host.record import Leaves, Record
from nnx_probes.host.rule import Rule
from nnx_probes.report.differences import Difference, differences
from nnx_probes.report.rebuilt import facts_of, rules_of
from nnx_probes.writers.folder import as_path
from nnx_probes.writers.jsonl import FILE_NAME
from nnx_probes.writers.jsonl_read import Header, Mark, read_jsonl

__all__ = ["Replay", "RunReplay", "replay"]

_NAMED = 3
"""Folders or runs an error names at most."""


@dataclass(frozen=True, slots=True)
class RunReplay:
    """One run of a file, judged again.

    Attributes:
      run: its name in the file.
      header: what it said of itself, empty where that is lost.
      first_step, last_step: smallest and largest step of its probes, None without one.
      probes: records judged, those of validations included.
      marks: announced events.
      rules: what it was judged by.
      left_out: (text, reason) of each rule that cannot be made here, such as a user's own. Their alerts are as stored.
      notes: what had to be assumed or went wrong, in sentences.
      alerts: in the order in which the live run raised them.
      differences: from the alerts that are stored.
    """

    run: str
    header: Mapping[str, Any]
    first_step: int | None
    last_step: int | None
    probes: int
    marks: int
    rules: tuple[Rule, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    alerts: tuple[Alert, ...]
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """A file, judged again.

    Attributes:
      path: the file.
      runs: its runs, in order of appearance.
      skipped: (line number from 1, reason) of each line that could not be read or judged.
    """

    path: Path
    runs: tuple[RunReplay, ...]
    skipped: tuple[tuple[int, str], ...]

    @property
    def level(self) -> Level | None:
        """The highest level of all alerts, None without one."""
        return max((alert.level for run in self.runs for alert in run.alerts), default=None)


def replay(path: Any, *, run: str | None = None) -> Replay:
    """Judges a stored run again and returns what the rules say.

    Nothing is written, and what the file holds is not run. Lines that are damaged are passed over. A user's own rules
    cannot be made from a file; their alerts are returned as they are stored.

    Args:
      path: a folder with a ``probes.jsonl``, or a ``.jsonl`` file.
      run: only this run of the file; all if not given.

    Raises:
      WriterError: there is no such file.
      ArgumentError: nothing in it is of a monitor, or not of `run`.
      OSError: the file cannot be read.

    Cost: some milliseconds a probe; memory as the live rules, whatever the length of the file.
    """
    reader = read_jsonl(_file(path), run=run)
    repeats: dict[str, _Repeat] = {}
    unjudged: list[tuple[int, str]] = []
    for item in reader:
        one = repeats.setdefault(reader.run, _Repeat(reader.run))
        unjudged += one.take(item, reader.line)
    for one in repeats.values():
        unjudged += one.settle()
    if not repeats:
        raise ArgumentError(_nothing(reader.path, reader.runs, len(reader.skipped), run))
    runs = tuple(one.result() for one in repeats.values())
    return Replay(reader.path, runs, tuple(sorted([*reader.skipped, *unjudged])))


class _Repeat:
    """One run while it is read: a record waits until the alerts that follow it in the file are known."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._header: Mapping[str, Any] | None = None
        self._judge: Judge | None = None
        self._left_out: tuple[tuple[str, str], ...] = ()
        self._notes: list[str] = []
        self._steps: tuple[int, ...] = ()
        self._probes = self._marks = 0
        self._alerts: list[Alert] = []
        self._stored: list[Alert] = []
        self._repeated: list[Alert] = []
        self._waiting: tuple[Record, int] | None = None
        self._following: list[Alert] = []

    def take(self, item: Header | Leaves | Record | Alert | Mark, line: int) -> list[tuple[int, str]]:
        """Takes the next object of the file; returns the line before it that could not be judged, if there is one."""
        if isinstance(item, Alert):
            self._following.append(item)
        if isinstance(item, (Alert, Leaves)):
            return []
        failed = self.settle()
        if isinstance(item, Record):
            self._waiting = item, line
        elif isinstance(item, Mark):
            self._begun().mark(item.step)
            self._marks += 1
        elif self._judge is None:
            self._header = item.values
        return failed

    def settle(self) -> list[tuple[int, str]]:
        """Judges the waiting record; returns its line and why that failed, if it did."""
        waiting, following = self._waiting, self._following
        self._waiting, self._following = None, []
        if waiting is None and not following:
            return []
        judge = self._begun()
        slugs = {rule.slug for rule in judge.rules}
        own = {alert.rule for alert in following if self._left_out and alert.rule not in slugs}
        failed: list[tuple[int, str]] = []
        found: list[Alert] = []
        if waiting is not None:
            record, line = waiting
            try:
                judge.observe(record)
                for alert in following:  # the other rules look at what has been said
                    if alert.rule in own:
                        judge.history.raised[alert.rule] = alert.level
                        judge.history.said.update(alert.paths)
                found = judge.verdicts(record)
                if judge.lost is not None:
                    raise judge.lost
            except Exception as error:  # a line may be sound and its content impossible
                failed.append((line, f"cannot be judged: {type(error).__name__}: {error!s:.100}"))
            self._probes += 1
            self._steps = min((*self._steps, record.step)), max((*self._steps, record.step))
        self._stored += [alert for alert in following if alert.rule not in own]
        self._repeated += found
        self._alerts += _in_order(found, following, own)
        return failed

    def _begun(self) -> Judge:
        """Returns the judge, made at the first object that needs one: the header comes before."""
        if self._judge is None:
            if self._header is None:
                self._notes.append("The run's header is not in the file.")
            rebuilt, (facts, assumed) = rules_of(self._header or {}), facts_of(self._header or {})
            self._notes += [*rebuilt.notes, *assumed]
            self._left_out = rebuilt.left_out
            self._judge = Judge(rebuilt.rules, facts)
        return self._judge

    def result(self) -> RunReplay:
        """Returns what became of the run."""
        judge, header = self._begun(), self._header or {}
        versions = header.get("versions")
        written_by = versions.get("nnx-probes") if isinstance(versions, Mapping) else None
        if self._header is not None and written_by != __version__:
            self._notes.append(f"The file was written by nnx-probes {written_by}, and this is {__version__}.")
        broken = [rule.slug for rule in judge.rules if rule.slug in judge.broken]
        self._notes += [f"The rule {slug} failed and was left out from then on." for slug in broken]
        first, last = self._steps or (None, None)
        return RunReplay(
            run=self._run,
            header=header,
            first_step=first,
            last_step=last,
            probes=self._probes,
            marks=self._marks,
            rules=judge.rules,
            left_out=self._left_out,
            notes=tuple(self._notes),
            alerts=tuple(self._alerts),
            differences=differences(self._stored, self._repeated),
        )


def _in_order(found: list[Alert], following: list[Alert], own: set[str]) -> list[Alert]:
    """Returns `found` and, where the file has them among those, the stored alerts of the rules in `own`."""
    left, ordered = list(found), []
    for alert in following:
        if alert.rule in own:
            ordered.append(alert)
            continue
        at = next((i for i, one in enumerate(left) if one.rule == alert.rule), -1)
        ordered += left[: at + 1]
        left = left[at + 1 :]
    return ordered + left


def _file(path: Any) -> Path:
    """Returns the path; raises for a folder of folders with runs, and names those."""
    folder = as_path(path, "report")
    if folder.is_dir() and not (folder / FILE_NAME).exists():
        inside = sorted(str(file.parent) for file in folder.glob(f"*/{FILE_NAME}"))
        if inside:
            more = f" and {len(inside) - _NAMED} more" if len(inside) > _NAMED else ""
            shown = ", ".join(inside[:_NAMED])
            raise ArgumentError(f"{str(folder)!r} holds the folders of several runs. Name one: {shown}{more}.")
    return folder


def _nothing(path: Path, runs: list[str], skipped: int, run: str | None) -> str:
    if run is not None and runs:
        shown = ", ".join(runs[:_NAMED]) + (", …" if len(runs) > _NAMED else "")
        return f"{str(path)!r} has no run {run!r}: expected one of {shown}.{closest(run, runs)}"
    lines = f"{skipped} lines, none of which can be read" if skipped else "nothing in it is of a monitor"
    return f"{str(path)!r} is no file of a run: {lines}. Expected what Monitor(folder) writes, {FILE_NAME}."
