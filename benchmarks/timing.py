"""Timing two things in turn, so that a drift of the machine's speed leaves their ratio alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One line of the table. `ratio` is the median of the ratios of neighbouring runs."""

    name: str
    seconds: float
    other: float
    ratio: float
    target: str
    met: bool


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def warm_seconds(action: Callable[[], object]) -> float:
    action()
    return seconds(action)


def median_seconds(action: Callable[[], object], runs: int = 7) -> float:
    action()
    return statistics.median(seconds(action) for _ in range(runs))


def paired(
    name: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    runs: int = 7,
) -> Result:
    """Run both in turn, each once more before it is timed, since the other has had the caches.

    `at_least` bounds theirs / ours (a speed-up), `at_most` bounds ours / theirs (a cost).
    """
    pairs = [(warm_seconds(ours), warm_seconds(theirs)) for _ in range(runs)]
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    if at_least is not None:
        ratio = statistics.median(b / a for a, b in pairs)
        return Result(name, mine, other, ratio, f">= {at_least:g}x faster", ratio >= at_least)
    ratio = statistics.median(a / b for a, b in pairs)
    limit = float("inf") if at_most is None else at_most
    return Result(name, mine, other, ratio, f"<= {limit:g}x the time", ratio <= limit)


def bounded(name: str, measured: float, limit: float) -> Result:
    """A time with an absolute limit."""
    return Result(name, measured, limit, measured / limit, f"<= {limit:g} s", measured <= limit)
