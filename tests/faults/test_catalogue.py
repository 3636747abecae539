"""The tables of the benchmark refer to what exists, and are as large as they claim."""

import pytest

from nnx_probes.faults.bench import plan
from nnx_probes.faults.catalogue import FAULTS, OUT_OF_REACH
from nnx_probes.faults.catalogue.gradients import GRADIENTS
from nnx_probes.faults.catalogue.inputs import INPUTS
from nnx_probes.faults.catalogue.numbers import NUMBERS
from nnx_probes.faults.catalogue.state import STATE
from nnx_probes.faults.catalogue.updates import UPDATES
from nnx_probes.faults.habits import HABITS
from nnx_probes.faults.programs import PROGRAMS, REPORTED, TUNING
from nnx_probes.host.causes import EXPLANATIONS
from nnx_probes.host.rules import DEFAULTS

RULES = {rule.slug for rule in DEFAULTS}
CAUSES = {(entry.slug, rule) for entry in EXPLANATIONS for rule in entry.rules}
KINDS = {"", "nonfinite", "frozen", "lost", "repeated"}


def test_there_are_enough_of_them():
    twice = [fault for fault in FAULTS.values() if len(fault.on) >= 2]
    assert len(twice) >= 50
    assert len(HABITS) >= 40
    assert {fault.kind for fault in FAULTS.values()} == KINDS
    assert not set(OUT_OF_REACH) & set(FAULTS)


def test_no_slug_is_used_twice():
    assert len(FAULTS) == sum(map(len, (GRADIENTS, INPUTS, NUMBERS, STATE, UPDATES)))


def test_tuning_and_reported_programs_are_apart():
    assert set(TUNING) | set(REPORTED) == set(PROGRAMS)
    assert not set(TUNING) & set(REPORTED)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.slug)
def test_a_fault_names_rules_causes_and_programs_that_exist(fault):
    assert fault.on and set(fault.on) <= set(PROGRAMS)
    assert set(fault.rules) <= RULES
    assert any((cause, rule) in CAUSES for cause in fault.causes for rule in fault.rules)
    assert 0 <= fault.onset < fault.steps
    assert fault.story and "\n" not in fault.story
    assert set(fault.leaf) <= {*fault.on, "*"}


@pytest.mark.parametrize("habit", HABITS.values(), ids=lambda habit: habit.slug)
def test_a_habit_is_one_of_a_program(habit):
    assert habit.on in PROGRAMS
    assert habit.story


def test_every_run_of_a_fault_has_its_twin_in_the_plan():
    jobs = set(plan(2))
    twins = {(job.program, job.seed, job.steps) for job in jobs if job.kind == "twin"}
    faults = [job for job in jobs if job.kind == "fault"]
    assert all((job.program, job.seed, FAULTS[job.name].steps) in twins for job in faults)
    assert len(faults) == 2 * sum(len(fault.on) for fault in FAULTS.values())
    assert len([job for job in jobs if job.kind == "habit"]) == 2 * len(HABITS)


def test_a_part_of_a_name_chooses():
    jobs = plan(1, ["jax_jit"])
    assert {job.name for job in jobs} == {"jax_jit", ""}
    assert plan(1, ["no such fault"]) == []
