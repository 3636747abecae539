"""Reads what `JsonlWriter` wrote, also from a file that was cut or damaged. Needs NumPy only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from nnx_probes.errors import WriterError
from nnx_probes.host.alert import Alert, Cause, Level
from nnx_probes.host.record import Leaves, Record
from nnx_probes.writers.folder import as_path
from nnx_probes.writers.jsonl import FILE_NAME
from nnx_probes.writers.jsonl_values import decode

__all__ = ["Header", "JsonlReader", "Mark", "read_jsonl"]

_OTHER_KINDS = frozenset({"scalars", "text", "histogram", "hparams", "close"})
"""Kinds that stand for themselves: nothing of the monitor's is in them."""

_LONGEST_REASON = 200
_LONGEST = 2**28
"""Bytes of a line that is read: a probe of a million leaves has fewer. A longer one is another kind of file."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a run said about itself: versions and settings.

    Attributes:
      run: the writer's name.
      time_s: seconds since the epoch.
      values: the settings.
    """

    run: str
    time_s: float
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """A known event at a step.

    Attributes:
      step: index of the step just completed.
      name: the user's word for it.
    """

    step: int
    name: str


class JsonlReader:
    """Iterates over the objects of a file in their order; each iteration reads the file again.

    Attributes:
      path: the file.
      skipped: (line number from 1, reason) of each line that could not be read so far, in this or the
        last iteration.
      run: the run of the object that was yielded last.
      line: the number of its line.
      runs: the names of all runs seen so far, in order of appearance.
    """

    def __init__(self, path: Path, run: str | None) -> None:
        self.path = path
        self.skipped: list[tuple[int, str]] = []
        self.run, self.line = "", 0
        self.runs: list[str] = []
        self._only = run

    def __iter__(self) -> Iterator[Header | Leaves | Record | Alert | Mark]:
        self.skipped, self.runs = [], []
        tables: dict[str, Leaves] = {}
        with self.path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                if not line.strip():
                    continue
                try:
                    if len(line) > _LONGEST:
                        raise ValueError(f"longer than {_LONGEST} bytes")
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("not a JSON object")
                    run = str(row["run"])
                    found = _object(row, run, tables)
                except Exception as error:  # damage can look like anything
                    self.skipped.append((number, _reason(line, error)))
                    continue
                if run not in self.runs:
                    self.runs.append(run)
                if isinstance(found, Record):
                    missing = sorted(set(row["leaves"]) - set(found.leaves))
                    if missing:
                        self.skipped.append((number, f"the leaves of {', '.join(missing)} are not in the file"))
                        found = _without(found, missing)
                if found is not None and self._only in (None, run):
                    self.run, self.line = run, number
                    yield found


def read_jsonl(path: Any, *, run: str | None = None) -> JsonlReader:
    """Returns the headers, leaves, records, alerts and marks of a file, to iterate over.

    Lines that are cut, damaged or of an unknown kind are skipped, and listed in the reader's ``skipped``. So is a probe
    whose table of leaves is missing; what it holds beside the values per leaf is read all the same.

    Args:
      path: a ``.jsonl`` file, or a folder with a ``probes.jsonl``.
      run: only this run's objects; all if not given.

    Raises:
      WriterError: there is no such file.
    """
    file = as_path(path, "read_jsonl")
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise WriterError(
            f"read_jsonl: no file {str(file)!r}. Expected a file that JsonlWriter made, or the folder it is "
            "in. Check the path."
        )
    return JsonlReader(file, run)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines, of one that is too long only the beginning."""
    while line := file.readline(_LONGEST + 1):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(_LONGEST + 1)


def _without(record: Record, groups: list[str]) -> Record:
    """The record without the values per leaf of these groups, whose rows nobody can name."""
    per_leaf = {
        name
        for name, value in record.values.items()
        if name.partition(".")[0] in groups and isinstance(value, (np.ndarray, tuple))
    }
    return replace(record, values={name: v for name, v in record.values.items() if name not in per_leaf})


def _reason(line: bytes, error: Exception) -> str:
    if len(line) <= _LONGEST and not line.endswith(b"\n"):
        return "cut off: the file ends inside the line"
    if isinstance(error, KeyError):
        return f"no field {error.args[0]!r}"
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]


def _object(
    row: Mapping[str, Any], run: str, tables: dict[str, Leaves]
) -> Header | Leaves | Record | Alert | Mark | None:
    kind = row["kind"]
    if kind == "probe":
        # A name is a hash of the table, so a table that another run wrote is the same one.
        leaves = {group: tables[name] for group, name in row["leaves"].items() if name in tables}
        return Record(_step(row), decode(row["time_s"]), _decoded(row["values"]), leaves)
    if kind == "leaves":
        table = Leaves(
            group=row["group"],
            paths=tuple(row["paths"]),
            kinds=tuple(row["kinds"]),
            shapes=tuple(tuple(shape) for shape in row["shapes"]),
            dtypes=tuple(row["dtypes"]),
            trained=tuple(row["trained"]),
        )
        tables[row["id"]] = table
        return table
    if kind == "alert":
        return _alert(row)
    if kind == "mark":
        return Mark(_step(row), row["name"])
    if kind == "header":
        return Header(run, row["time_s"], _decoded(row["values"]))
    if kind in _OTHER_KINDS:
        return None
    raise ValueError(f"unknown kind {kind!r}; a newer version may have written it")


def _alert(row: Mapping[str, Any]) -> Alert:
    causes = tuple(
        Cause(c["slug"], c["title"], c["why"], c["fix"], decode(c["score"]), c["check"]) for c in row["causes"]
    )
    return Alert(
        step=_step(row),
        rule=row["rule"],
        level=Level[row["level"]],
        title=row["title"],
        message=row["message"],
        paths=tuple(row["paths"]),
        causes=causes,
        values=_decoded(row["values"]),
    )


def _step(row: Mapping[str, Any]) -> int:
    step = row["step"]
    if type(step) is not int:
        raise TypeError(f"the step is no whole number but {step!r}")
    return step


def _decoded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: decode(value) for name, value in values.items()}
