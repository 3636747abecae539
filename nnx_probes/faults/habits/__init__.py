"""Healthy programs, by what is unusual about them. A new one is one entry in one of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nnx_probes.faults.habits.data import DATA
from nnx_probes.faults.habits.entry import Habit
from nnx_probes.faults.habits.loops import LOOPS
from nnx_probes.faults.habits.models import MODELS
from nnx_probes.faults.habits.optimizers import OPTIMIZERS

__all__ = ["HABITS", "Habit"]

HABITS: Mapping[str, Habit] = MappingProxyType({habit.slug: habit for habit in (*OPTIMIZERS, *MODELS, *DATA, *LOOPS)})
