"""Makes the calls whose traffic Nsight Compute counts; `numdev.measurement.speed.traffic` starts it.

Run: `python -m numdev.measurement.speed.counted FILE`. The file holds a list of points. Each is pickled by itself, so that a
point that cannot be loaded does not affect the others.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from numdev.measurement.operation import Operation
from numdev.measurement.speed import nsight
from numdev.measurement.speed.measurement import bound, prepared
from numdev.measurement.speed.timing import FLUSH_BYTES

_SEED = 0  # traffic does not depend on the numbers


def main(file: Path, device: torch.device) -> None:
    """Makes one call of each point within its range. If a point fails, prints the reason and continues."""
    buffer = torch.zeros(FLUSH_BYTES, dtype=torch.int8, device=device)
    for number, packed in enumerate(pickle.loads(file.read_bytes())):
        operation: Operation | None = None
        try:
            operation, problem, variant = pickle.loads(packed)
            with operation.workload.counting():  # torch's profiler and ncu cannot both have the GPU
                count(number, Call(operation, problem, variant), buffer)
        except Exception as error:
            print(nsight.remark(number, f"{type(error).__name__}: {error}"[:200]), file=sys.stderr, flush=True)
        finally:
            if operation is not None:
                operation.workload.forget()


class Call(NamedTuple):
    """What is counted."""

    operation: Operation
    problem: Any
    variant: Any


def count(number: int, call: Call, buffer: Tensor) -> None:
    """Calls the variant once within range `number`, with none of its inputs in the second-level cache.

    Reading the buffer fills the cache. Writing it would not do: the GPU would write those lines to memory during the call, and
    the counters would add them to the call's own.
    """
    run = bound(*call, prepared(*call, _SEED, buffer.device))
    run()  # compiles
    buffer.sum()
    torch.cuda.synchronize(buffer.device)
    with _counting(number):
        run()
        torch.cuda.synchronize(buffer.device)


@contextmanager
def _counting(number: int) -> Iterator[None]:
    runtime: Any = torch.cuda.cudart()
    torch.cuda.nvtx.range_push(nsight.range_name(number))
    runtime.cudaProfilerStart()
    try:
        yield
    finally:
        runtime.cudaProfilerStop()
        torch.cuda.nvtx.range_pop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device("cuda"))
