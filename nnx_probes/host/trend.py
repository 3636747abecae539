"""Whether a series of losses falls, in words a rule can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nnx_probes.host.history import History

__all__ = ["Plateau", "converged", "falling", "falls", "plateau", "stands", "undecided"]

_CONVERGED = 1e-6

_LEAST_DROP = 0.05
_HALVED = 0.5
_SOME = 0.9
_SOON = 0.99
_SOON_STEPS = 8
_WARM_UP = 256
_Z = 2.33
"""One-sided 1 % point of the normal distribution."""


def falls(losses: Sequence[float]) -> bool:
    """Whether the losses clearly go down.

    Two finite values: the second at most half the first. Up to 7: each lower than the one before, and 5 % lower at the
    end than at the start. From 8 on: the Mann-Kendall trend test at 1 % (H. B. Mann, 1945; normal approximation
    without ties) and a median of the last quarter 5 % below that of the first. Absolute differences are taken against
    the spread when losses can be negative.
    """
    x = np.asarray([v for v in losses if np.isfinite(v)], np.float64)
    n = len(x)
    if n < 2:
        return False
    if n == 2:
        return bool(0 <= x[1] <= _HALVED * x[0] and x[0] > 0)
    quarter = max(1, n // 4)
    drop = float(np.median(x[:quarter]) - np.median(x[-quarter:]))
    scale = max(abs(float(np.median(x[:quarter]))), float(np.ptp(x)))
    if drop < _LEAST_DROP * scale:
        return False
    if n < 8:
        return bool(np.all(np.diff(x) < 0))
    return falling(x)


def falling(losses: np.ndarray) -> bool:
    """Whether finite losses go down at all: the Mann-Kendall trend test at 1 %, on at most 200 of them."""
    x = losses[np.linspace(0, len(losses) - 1, min(len(losses), 200)).astype(int)]
    n = len(x)
    s = float(np.sign(x[None, :] - x[:, None])[np.triu_indices(n, 1)].sum())
    deviation = np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return bool((s + 1) / deviation < -_Z)


@dataclass(frozen=True, slots=True)
class Plateau:
    """A stretch at the end of a run over which the loss does not fall.

    Attributes:
      losses: its finite losses, oldest first.
      before: finite losses that lie before it, as far as they are kept.
      began, ended: first and last step.
    """

    losses: np.ndarray
    before: np.ndarray
    began: int
    ended: int

    def quarters(self) -> np.ndarray:
        """Returns float64[4], the medians of its quarters."""
        return np.array([np.median(part) for part in np.array_split(self.losses, 4)])


def plateau(history: History, *, steps: int, probes: int, warm_up: float) -> Plateau | None:
    """Returns the last `steps` steps, or `probes` losses if that is longer, when the loss does not fall over them.

    None while fewer steps are known, within its warm-up (`warm_up` of the planned steps, else 256 steps, counted from the
    beginning or the last announced event), and while the loss goes down.
    """
    seen, losses = history.since_mark("loss")
    good = np.isfinite(losses)
    seen, losses = seen[good], losses[good]
    origin = history.origin
    if len(seen) < probes or origin is None:
        return None
    first = min(len(seen) - probes, int(np.searchsorted(seen, seen[-1] - steps, side="right")))
    total = history.facts.total_steps
    warm = _WARM_UP if total is None else max(1, int(warm_up * total))
    known = int(seen[0]) <= int(seen[-1]) - steps + 1  # the losses that are kept reach back far enough
    if not known or int(seen[first]) < origin + warm or falling(losses[first:]):
        return None
    return Plateau(losses[first:], losses[:first], int(seen[first]), int(seen[-1]))


def undecided(losses: Sequence[float], steps: Sequence[int]) -> bool:
    """Whether only two losses are known, and the second is lower by too much for noise and too little for a trend.

    Within 8 steps 1 % counts as too much for noise, over more steps 10 %.
    """
    pairs = [(v, s) for v, s in zip(losses, steps, strict=True) if np.isfinite(v)]
    if len(pairs) != 2:
        return False
    (first, began), (second, ended) = pairs
    return bool(_HALVED * first < second <= (_SOON if ended - began < _SOON_STEPS else _SOME) * first)


def stands(losses: Sequence[float]) -> bool:
    """Whether at least 3 losses were seen and all are bit-equal."""
    return len(losses) >= 3 and len({float(v) for v in losses}) == 1


def converged(history: History) -> bool:
    """Whether the loss is at most 1e-6 of its first value, of the run or since the last announced event."""
    first, (_, losses) = history.scale("loss"), history.series("loss")
    if first is None or len(losses) < 2:
        return False
    return bool(abs(losses[-1]) <= _CONVERGED * first and abs(losses[-1]) < first)
