"""What the distribution promises: metadata, pins, and the command."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nnx_probes
from nnx_probes.cli import COMMANDS, main

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = sorted((ROOT / ".ci").glob("constraints*.txt"))


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def requirements(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def test_the_installed_version_is_that_of_the_package() -> None:
    assert importlib.metadata.version("nnx-probes") == nnx_probes.__version__


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(nnx_probes.__file__).parent / "py.typed").is_file()


def test_plain_installation_asks_for_neither_tensorflow_nor_torch() -> None:
    names = {canonicalize_name(requirement.name) for requirement in requirements()}
    assert not {name for name in names if name.startswith(("tensorflow", "torch"))}


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
def test_the_pins_satisfy_the_ranges(path: Path) -> None:
    pinned = pins(path)
    for requirement in requirements("dev"):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_ci_tests_the_lowest_versions_of_jax_flax_and_optax() -> None:
    pinned = pins(ROOT / ".ci" / "constraints.txt")
    lowest = {
        requirement.name: next(iter(requirement.specifier)).version
        for requirement in requirements()
        if requirement.name in ("jax", "flax", "optax")
    }
    assert len(lowest) == 3
    for name, version in lowest.items():
        assert f"{pinned[name]}.".startswith(f"{version}."), name


def test_no_file_of_the_build_names_this_machine() -> None:
    for path in [ROOT / "pyproject.toml", ROOT / ".ci" / "run", *CONSTRAINTS]:
        text = path.read_text()
        assert str(ROOT) not in text
        assert str(Path.home()) + "/" not in text
        assert "://" not in text


def test_the_command_is_installed_and_says_its_version() -> None:
    command = Path(sys.executable).with_name("nnx-probes")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"nnx-probes {nnx_probes.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--fault", "none-such"], "invalid choice: 'none-such'"),
        (["demo", "--steps", "0"], "argument --steps: expected a whole number of at least 1, got '0'"),
        (["demo", "--every", "x"], "argument --every: expected a whole number of at least 1, got 'x'"),
    ],
)
def test_wrong_usage_ends_with_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "nnx-probes: interrupted\n"),
        (
            PermissionError(13, "Permission denied"),
            2,
            "nnx-probes demo: error: [Errno 13] Permission denied\n",
        ),
    ],
)
def test_what_ends_a_command_early_is_said_in_one_line(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**options: object) -> int:
        raise error

    monkeypatch.setattr("nnx_probes.demo.run.run", fail)
    assert main(["demo"]) == code
    assert capsys.readouterr().err == message


def test_every_command_has_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(command.name in shown and command.help in shown for command in COMMANDS)
