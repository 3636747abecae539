"""The command as a person runs it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from nnx_probes.cli import main
from nnx_probes.demo.faults import FAULTS
from nnx_probes.demo.run import fresh_logdir


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.mark.smoke
def test_a_healthy_run_ends_with_code_0_and_says_where_its_files_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "no alerts" in shown
    folder = Path("runs", "demo-healthy")
    assert f"tensorboard --logdir {folder}" in shown
    assert list(folder.glob("events.out.tfevents.*"))
    assert (folder / "probes.jsonl").stat().st_size > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_run_ends_with_code_1_and_names_its_alert(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "jax-jit": {"frozen_params", "lost_update"},
        "frozen": {"frozen_params"},
        "nan-batch": {"nonfinite"},
        "lr-too-high": {"nonfinite", "diverging"},
        "bf16": {"frozen_params", "absorbed_updates"},
    }[fault]
    warned = pytest.warns(UserWarning, match="selects no parameter") if fault == "frozen" else contextlib.nullcontext()
    with warned:
        assert main(["demo", "--fault", fault, "--logdir", "here"]) == 1
    shown = capsys.readouterr().out
    assert FAULTS[fault].description in shown
    assert any(f"[{rule}]" in shown for rule in expected)
    assert (Path("here") / "probes.jsonl").stat().st_size > 0


def test_a_logdir_that_is_a_file_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("")
    assert main(["demo", "--steps", "1", "--logdir", "taken"]) == 2
    assert "taken" in capsys.readouterr().err


def test_a_second_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        folder = fresh_logdir(tmp_path, "demo")
        folder.mkdir()
        names.append(folder.name)
    assert names == ["demo", "demo-2", "demo-3"]
