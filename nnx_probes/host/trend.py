"""Whether a series of losses falls, in words a rule can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nnx_probes.host.history import History

__all__ = ["converged", "falls", "stands", "undecided"]

_CONVERGED = 1e-6

_LEAST_DROP = 0.05
_HALVED = 0.5
_SOME = 0.9
_SOON = 0.99
_SOON_STEPS = 8
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
    x = x[np.linspace(0, n - 1, min(n, 200)).astype(int)]
    n = len(x)
    s = float(np.sign(x[None, :] - x[:, None])[np.triu_indices(n, 1)].sum())
    deviation = np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return bool((s + 1) / deviation < -_Z)


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
    """Whether the loss is at most 1e-6 of its first value."""
    first, (_, losses) = history.first("loss"), history.series("loss")
    if first is None or len(losses) < 2:
        return False
    return bool(abs(losses[-1]) <= _CONVERGED * abs(first)) and abs(losses[-1]) < abs(first)
