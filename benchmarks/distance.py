"""Wasserstein-1 against scipy's."""

from __future__ import annotations

import torch
from scipy.stats import wasserstein_distance

from benchmarks.timing import Result, paired
from numdev import wasserstein


def results() -> list[Result]:
    """4 million FP64 values, equal to 1e-12."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4_000_000, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = x.numpy(), y.numpy()
    if abs(wasserstein(x, y) - wasserstein_distance(a, b)) > 1e-12:
        raise AssertionError("the two distances differ")
    name = "Wasserstein against scipy, 4 million values"
    return [paired(name, lambda: wasserstein(x, y), lambda: wasserstein_distance(a, b), at_least=20.0, runs=5)]
