"""What a fault of the benchmark is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nnx_probes.faults.recipe import Recipe

__all__ = ["Fault"]


@dataclass(frozen=True)
class Fault:
    """One mistake, built into several programs.

    Attributes:
      slug: its name.
      story: what somebody did, in one line.
      rules: slugs of the rules of which one has to fire, at WARN or ERROR.
      causes: slugs that count as naming it.
      apply: maps the healthy recipe to the faulty one.
      on: names of the programs it is built into.
      steps: length of the run, and of the twin's.
      onset: first step at which it acts.
      within: probes after the onset by which an alert is expected; later counts as late.
      leaf: program -> path that an alert has to name, where one leaf is at fault; ``"*"`` for all programs.
      kind: ``"nonfinite"``, ``"frozen"``, ``"lost"``, ``"repeated"``: those that must all be found; else empty.
    """

    slug: str
    story: str
    rules: tuple[str, ...]
    causes: tuple[str, ...]
    apply: Callable[[Recipe], Recipe]
    on: tuple[str, ...]
    steps: int = 160
    onset: int = 0
    within: int = 64
    leaf: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""

    def leaf_in(self, program: str) -> str | None:
        """Returns the path that an alert has to name in this program, None where no one leaf is at fault."""
        return self.leaf.get(program, self.leaf.get("*"))
