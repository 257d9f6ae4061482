"""Finding launch settings of the portable kernel: every candidate is checked, then timed, and the fastest is pinned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.exact import Exact
from numdev.attention.kernels import portable
from numdev.attention.kernels.launch import Launch, mask_name
from numdev.attention.kernels.runtime import generation, held_dtype
from numdev.attention.mask import Mask
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.attention.triton import Triton
from numdev.errors import Unsupported
from numdev.measurement.speed.timing import Budget, timed

_TOKENS, _WIDTH = 8192, 2048
_BUDGET = Budget(0.1, 12, 50)


# Br, Bc, warps, stages. FP32 operands take twice the room.
_WIDE = (
    (64, 32, 4, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 64, 8, 2),
    (64, 128, 4, 2),
    (128, 64, 4, 2),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
)
_NARROW = ((32, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2))


def candidates(fmt: Format) -> list[Launch]:
    """The launches that are tried."""
    return [Launch(*sizes) for sizes in (_NARROW if fmt == FP32 else _WIDE)]


@dataclass(frozen=True)
class Tuned:
    """The best entry for one row of the table, and how many candidates could not be used.

    Attributes:
        entry: of the table.
        unlaunched: candidates that the compiler or the driver refused: too much shared memory, too many registers.
        wrong: candidates whose result was wrong.
    """

    entry: dict[str, Any]
    unlaunched: int
    wrong: int


def tune(fmt: Format, head_dim: int, mask: Mask, n: int, progress: Callable[[str], None]) -> Tuned:
    """Check and time every candidate.

    Raises:
        Unsupported: if none can be launched and is right.
    """
    attend, device = Triton(fmt), torch.device("cuda")
    best: tuple[float, Launch] | None = None
    unlaunched = wrong = 0
    for launch in candidates(fmt):
        progress(f"{fmt} d={head_dim} {mask_name(mask)} {launch.br}x{launch.bc}")
        try:
            if not is_right(attend, launch, head_dim, mask, device):
                wrong += 1
                continue
            seconds = _seconds(attend, launch, head_dim, mask, n, device)
        except Exception:  # of the compiler or the driver
            unlaunched += 1
            continue
        if best is None or seconds < best[0]:
            best = seconds, launch
    if best is None:
        tried = f"{unlaunched} could not be launched, {wrong} were wrong"
        raise Unsupported("head_dims", f"no candidate works for {fmt}, head_dim {head_dim}: {tried}")
    row = {"format": fmt.name, "head_dim": head_dim, "mask": mask_name(mask), "generation": generation(device)}
    return Tuned(row | vars(best[1]), unlaunched, wrong)


def _request(attend: Triton, launch: Launch) -> portable.Request:
    tiling = Tiling(launch.br, launch.bc)
    return portable.Request(attend.precision, tiling, attend.softmax, warps=launch.warps, stages=launch.stages)


def _inputs(attend: Triton, heads: int, n: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    drawn = (torch.randn(1, heads, n, head_dim, device=device, dtype=torch.float64) for _ in range(3))
    q, k, v = (t.to(attend.storage) for t in attend.round_inputs(*drawn))
    return q, k, v


def is_right(attend: Triton, launch: Launch, head_dim: int, mask: Mask, device: torch.device) -> bool:
    """Whether the error of a candidate is at most four times, in norm, that of the emulation with its tile.

    Both round in the same places. What is left is FP32's: other orders of its sums, and an exponential within 2 ulp on a GPU
    (CUDA C++ programming guide, intrinsic functions) where torch's is within half of one or little more.
    """
    q, k, v = _inputs(attend, 2, 300, head_dim, device)
    out, _ = portable.run(_request(attend, launch), q, k, v, mask, head_dim**-0.5, held_dtype(attend.format))
    golden = Exact()(q, k, v, mask).out
    emulated = Tiled(attend.precision, Tiling(launch.br, launch.bc), attend.softmax, count=False)(q, k, v, mask).out
    return bool((out.double() - golden).norm() <= 4 * (emulated.double() - golden).norm())


def _seconds(attend: Triton, launch: Launch, head_dim: int, mask: Mask, n: int, device: torch.device) -> float:
    q, k, v = _inputs(attend, _WIDTH // head_dim * max(1, _TOKENS // n), n, head_dim, device)
    request, out = _request(attend, launch), held_dtype(attend.format)
    return timed(lambda: portable.run(request, q, k, v, mask, head_dim**-0.5, out), device, _BUDGET).latency
