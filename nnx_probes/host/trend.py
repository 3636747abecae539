"""Whether a series of losses falls, in words a rule can use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["falls", "stands"]

_LEAST_DROP = 0.05
_Z = 2.33
"""One-sided 1 % point of the normal distribution."""


def falls(losses: Sequence[float]) -> bool:
    """Whether the losses clearly go down.

    Up to 7 finite values: each lower than the one before, and 5 % lower at the end than at the start. From 8 on:
    the Mann-Kendall trend test at 1 % (H. B. Mann, 1945; normal approximation without ties) and a median of the last
    quarter 5 % below that of the first. Absolute differences are taken against the spread when losses can be
    negative.
    """
    x = np.asarray([v for v in losses if np.isfinite(v)], np.float64)
    n = len(x)
    if n < 3:
        return False
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


def stands(losses: Sequence[float]) -> bool:
    """Whether at least 3 losses were seen and all are bit-equal."""
    return len(losses) >= 3 and len({float(v) for v in losses}) == 1
