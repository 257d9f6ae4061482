"""Finding launch settings of the portable kernel: every candidate is checked, then timed, and the fastest is pinned."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from numdev.attention.exact import Exact
from numdev.attention.triton import Triton
from numdev.formats import FP32, Format
from numdev.kernels import portable
from numdev.kernels.launch import Launch, mask_name
from numdev.kernels.runtime import generation
from numdev.mask import Mask
from numdev.tiling import Tiling

_TOKENS, _WIDTH = 8192, 2048


# Br, Bc, warps, stages. FP32 operands take twice the room.
_WIDE = (
    (64, 32, 4, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
    (128, 64, 4, 2),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
)
_NARROW = ((32, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2))


def candidates(fmt: Format) -> list[Launch]:
    """What is tried."""
    return [Launch(*sizes) for sizes in (_NARROW if fmt == FP32 else _WIDE)]


def tune(fmt: Format, head_dim: int, mask: Mask, n: int, progress: Callable[[str], None]) -> tuple[dict[str, Any], int]:
    """The best entry for one row of the table, and how many candidates could not be launched."""
    attend = Triton(fmt)
    best: tuple[float, Launch] | None = None
    failed = 0
    for launch in candidates(fmt):
        progress(f"{fmt} d={head_dim} {mask_name(mask)} {launch.br}x{launch.bc}")
        tiling = Tiling(launch.br, launch.bc)
        request = portable.Request(attend.precision, tiling, attend.softmax, warps=launch.warps, stages=launch.stages)
        try:
            _check(attend, request, head_dim, mask)
            seconds = _seconds(attend, request, head_dim, mask, n)
        except Exception:  # of the compiler or the driver: too much shared memory, too many registers
            failed += 1
            continue
        if best is None or seconds < best[0]:
            best = seconds, launch
    if best is None:
        raise RuntimeError(f"no candidate could be launched for {fmt}, head_dim {head_dim}")
    found = {"format": fmt.name, "head_dim": head_dim, "mask": mask_name(mask), "generation": generation(torch.device("cuda"))}
    return found | vars(best[1]), failed


def _inputs(attend: Triton, heads: int, n: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    drawn = (torch.randn(1, heads, n, head_dim, device="cuda", dtype=torch.float64) for _ in range(3))
    q, k, v = (t.to(attend.fmt.dtype) for t in attend.round_inputs(*drawn))
    return q, k, v


def _check(attend: Triton, request: portable.Request, head_dim: int, mask: Mask) -> None:
    """Raises ArithmeticError if a candidate does not compute attention: a guard against the compiler, not a test."""
    q, k, v = _inputs(attend, 2, 300, head_dim)
    out, _ = portable.run(request, q, k, v, mask, head_dim**-0.5)
    golden = Exact()(q, k, v, mask).out
    if not float((out.double() - golden).norm() / golden.norm()) < 4 * attend.fmt.u + 1e-5:
        raise ArithmeticError("the result is not attention")


def _seconds(attend: Triton, request: portable.Request, head_dim: int, mask: Mask, n: int) -> float:
    q, k, v = _inputs(attend, _WIDTH // head_dim * max(1, _TOKENS // n), n, head_dim)
    out = attend.format.dtype or torch.float32
    return statistics.median(_times(lambda: portable.run(request, q, k, v, mask, head_dim**-0.5, out)))


def _times(run: Callable[[], object], repetitions: int = 12) -> Iterator[float]:
    for _ in range(3):
        run()
    for _ in range(repetitions):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        yield start.elapsed_time(stop) / 1e3
