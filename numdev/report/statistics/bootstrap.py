"""Intervals by the bootstrap: replicates are drawn again, with replacement (Efron 1979)."""

from __future__ import annotations

import warnings

import numpy as np

from numdev.report.statistics.estimates import Floats

_DRAWS, _SEED = 2000, 20240


def bootstrap(values: Floats, confidence: float = 0.95) -> tuple[Floats, Floats]:
    """The percentile interval of the mean over replicates, column by column; the same values give the same interval.

    Args:
        values: `[replicates, columns]`; NaN is left out of a mean.
        confidence: that the interval has.

    Returns:
        low and high of each column; NaN where there is no value. From few replicates such an interval is too narrow: from three
        it has about 80 % where 95 % are asked for.
    """
    drawn = np.random.default_rng(_SEED).integers(len(values), size=(_DRAWS, len(values)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of columns, or draws, that hold nothing but NaN
        means = np.nanmean(values[drawn], axis=1)
        low, high = np.nanquantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high
