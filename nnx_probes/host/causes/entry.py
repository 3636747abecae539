"""One explanation as data: what it needs, what speaks for and against it, and the sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnx_probes.host.alert import Cause

__all__ = ["Explanation"]


@dataclass(frozen=True)
class Explanation:
    """A possible cause of the alerts of some rules.

    Attributes:
      slug, title, fix, check: as in `Cause`.
      why: a sentence; ``{name}`` is filled from the evidence.
      rules: slugs of the rules it can explain.
      needs: names of evidence that must all hold; a leading ``"!"`` negates.
      base: score when only `needs` hold.
      plus: evidence that raises the score, and by how much.
      minus: evidence that lowers it.
    """

    slug: str
    title: str
    why: str
    fix: str
    rules: tuple[str, ...]
    needs: tuple[str, ...] = ()
    base: float = 0.5
    plus: Mapping[str, float] = field(default_factory=dict)
    minus: Mapping[str, float] = field(default_factory=dict)
    check: str = ""

    def cause(self, rule: str, evidence: Mapping[str, Any]) -> Cause | None:
        """Returns the scored cause, or None when the evidence excludes it."""
        if rule not in self.rules or not all(_holds(name, evidence) for name in self.needs):
            return None
        score = self.base
        score += sum(weight for name, weight in self.plus.items() if _holds(name, evidence))
        score -= sum(weight for name, weight in self.minus.items() if _holds(name, evidence))
        if score <= 0:
            return None
        why = self.why.format_map(_Words(evidence))
        return Cause(self.slug, self.title, why, self.fix, round(min(score, 1.0), 3), self.check)


class _Words(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"


def _holds(name: str, evidence: Mapping[str, Any]) -> bool:
    return not evidence.get(name[1:]) if name.startswith("!") else bool(evidence.get(name))
