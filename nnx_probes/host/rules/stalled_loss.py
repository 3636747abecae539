"""A loss that has stopped falling before it was low."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnx_probes.host.alert import Alert, Level
from nnx_probes.host.history import History
from nnx_probes.host.record import Record
from nnx_probes.host.rule import Rule
from nnx_probes.host.trend import converged, plateau

__all__ = ["StalledLoss", "jumped", "tiny_updates"]

_SUPPORT = ("chance_level", "absorbed_updates", "zero_gradients", "vanishing_gradients", "dead_units")
_LEAST = 64
_HALF = 0.5
_TINY = 1e-5
_JUMP = 100.0


@dataclass(frozen=True)
class StalledLoss(Rule):
    """Over the last 2 W steps the loss does not fall, and is not `better` than it was before; it never came down to half.

    W is the larger of `steps` and 5 % of ``total_steps``; at least 64 probes, after the warm-up (10 % of ``total_steps``, else
    256 steps). The trend is a Mann-Kendall test at 1 %. WARN with corroboration: chance_level, absorbed_updates,
    zero_gradients, vanishing_gradients or dead_units raised, updates that were never above 1e-5 of their matrices, or a loss
    that once was 100 times the first one.
    INFO alone, since an irreducible loss looks the same. A loss at half its first value or below counts as converged.

    Says nothing while all parameters stand still: `FrozenParams` has said it. Delay: the warm-up and 2 W.

    Args:
      steps: half the length of the stretch.
      better: relative improvement that counts.
    """

    steps: int = 256
    better: float = 0.01

    slug = "stalled_loss"
    reads = ("loss",)
    descends = True

    def check(self, record: Record, history: History) -> Alert | None:
        first = history.first("loss")
        if first is None or first <= 0 or history.params.stands() or converged(history):
            return None
        width = max(self.steps, (history.facts.total_steps or 0) // 20)
        stretch = plateau(history, steps=2 * width, probes=_LEAST, warm_up=0.1)
        if stretch is None:
            return None
        quarters = stretch.quarters()
        earlier = [float(np.median(stretch.before[-_LEAST:]))] if len(stretch.before) else []
        best_before, now = min([*earlier, float(quarters[0])]), float(quarters[2:].min())
        if now <= _HALF * first or now < (1 - self.better) * best_before:
            return None
        support = [slug for slug in _SUPPORT if history.raised.get(slug, Level.INFO) >= Level.WARN]
        jump = jumped(history)
        if jump:
            support.append(f"a loss of {jump:.3g} times the first one")
        if tiny_updates(history):
            support.append("updates below 1e-5 of their matrices")
        level = Level.WARN if support else Level.INFO
        message = (
            f"Over steps {stretch.began} to {stretch.ended} the median loss is {float(np.median(stretch.losses)):.4g} (first "
            f"{first:.4g}) and does not fall" + (f"; with it: {', '.join(support)}." if support else ".")
        )
        return Alert(record.step, self.slug, level, "The loss has stalled", message, values={"loss": now})


def jumped(history: History) -> float:
    """Returns by how much the largest loss exceeds the first one; 0 below 100 times."""
    first, (_, losses) = history.first("loss"), history.since_mark("loss")
    finite = losses[np.isfinite(losses)]
    if first is None or first <= 0 or not len(finite) or finite.max() < _JUMP * first:
        return 0.0
    return float(finite.max() / first)


def tiny_updates(history: History) -> bool:
    """Whether no update of most matrices was ever above 1e-5 of the matrix, norm over norm."""
    table, ever = history.windows.leaves.get("updates"), history.windows.ever("updates.ratio")
    if table is None or len(ever) != len(table):
        return False
    matrix = np.array([len(shape) >= 2 for shape in table.shapes], bool)
    return bool(matrix.any()) and 0 < float(np.median(ever[matrix])) < _TINY
