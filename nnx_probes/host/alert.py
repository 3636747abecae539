"""What the library says when something is wrong: an alert, how bad it is, and its likely causes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["MAX_PATHS", "Alert", "Cause", "Level"]

MAX_PATHS = 8
"""Paths an alert names at most; the count of all affected leaves goes into its message."""


@enum.unique
class Level(enum.IntEnum):
    """How bad an alert is. Ordered: ``INFO < WARN < ERROR``."""

    INFO = 1
    """Worth knowing; a healthy run may say it."""
    WARN = 2
    """Probably wrong; look at it."""
    ERROR = 3
    """Wrong; the run is wasting time from this step on."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One explanation of an alert.

    Attributes:
      slug: stable name, for example ``"state_dropped"``.
      title: one line, in plain words.
      why: what was seen that speaks for it.
      fix: the change to make, on one line where possible.
      score: 0 to 1; causes of an alert are sorted by it, best first.
      check: the observation that would change the verdict.
    """

    slug: str
    title: str
    why: str
    fix: str
    score: float = 0.0
    check: str = ""


@dataclass(frozen=True, slots=True)
class Alert:
    """One finding.

    Attributes:
      step: the step of the measurement that showed it (not the step at which it was read).
      rule: slug of the rule, for example ``"frozen_params"``.
      level: how bad it is.
      title: one line.
      message: what was seen, with numbers.
      paths: at most ``MAX_PATHS`` leaves it is about.
      causes: ranked, most likely first; may be empty.
      values: the numbers behind it.
    """

    step: int
    rule: str
    level: Level
    title: str
    message: str = ""
    paths: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
