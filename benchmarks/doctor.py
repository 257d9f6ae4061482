"""Cost of the doctor: a training step whose batch comes from `nd.doctor`, against the step without.

The limits are meant for a GPU, on which this has not run yet; checkpoints are not in it. `python benchmarks/run.py doctor`
"""

from __future__ import annotations

import tempfile
import time
from itertools import repeat

import numdev as nd
from benchmarks.interception import training_step
from benchmarks.timing import Result

_STEPS = 40
_LIMITS = {"every step, all heads": 3.0, "every 10th step, one head of each layer in turn": 1.1}


def results() -> list[Result]:
    every, sampled = _LIMITS
    return [watched(every, every=1, heads=None), watched(sampled, every=10, heads=1)]


def watched(name: str, every: int, heads: int | None) -> Result:
    """Seconds of a step: the fastest of three runs of as many steps with and without."""
    model, step = training_step()
    mine, theirs = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            batches = nd.doctor(
                model, repeat(0), steps=_STEPS + 1, folder=folder, checkpoint=_STEPS + 1, every=every, heads=heads
            )
            for number, _ in enumerate(batches):
                if number == 1:  # the first step comes after a checkpoint
                    start = time.perf_counter()
                batches.note(step())
                if number == _STEPS:
                    mine.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(_STEPS):
            float(step())
        theirs.append(time.perf_counter() - start)
    ratio = min(mine) / min(theirs)
    limit = _LIMITS[name]
    return Result(
        f"a training step under the doctor, {name}",
        min(mine) / _STEPS,
        min(theirs) / _STEPS,
        ratio,
        f"<= {limit:g}x",
        ratio <= limit,
    )
