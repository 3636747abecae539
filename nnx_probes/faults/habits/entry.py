"""What a healthy program of the benchmark is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nnx_probes.faults.recipe import Recipe

__all__ = ["Habit"]


@dataclass(frozen=True)
class Habit:
    """A sound program with a habit that a careless rule would take for a fault.

    Attributes:
      slug: its name.
      story: the habit, in one line.
      on: name of the program.
      apply: maps the plain recipe to this one.
    """

    slug: str
    story: str
    on: str
    apply: Callable[[Recipe], Recipe]
