"""When a series leaves its ordinary range upwards, such as a loss that spikes.

A value is out of range if it lies more than `factor` standard deviations above the median of the ordinary values before it.
The spike score of OLMo 2 (2025, arXiv 2501.00656) counts values of a loss that are at least seven standard deviations away
from a rolling average of the last 1,000. Runs here are shorter, so the window is, and with few values one spike would move
mean and standard deviation by itself: in their place stand the median, and 1.4826 times the median absolute deviation, which
estimates the standard deviation of a normal distribution (Rousseeuw & Croux 1993).

The estimate from `W` values has a relative error of about 1.17 / sqrt(W), so that a value of white noise passes 7 estimated
deviations more often than 7 true ones: for W = 40, fewer than 1 in 10^5 (tests/report/statistics/test_excursions.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW, FACTOR = 40, 7.0
_NORMAL = 1.4826  # 1 / 0.6745, the upper quartile of the standard normal distribution


@dataclass(frozen=True)
class Excursion:
    """Values in a row that are out of range.

    Attributes:
        first: the place of the first of them.
        last: of the last.
        height: the largest distance from the median before it, in estimated standard deviations; infinite for what is not finite.
    """

    first: int
    last: int
    height: float


def excursions(values: Sequence[float], window: int = WINDOW, factor: float = FACTOR) -> list[Excursion]:
    """The excursions of a series, each from its first value out of range to the last before one in range.

    The range is that of the last `window` values that were in range. After `window` values out of range it is made anew, of
    what follows: they are a level, not an excursion any more. The first `window` values have no range, and none of them is an
    excursion. NaN is out of range.
    """
    found: list[Excursion] = []
    ordinary: list[float] = []
    open_at: int | None = None
    for place, value in enumerate(values):
        middle, spread = _range(ordinary[-window:]) if len(ordinary) >= window else (np.inf, 1.0)
        if value <= middle + factor * spread or (middle == np.inf and np.isfinite(value)):
            ordinary.append(value)
            open_at = None
            continue
        if middle == np.inf:
            continue  # neither ordinary nor to be told from it
        height = (value - middle) / spread if spread and np.isfinite(value) else np.inf
        if open_at is None:
            open_at = place
            found.append(Excursion(place, place, height))
        else:
            found[-1] = Excursion(open_at, place, max(height, found[-1].height))
        if place - open_at + 1 == window:
            ordinary, open_at = [], None
    return found


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Median, and the standard deviation by the median absolute deviation."""
    middle = float(np.median(values))
    return middle, _NORMAL * float(np.median(np.abs(np.array(values) - middle)))
