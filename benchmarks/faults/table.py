"""Runs the fault benchmark, stores every verdict, and pastes the table into README.md.

usage: python benchmarks/faults/table.py [--seeds N] [--workers N] [--store DIR] [--again]

With --store the runs' records are kept in DIR; runs that are there already are judged again by today's rules and not run
(and the minutes that the table tells stay those of the last run).
With --again the verdicts of the last time are pasted once more. The output goes to benchmarks/faults/result.json (all
verdicts) and result.txt (one line a fault and program).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from pathlib import Path

import flax
import jax
from rich.progress import track

from nnx_probes.faults.bench import Healthy, Result, collect, plan
from nnx_probes.faults.jobs import run_all
from nnx_probes.faults.score import Verdict
from nnx_probes.faults.show import markdown, text

HERE = Path(__file__).parent
README = HERE.parent.parent / "README.md"
BEGIN, END = "<!-- pasted by: python benchmarks/faults/table.py -->", "<!-- end -->"


def main() -> None:
    """Runs and pastes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    if options.again:
        result, about = load()
    else:
        jobs = plan(options.seeds)
        again = options.store is not None and options.store.is_dir() and any(options.store.iterdir())
        began = time.monotonic()
        runs = run_all(jobs, every=1, workers=options.workers, store=options.store)
        outcomes = dict(track(runs, "runs", total=len(jobs)))
        result = collect(outcomes, every=1)
        about = {
            "seeds": options.seeds,
            "minutes": load()[1]["minutes"] if again else round((time.monotonic() - began) / 60, 1),
            "runs": len(jobs),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
        }
        (HERE / "result.json").write_text(json.dumps({**about, **result.as_json()}, indent=1) + "\n")
    (HERE / "result.txt").write_text("\n".join([*text(result), ""]))
    paste(markdown(result, seeds=about["seeds"], minutes=about["minutes"]))


def load() -> tuple[Result, dict]:
    """Returns what was stored."""
    stored = json.loads((HERE / "result.json").read_text())

    def verdicts(name: str) -> list[Verdict]:
        return [Verdict(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in stored[name]]

    healthy = [
        Healthy(
            **{**row, "alerts": tuple(row["alerts"]), "score": float("nan") if row["score"] is None else row["score"]}
        )
        for row in stored["healthy"]
    ]
    return Result(verdicts("verdicts"), verdicts("harmless"), healthy, stored["errors"]), stored


def paste(table: str) -> None:
    """Puts `table` between the two marks in the README."""
    page = README.read_text()
    found = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not found.search(page):
        raise SystemExit(f"README.md has no {BEGIN} ... {END}")
    README.write_text(found.sub(lambda _: f"{BEGIN}\n{table}\n{END}", page))


if __name__ == "__main__":
    main()
