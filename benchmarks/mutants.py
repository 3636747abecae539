"""Changes nnx_probes/host/ in one place at a time and asks the tests whether they notice.

usage: python benchmarks/mutants.py [--least 0.85] [--sample N] [--seed S] [--only PART] [--jobs N] [--json]

Mutants: every number in a rule's fields, a module's constants and an explanation's weights is doubled and halved; every
comparison is turned round; `and` becomes `or` and the other way round; every entry of an explanation's `needs` is left out;
levels are swapped. A mutant is killed when one of the tests in tests/host that run its line fails. Survivors are listed;
the exit code is 0 when at least the wanted share was killed. Each mutant is tried in a forked process, so: Linux and macOS.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy  # noqa: F401 - imported before the forks, so that each of them need not
import pytest
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parent.parent
HOST = Path("nnx_probes/host")
TURNED = {
    **{ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">"},
    **{ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"},
}
SWAPPED = {"INFO": "ERROR", "WARN": "INFO", "ERROR": "WARN"}
QUIET = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly"]
LIMIT_S = 300
MOST_TESTS = 500


@dataclass(frozen=True)
class Mutant:
    """One changed place: `text` is the whole new file."""

    file: str
    line: int
    what: str
    text: str


def mutants(file: Path) -> Iterator[Mutant]:
    """Yields the mutants of one file."""
    source = (ROOT / file).read_text()
    tree = ast.parse(source)
    starts = [0]
    for row in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(row))

    def span(node: ast.AST) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def change(node: ast.AST, new: str, where: tuple[int, int] | None = None) -> Mutant:
        begin, end = where or span(node)
        raw = source.encode()
        old = raw[begin:end].decode()
        text = (raw[:begin] + new.encode() + raw[end:]).decode()
        return Mutant(str(file), node.lineno, f"{old.strip()} -> {new.strip()}", text)

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            gap = span(node.left)[1], span(node.comparators[0])[0]
            if b"(" not in source.encode()[gap[0] : gap[1]] and b")" not in source.encode()[gap[0] : gap[1]]:
                yield change(node, f" {TURNED[type(node.ops[0])]} ", gap)
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            gap = span(node.values[0])[1], span(node.values[1])[0]
            between = source.encode()[gap[0] : gap[1]].decode()
            if between.split().count(word) == 1 and len(node.values) == 2:
                yield change(node, between.replace(word, other), gap)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Level":
            if node.attr in SWAPPED:
                yield change(node, f"Level.{SWAPPED[node.attr]}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Explanation":
            yield from explanation(node, change)
    for owner in (tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))):
        for node in owner.body:
            value = getattr(node, "value", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, ast.Constant):
                yield from numbers(value, change)


def numbers(node: ast.Constant, change) -> Iterator[Mutant]:
    """Yields the same number doubled and halved."""
    if isinstance(node.value, bool) or not isinstance(node.value, (int, float)) or not node.value:
        return
    for factor in (2, 0.5):
        new = type(node.value)(node.value * factor)
        new = new if new != node.value else node.value + 1
        yield change(node, repr(new))


def explanation(node: ast.Call, change) -> Iterator[Mutant]:
    """Yields an explanation with other weights, or less that it needs."""
    for keyword in node.keywords:
        if keyword.arg == "base":
            yield change(keyword.value, "0.01")
        elif keyword.arg == "needs" and isinstance(keyword.value, ast.Tuple):
            texts = [ast.unparse(element) for element in keyword.value.elts]
            for i, element in enumerate(keyword.value.elts):
                rest = [text for j, text in enumerate(texts) if j != i]
                mutant = change(keyword.value, f"({', '.join(rest)}{',' * (len(rest) == 1)})")
                yield Mutant(mutant.file, element.lineno, f"needs without {texts[i]}", mutant.text)
        elif keyword.arg in ("plus", "minus") and isinstance(keyword.value, ast.Dict):
            for value in keyword.value.values:
                yield change(value, f"-{ast.unparse(value)}")


class Coverage:
    """A pytest plugin: which lines of host/ each test runs, and how long it takes."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """Follows one test."""
        seen: set[tuple[str, int]] = set()

        def local(frame, event, argument):
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return local

        def follow(frame, event, argument):
            return local(frame, event, argument) if "/nnx_probes/host/" in frame.f_code.co_filename else None

        began = time.perf_counter()
        sys.settrace(follow)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.seconds[item.nodeid] = time.perf_counter() - began
            for name, line in seen:
                self.lines[name[name.index("nnx_probes/host/") :], line].add(item.nodeid)


def chosen(mutant: Mutant, coverage: Coverage) -> list[str]:
    """Returns the tests that run the mutant's line, the fastest first; of a line that runs at import, those of its file."""
    tests = coverage.lines.get((mutant.file, mutant.line), set())
    if not tests:
        tests = set().union(*(found for (file, _), found in coverage.lines.items() if file == mutant.file))
    if mutant.file.startswith("nnx_probes/host/causes/"):
        tests = tests | {test for test in coverage.seconds if "causes" in test or "stale" in test}
    ranked = sorted(tests, key=lambda test: coverage.seconds[test])
    return ranked if "causes" in mutant.file else ranked[:MOST_TESTS]


def run_tests(tree: Path, tests: list[str], plugins=()) -> int:
    """Runs tests of the copy at `tree` in this process."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.path.insert(0, str(tree / "tests/host"))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        return int(pytest.main([*QUIET, *tests], plugins=list(plugins)))


def forked(work) -> int:
    """Runs `work` in a child and returns its result; killed children and long ones count as 1."""
    child = os.fork()
    if not child:
        signal.alarm(LIMIT_S)
        code = 1
        try:
            code = work()
        finally:
            os._exit(min(code, 255))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def survives(mutant: Mutant, tests: list[str], tree: Path) -> bool:
    """Whether no test fails."""
    place = tree / mutant.file
    original = place.read_text()
    place.write_text(mutant.text)
    try:
        return bool(tests) and forked(lambda: run_tests(tree, tests)) == 0
    finally:
        place.write_text(original)


def copy(to: Path) -> Path:
    """Copies what the tests need."""
    for name in ("nnx_probes", "tests/host"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)  # and no conftest.py: it imports jax, and host/ does not need it
    return to


def main() -> int:
    """Runs everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=float, default=0.85)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    found = [
        mutant
        for file in sorted(path.relative_to(ROOT) for path in (ROOT / HOST).rglob("*.py"))
        if options.only in str(file)
        for mutant in mutants(file)
    ]
    if options.sample and options.sample < len(found):
        found = random.Random(options.seed).sample(found, options.sample)
    with tempfile.TemporaryDirectory() as folder:
        coverage = followed(copy(Path(folder) / "followed"))
        trees = [copy(Path(folder) / str(i)) for i in range(options.jobs)]

        for group, tree in enumerate(trees):
            if not os.fork():  # a process each, since only a process with one thread can be forked safely
                own = found[group :: options.jobs]
                rows = track(own, "mutants", console=Console(stderr=True), disable=group > 0 or options.json)
                lost = [asdict(mutant) for mutant in rows if survives(mutant, chosen(mutant, coverage), tree)]
                (tree / "survivors.json").write_text(json.dumps(lost))
                os._exit(0)
        for _ in trees:
            os.wait()
        left = [Mutant(**row) for tree in trees for row in json.loads((tree / "survivors.json").read_text())]
    killed = len(found) - len(left)
    rows = sorted((mutant.file, mutant.line, mutant.what) for mutant in left)
    if options.json:
        print(json.dumps({"mutants": len(found), "killed": killed, "survivors": rows}, indent=1))
    else:
        for file, line, what in rows:
            print(f"{file}:{line}: {what}")
        print(f"{killed} of {len(found)} mutants killed ({killed / max(1, len(found)):.0%})")
    return int(killed < options.least * len(found))


def followed(tree: Path) -> Coverage:
    """Runs all tests once, in a child, and returns what they cover."""
    store = tree / "coverage.json"

    def work() -> int:
        coverage = Coverage()
        code = run_tests(tree, [str(tree / "tests/host")], [coverage])
        lines = [[file, line, sorted(tests)] for (file, line), tests in coverage.lines.items()]
        store.write_text(json.dumps({"lines": lines, "seconds": coverage.seconds, "code": code}))
        return code

    global LIMIT_S
    limit, LIMIT_S = LIMIT_S, 3600
    forked(work)
    LIMIT_S = limit
    stored = json.loads(store.read_text())
    if stored["code"] not in (0, 1):
        raise SystemExit("the tests of host/ cannot be run")
    if stored["code"]:
        raise SystemExit("the tests of host/ fail without any mutant: mend them first")
    coverage = Coverage()
    coverage.seconds = stored["seconds"]
    for file, line, tests in stored["lines"]:
        coverage.lines[file, line] = set(tests)
    return coverage


if __name__ == "__main__":
    sys.exit(main())
