"""The memory that one call takes beyond its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import profile

from numdev.profiler import profiler


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a call has allocated at one time, its results among them, as torch's allocator counts them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del kept
        return peak
    with profiler(device, profile_memory=True) as watched:
        kept = run()
    del kept
    return _highest(watched)


def _highest(watched: profile) -> int:
    """The highest sum of allocations and releases, in the order of time, that the profiler recorded."""
    assert watched.profiler is not None
    results: Any = watched.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    held = highest = 0
    for _, change in changes:
        held += change
        highest = max(highest, held)
    return highest
