"""Four devices: values do not depend on how arrays are laid out. All of it runs in one process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen():
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    )
    script = Path(__file__).with_name("four_devices.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def result(seen, name):
    assert "error" not in seen[name], seen[name]["error"]
    return seen[name]


@pytest.mark.parametrize("name", ["mix64", "fingerprint mix64", "fingerprint xxh3", "keys"])
def test_a_fingerprint_is_the_same_under_every_sharding(seen, name):
    for dtype, values in result(seen, name).items():
        assert len(values) >= 2 and len(set(values.values())) == 1, (dtype, values)


def test_a_probe_counts_and_fingerprints_the_same_under_every_sharding(seen):
    found = result(seen, "statistics")
    (bad,), texts = found["alone"]
    assert bad == 1 and found["together"] == [[1] * 5, texts]


@pytest.mark.parametrize("name", ["two devices", "free and bound", "free and sharded", "one and sharded", "two meshes"])
def test_leaves_of_one_group_may_lie_on_different_devices_even_under_a_transfer_guard(seen, name):
    found = result(seen, name)
    assert found["a"] == found["b"] and found["a"][0] > 0


def test_a_monitor_watches_sharded_parameters(seen):
    found = result(seen, "monitor")
    assert found["steps"] == [0, 1, 2, 3, 4, 5] and found["failures"] == {}
    assert found["alerts"] == [["nonfinite", 5]]
    assert found["moved"] == 6 and found["labels"] == ["mix64"]
    assert found["layouts"] == [["x", "y"], 1]
