"""How far a value lies from what is usual, in a way a few outliers cannot spoil."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Baseline", "baseline", "shift"]

_LEAST = 64
_WINDOW = 128
_FLOOR = 1e-3
_TO_SIGMA = 1.4826
"""Standard deviations in one median absolute deviation of a normal distribution."""
_TAIL = 0.98
_TAIL_SIGMAS = 2.054
"""How far above the median of a normal distribution that quantile lies."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Median and spread of the logarithm of a positive series.

    Attributes:
      median: of the values, not of their logarithms.
      sigma: spread of the logarithms: the largest of 1.4826 times their median absolute deviation, what their 98th
        percentile says (2.05 sigmas above the median of a normal distribution; heavy tails are wider there), and 1e-3.
    """

    median: float
    sigma: float

    def ratio(self, value: float) -> float:
        """Returns how many times the median `value` is."""
        return value / self.median

    def z(self, value: float) -> float:
        """Returns how many sigmas `value` lies above the median, in logarithms."""
        return float(np.log(value / self.median) / self.sigma) if value > 0 else -np.inf


def baseline(values: np.ndarray, *, z: float, ratio: float, jump: float) -> Baseline | None:
    """Returns the baseline of a series (its newest value left out by the caller), None from fewer than 64 values.

    Values that are not finite, not positive, or that would themselves be flagged (z and ratio both exceeded, or `jump`)
    are not accepted; of the others the last 128 count. Source: the usual robust z-score, in logarithms since gradient
    norms are close to log-normal.
    """
    good = np.asarray(values, np.float64)
    good = good[np.isfinite(good) & (good > 0)][-2 * _WINDOW :]
    if len(good) < _LEAST:
        return None
    rough = _of(good)
    scores, ratios = np.log(good / rough.median) / rough.sigma, good / rough.median
    kept = good[~(((scores >= z) & (ratios >= ratio)) | (ratios >= jump))][-_WINDOW:]
    return _of(kept) if len(kept) >= _LEAST else None


def _of(values: np.ndarray) -> Baseline:
    logs = np.log(values)
    middle = float(np.median(logs))
    narrow = _TO_SIGMA * float(np.median(np.abs(logs - middle)))
    tail = (float(np.quantile(logs, _TAIL)) - middle) / _TAIL_SIGMAS
    return Baseline(float(np.exp(middle)), max(narrow, tail, _FLOOR))


def shift(values: np.ndarray, *, recent: int = 16) -> tuple[float, float] | None:
    """Returns (log of the recent median over the best median of 64, sigma of the logarithms around that best).

    None from fewer than 64 + `recent` positive finite values.
    """
    good = np.asarray(values, np.float64)
    good = good[np.isfinite(good) & (good > 0)]
    if len(good) < _LEAST + recent:
        return None
    logs = np.log(good)
    windows = np.lib.stride_tricks.sliding_window_view(logs, _LEAST)
    medians = np.median(windows, axis=1)
    best = int(np.argmin(medians))
    sigma = max(_TO_SIGMA * float(np.median(np.abs(windows[best] - medians[best]))), _FLOOR)
    return float(np.median(logs[-recent:]) - medians[best]), sigma
