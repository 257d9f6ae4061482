"""Wasserstein-1 against scipy's, and the sorts that it rests on."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import torch
from scipy.stats import wasserstein_distance

from benchmarks.timing import Result, paired
from numdev import processor, wasserstein
from numdev.measurement.deviation.wasserstein import ascending

SORT = """
import time, numpy
values, times = numpy.random.default_rng(0).standard_normal(131_072), []
for _ in range(50):
    copy, start = values.copy(), time.perf_counter()
    copy.sort()
    times.append(time.perf_counter() - start)
print(numpy.median(times))
"""


def results() -> list[Result]:
    return [against_scipy(), by_dtype(), by_instructions()]


def against_scipy() -> Result:
    """4 million FP64 values, equal to 1e-12. Where NumPy sorts by AVX2, 50 times is out of a sort's reach."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4_000_000, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = x.numpy(), y.numpy()
    if abs(wasserstein(x, y) - wasserstein_distance(a, b)) > 1e-12:
        raise AssertionError("the two distances differ")
    name, least = "Wasserstein against scipy, 4 million values", 35.0 if processor.sorts_wide_slowly_here() else 50.0
    return paired(name, lambda: wasserstein(x, y), lambda: wasserstein_distance(a, b), at_least=least, runs=5)


def by_dtype() -> Result:
    """An FP32 output sorted in FP32, and in FP64 as before: 1,024 tokens of 128 dimensions."""
    x, threads = torch.randn(131_072, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    name = "an output of FP32 numbers sorted in FP32 against FP64"
    torch.set_num_threads(1)  # or two of them waiting for each other hide the sort
    try:
        return paired(name, lambda: ascending(x), lambda: ascending(x.double()), at_least=1.3, runs=25)
    finally:
        torch.set_num_threads(threads)


def by_instructions() -> Result:
    """NumPy's sort by the instructions that numdev lets it take on this processor, against those that it does not choose."""
    names = "", processor.wide_here()
    chosen, other = reversed(names) if processor.sorts_wide_slowly_here() else names
    pairs = [(_sorting(chosen), _sorting(other)) for _ in range(5)]
    ratio = statistics.median(b / a for a, b in pairs)
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Result("NumPy's sort by the instructions chosen against the others", mine, theirs, ratio, ">= 1x faster", ratio >= 1)


def _sorting(left_out: str) -> float:
    """Seconds of a sort by a NumPy that does not take these instructions."""
    environment = {**os.environ, processor.VARIABLE: left_out}
    done = subprocess.run([sys.executable, "-c", SORT], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)
