"""What two lists of alerts, the stored and the repeated, do not have in common."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nnx_probes.host.alert import Alert
from nnx_probes.writers.jsonl_values import alert_row

__all__ = ["Difference", "differences"]

_LAST_BITS = 1e-9
"""Relative; another version of NumPy or another processor may round a logarithm otherwise."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One alert that is not the same in the file and here.

    Attributes:
      kind: ``"missing"``: in the file and not raised here; ``"new"``: raised here and not in the file; ``"changed"``:
        the same rule at the same step, with other content.
      alert: that alert; of a changed one what was raised here.
      fields: names of the fields that differ, of a changed one.
    """

    kind: Literal["missing", "new", "changed"]
    alert: Alert
    fields: tuple[str, ...] = ()


def differences(stored: Sequence[Alert], repeated: Sequence[Alert]) -> tuple[Difference, ...]:
    """Returns how `repeated` differs from `stored`: alerts of the same rule and step are paired in their order."""
    waiting: defaultdict[tuple[str, int], deque[Alert]] = defaultdict(deque)
    for alert in stored:
        waiting[alert.rule, alert.step].append(alert)
    found: list[Difference] = []
    for alert in repeated:
        same = waiting[alert.rule, alert.step]
        if not same:
            found.append(Difference("new", alert))
        elif other := _unlike(same.popleft(), alert):
            found.append(Difference("changed", alert, other))
    found += [Difference("missing", alert) for left in waiting.values() for alert in left]
    return tuple(sorted(found, key=lambda one: one.alert.step))


def _unlike(one: Alert, other: Alert) -> tuple[str, ...]:
    rows = alert_row(one), alert_row(other)
    return tuple(name for name in rows[0] if not _equal(rows[0][name], rows[1][name]))


def _equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal up to the last bits of their numbers."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_LAST_BITS)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    return bool(one == other)
