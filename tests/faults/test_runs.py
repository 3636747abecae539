"""Real runs of the benchmark's programs, a few of them: verdicts, and the same alerts from the file."""

import json

import pytest

from nnx_probes import cli
from nnx_probes.errors import ArgumentError
from nnx_probes.faults import command, data
from nnx_probes.faults.catalogue import FAULTS
from nnx_probes.faults.jobs import Job, execute
from nnx_probes.faults.programs import PROGRAMS
from nnx_probes.faults.run import run
from nnx_probes.faults.score import judge

SOME = [
    ("jax_jit", "mlp"),
    ("norm_at_zero", "recurrent"),
    ("running_statistics_dropped", "conv"),
    ("dead_relu", "experts"),
]


@pytest.mark.parametrize(("slug", "program"), SOME)
def test_a_fault_is_found_in_time_with_its_cause_and_again_from_the_file(slug, program, tmp_path):
    fault = FAULTS[slug]
    outcome = run(fault.apply(PROGRAMS[program]().but(steps=24)), seed=0, folder=tmp_path)
    found = judge(fault, program, 0, outcome, every=1)
    assert (found.found, found.top1, outcome.error) == ("found", True, "")


@pytest.mark.parametrize("program", ["mlp", "transformer"])
def test_the_plain_program_is_quiet_and_learns(program, tmp_path):
    outcome = run(PROGRAMS[program]().but(steps=40), seed=0, folder=tmp_path)
    assert (outcome.alerts, outcome.error) == ((), "")
    assert outcome.score < 4.0


def test_a_run_is_the_same_without_the_monitor_s_wrapper():
    recipe = PROGRAMS["mlp"]().but(steps=12)
    watched, plain = run(recipe, seed=3), run(recipe, seed=3, watch=False)
    assert (watched.score, watched.last_loss) == (plain.score, plain.last_loss)


def test_a_job_runs_what_its_name_says():
    outcome = execute(Job("twin", "", "mlp", 1, 8), every=4)
    assert outcome.alerts == () and outcome.error == ""


def test_the_command_prints_verdicts_and_ends_with_0_when_all_is_found(capsys):
    arguments = ["faults", "--seeds", "1", "--only", "norm_at_zero", "--workers", "1", "--json"]
    assert cli.main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {v["program"] for v in printed["verdicts"]} == set(FAULTS["norm_at_zero"].on)
    assert printed["rates"]["found"]["share"] == 1.0
    assert printed["errors"] == []
    assert "labels_leaked" in printed["out_of_reach"]


def test_a_name_that_nothing_has_is_wrong_usage(capsys):
    assert cli.main(["faults", "--only", "no-such-fault"]) == 2
    assert "no-such-fault" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="no-such-fault"):
        command.run(seeds=1, only=["no-such-fault"], every=1, workers=1, form="text")


def test_without_scikit_learn_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    data._digits.cache_clear()
    try:
        assert cli.main(["faults", "--only", "jax_jit"]) == 2
        assert "nnx-probes[faults]" in capsys.readouterr().err
    finally:
        data._digits.cache_clear()
