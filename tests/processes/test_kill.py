"""However a run ends, what it measured is on disk: all of it, but for one probe when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nnx_probes as probes
from nnx_probes.writers import read_jsonl

TESTS = Path(__file__).parents[1]
LAST = 7


def end(folder, way):
    """Lets a run end in this way. Returns its exit status, what it printed last, and what is in its file."""
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        PYTHONPATH=os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
    )
    script = str(TESTS / "processes" / "dying_run.py")
    done = subprocess.run(
        [sys.executable, script, str(folder), way], env=environment, capture_output=True, text=True, timeout=100
    )
    reader = read_jsonl(folder)
    found = list(reader)
    steps = [row.step for row in found if isinstance(row, probes.Record)]
    alerts = [f"{row.rule}@{row.step}" for row in found if isinstance(row, probes.Alert)]
    return done, steps, alerts, reader.skipped


@pytest.mark.parametrize(
    ("way", "rules"), [("kill", []), ("kill nan", [f"nonfinite@{LAST - 1}"]), ("alert kill", None)]
)
def test_a_kill_loses_at_most_one_probe_and_no_alert(tmp_path, way, rules):
    done, steps, alerts, skipped = end(tmp_path, way)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert steps in (list(range(LAST)), list(range(LAST + 1))) and skipped == []
    assert alerts == done.stdout.split("\n")[-2].split()  # what monitor.alerts held when the kill came
    assert alerts == rules if rules is not None else [a.split("@")[0] for a in alerts] == ["frozen_params"]


@pytest.mark.parametrize(
    ("way", "status", "said"),
    [
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("exception", 1, "ZeroDivisionError: the user's own"),
        ("exit", 3, ""),
        ("forgets", 0, ""),
        ("forgets nan", 0, ""),
    ],
)
def test_any_other_end_loses_nothing_and_stays_what_it_was(tmp_path, way, status, said):
    done, steps, alerts, skipped = end(tmp_path, way)
    assert done.returncode == status, done.stderr[-3000:]
    assert said in done.stderr and ("Traceback" in done.stderr) == bool(said) and "ignored" not in done.stderr
    assert steps == list(range(LAST + 1)) and skipped == []
    assert alerts == ([f"nonfinite@{LAST - 1}"] if way.endswith("nan") else [])
