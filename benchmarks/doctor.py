"""Cost of the doctor: a training step whose batch comes from `nd.doctor`, against the step without.

On a GPU, for which the limits are meant, a step of the full text-to-image model in BF16, launched kernel by kernel; on a CPU one
of a small transformer. Checkpoints are not in it. `python benchmarks/run.py doctor`
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import repeat
from statistics import median

import torch
from torch import Tensor, nn

import numdev as nd
from benchmarks.interception import training_step
from benchmarks.timing import Result
from numdev.arithmetic.formats import BF16
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.training.attend import CallCounts
from numdev.training.run import Run, State
from numdev.training.rung import Numerics, Rung
from numdev.training.tasks import TextToImage

_STEPS = 20
_RUNS = 15
_LIMITS = {"every step, all heads": 3.0, "every 10th step, one head of each layer in turn": 1.1}


def results() -> list[Result]:
    every, sampled = _LIMITS
    return [watched(every, every=1, heads=None), watched(sampled, every=10, heads=1)]


def _training_step() -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model and its step, which returns the loss; on a GPU attention is what torch chooses."""
    if not torch.cuda.is_available():
        return training_step()
    device, task = torch.device("cuda"), TextToImage.full()
    state = State(Run(task, Rung(VanillaBackward(BF16), Numerics.BF16)), device, CallCounts())
    batch = {name: x.to(device) for name, x in task.batch_of(0, 0).items()}
    state.rate.fill_(task.rate_at(0))
    return state.model, lambda: state.update(batch)[0]


def watched(name: str, every: int, heads: int | None) -> Result:
    """Seconds of a step with and without; the ratio is the median of those of runs one after the other."""
    model, step = _training_step()
    mine, theirs = list[float](), list[float]()
    for _ in range(_RUNS):
        with tempfile.TemporaryDirectory() as folder:
            last = _STEPS + 1
            batches = nd.doctor(model, repeat(0), steps=last + 1, folder=folder, checkpoint=last + 1, every=every, heads=heads)
            for number, _ in enumerate(batches):
                if number == 1:  # the first step comes after a checkpoint
                    start = time.perf_counter()
                if number == last:  # what the step before looked at has been reduced
                    mine.append(time.perf_counter() - start)
                batches.note(step())
        start = time.perf_counter()
        for _ in range(_STEPS):
            float(step())
        theirs.append(time.perf_counter() - start)
    ratio, limit = median(a / b for a, b in zip(mine, theirs, strict=True)), _LIMITS[name]
    seconds = min(mine) / _STEPS, min(theirs) / _STEPS
    return Result(f"a training step under the doctor, {name}", *seconds, ratio, f"<= {limit:g}x", ratio <= limit)
