"""From outcomes to verdicts and rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nnx_probes.faults.catalogue.entry import Fault
from nnx_probes.faults.run import Found, Outcome

__all__ = ["Rate", "Verdict", "harmful", "judge", "rate"]

_LOUD = ("WARN", "ERROR")
_WORSE = 1.1
_MORE = 0.02
_Z = 1.959964
"""Two-sided 95 % point of the normal distribution."""


@dataclass(frozen=True)
class Rate:
    """A share with its Wilson interval at 95 % (E. B. Wilson, 1927)."""

    hits: int
    of: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """The share itself, NaN of nothing."""
        return self.hits / self.of if self.of else math.nan

    def __str__(self) -> str:
        """Returns for example ``"47 of 50 (94 %, 84 to 98 %)"``."""
        if not self.of:
            return "0 of 0"
        return f"{self.hits} of {self.of} ({self.share:.0%}, {self.low:.0%} to {self.high:.0%})".replace("%", " %")

    def as_json(self) -> dict[str, Any]:
        """Returns it as plain values."""
        return {**asdict(self), "share": self.share if self.of else None}


def rate(truths: Iterable[bool]) -> Rate:
    """Returns how many of `truths` hold, with the interval."""
    known = list(truths)
    n, hits = len(known), sum(known)
    if not n:
        return Rate(0, 0, 0.0, 1.0)
    p, z2 = hits / n, _Z**2
    middle, spread = p + z2 / (2 * n), _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low, high = (middle - spread) / (1 + z2 / n), (middle + spread) / (1 + z2 / n)
    return Rate(hits, n, max(low, 0.0), min(high, 1.0))


@dataclass(frozen=True)
class Verdict:
    """What became of one fault in one program with one seed.

    Attributes:
      fault, program, seed: which.
      found: ``"found"``, ``"late"`` or ``"missed"``.
      step: of the first alert that counts, -1 without one.
      rule: of that alert.
      top1, top3: whether an accepted cause is its first, or among its first three.
      leaf: whether that alert names the leaf at fault; None where no one leaf is.
      early: alerts above INFO before the onset: false ones.
      causes: of that alert, first three.
      others: rules of all other alerts above INFO.
      worst: highest level of all alerts, empty without any.
    """

    fault: str
    program: str
    seed: int
    found: str
    step: int
    rule: str
    top1: bool
    top3: bool
    leaf: bool | None
    early: tuple[str, ...]
    causes: tuple[str, ...]
    others: tuple[str, ...]
    worst: str


def judge(fault: Fault, program: str, seed: int, outcome: Outcome, *, every: int) -> Verdict:
    """Returns the verdict on one run."""
    loud = [alert for alert in outcome.alerts if alert.level in _LOUD]
    due = -(-fault.onset // every) * every  # the first probe at or after the onset
    hits = [alert for alert in loud if alert.rule in fault.rules and alert.step >= fault.onset]
    early = tuple(f"{a.rule}@{a.step}" for a in loud if a.step < fault.onset)
    worst = next((level for level in ("ERROR", "WARN", "INFO") if any(a.level == level for a in outcome.alerts)), "")
    if not hits:
        others = tuple(f"{a.rule}@{a.step}" for a in loud if a.step >= fault.onset)
        return Verdict(fault.slug, program, seed, "missed", -1, "", False, False, None, early, (), others, worst)
    first = hits[0]
    wanted = fault.leaf_in(program)
    return Verdict(
        fault.slug,
        program,
        seed,
        "found" if first.step <= due + fault.within * every else "late",
        first.step,
        first.rule,
        _names(first, fault.causes, 1),
        _names(first, fault.causes, 3),
        None if wanted is None else any(path == wanted for path in first.paths),
        early,
        first.causes[:3],
        tuple(f"{a.rule}@{a.step}" for a in loud if a is not first and a.step >= fault.onset),
        worst,
    )


def _names(alert: Found, wanted: Sequence[str], first: int) -> bool:
    return any(cause in wanted for cause in alert.causes[:first])


def harmful(faulty: Sequence[Outcome], twins: Sequence[Outcome]) -> bool:
    """Whether with every seed the run ends clearly worse than its healthy twin.

    That is a held-out loss that is 10 % and 0.02 nats higher, or not finite, or a last training loss that is not finite.
    """
    pairs = list(zip(faulty, twins, strict=True))
    return bool(pairs) and all(_worse(a.score, b.score) or not math.isfinite(a.last_loss) for a, b in pairs)


def _worse(score: float, healthy: float) -> bool:
    return not math.isfinite(score) or score > _WORSE * healthy + _MORE
