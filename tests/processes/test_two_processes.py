"""Two real processes of two devices each, parameters spread over all four: same values, no hang, one writer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Net
from flax import nnx

import nnx_probes as probes
from nnx_probes.writers import read_jsonl

TESTS = Path(__file__).parents[1]
LIMIT_S = 120


def launch(folder, *names, limit_s=LIMIT_S):
    """Returns what each of two processes printed; its folder is `folder`/<index>."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        PYTHONPATH=os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
    )
    script = str(TESTS / "processes" / "one_of_several.py")
    started = [
        subprocess.Popen(
            [sys.executable, script, str(i), "2", port, str(folder / str(i)), *names],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        found = [process.communicate(timeout=limit_s) for process in started]
    except subprocess.TimeoutExpired:
        pytest.fail(f"two processes with {names} did not end within {limit_s} s: they wait for each other")
    finally:
        for process in started:
            process.kill()  # SIGTERM is caught by jax.distributed
            process.communicate()
    assert [p.returncode for p in started] == [0, 0], "\n".join(err[-2500:] for _, err in found)
    assert not any("Traceback" in err for _, err in found), "\n".join(err[-2500:] for _, err in found)
    return [json.loads(out.splitlines()[-1]) for out, _ in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def seen(folder):
    found = launch(folder, "healthy", "sparse", "frozen")
    assert [one["devices"] for one in found] == [[4, 2], [4, 2]]
    return found


def test_two_processes_agree_with_each_other_and_with_one(seen, folder):
    for name in ("healthy", "sparse", "frozen"):
        first, second = (one[name] for one in seen)
        assert first["failures"] == second["failures"] == {} and first["finite"]
        assert first["before"] == second["before"] == probes.fingerprint(Net(nnx.Rngs(0)), method="mix64"), name
        assert first["after"] == second["after"] == first["after, gathered"] == second["after, gathered"], name
    steps = {name: [step for step, _ in seen[0][name]["records"]] for name in ("healthy", "sparse", "frozen")}
    assert steps == {"healthy": list(range(12)), "sparse": [0, 5, 10], "frozen": list(range(12))}
    assert seen[0]["healthy"]["alerts"] == seen[1]["healthy"]["alerts"] == []
    every, sparse = seen[0]["healthy"]["records"], seen[0]["sparse"]["records"]
    assert [every[i] for i in (0, 5, 10)] == sparse and sorted(seen[0]["healthy"]["after"].values()) == sorted(
        every[-1][1]
    )

    # frozen parameters: both come to the same alert, and neither waits for the other on the way
    first, second = (one["frozen"] for one in seen)
    assert first["before"] == first["after"] and first["alerts"] == second["alerts"]
    assert [(rule, level, causes[0]) for rule, level, _, _, causes in first["alerts"]] == [
        ("frozen_params", "ERROR", "state_dropped")
    ]

    # files are written by process 0 alone
    for name in ("healthy", "sparse", "frozen"):
        assert (folder / "0" / name / "probes.jsonl").is_file() and list((folder / "0" / name).glob("events.out.*"))
    assert not (folder / "1").exists()
    rows = [row for row in read_jsonl(folder / "0" / "frozen") if isinstance(row, probes.Record)]
    assert [row.step for row in rows] == list(range(12))
    assert list(rows[-1].values["params.fingerprint"]) == first["records"][-1][1]


def test_an_automatic_interval_does_not_let_two_processes_wait_for_each_other(folder):
    first, second = (one["auto"] for one in launch(folder, "auto", limit_s=60))
    assert first["failures"] == second["failures"] == {} and first["after"] == second["after"]


def test_a_watched_optimizer_is_measured_over_two_processes(folder):
    """Over several devices XLA may round the optimizer's multiply-adds of a measured step differently: see `watch`."""
    first, second = launch(folder, "healthy", "watched", "inside")
    for name, steps in (("watched", [3, 6, 9]), ("inside", [0, 3, 6, 9])):
        assert first[name]["failures"] == second[name]["failures"] == {}
        assert [step for step, _ in first[name]["grads"]] == steps
        assert first[name]["alerts"] == second[name]["alerts"] == []
        assert first[name]["after"] == second[name]["after"]
        assert first[name]["losses"] == pytest.approx(first["healthy"]["losses"][::3], rel=1e-6)
    assert first["watched"]["grads"] == first["inside"]["grads"][1:]
