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
from numdev.attention.kernels.launch import Launch, device_of, mask_name
from numdev.attention.mask import Mask
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.attention.triton import Triton
from numdev.errors import Unsupported
from numdev.measurement.speed import Budget, timed

_TOKENS, _WIDTH = 8192, 2048
_BUDGET = Budget(0.1, 12, 50)
_WIDE = (
    *(Launch(64, 32, 4, 3), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3), Launch(64, 64, 8, 2), Launch(64, 128, 4, 2)),
    *(Launch(128, 64, 4, 2), Launch(128, 64, 8, 2), Launch(128, 64, 8, 3), Launch(128, 128, 8, 2)),
)
# FP32 operands take twice the room.
_NARROW = (Launch(32, 32, 4, 2), Launch(64, 32, 4, 2), Launch(64, 32, 8, 2), Launch(64, 64, 4, 2), Launch(128, 32, 8, 2))


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
    device, seconds = torch.device("cuda"), {}
    unlaunched = wrong = 0
    for launch in _NARROW if fmt == FP32 else _WIDE:
        progress(f"{fmt} d={head_dim} {mask_name(mask)} {launch.br}x{launch.bc}")
        candidate = Candidate(Triton(fmt), launch, head_dim, mask, device)
        try:
            if candidate.is_right():
                seconds[launch] = candidate.seconds(n)
            else:
                wrong += 1
        except Exception:  # of the compiler or the driver
            unlaunched += 1
    if not seconds:
        tried = f"{unlaunched} could not be launched, {wrong} were wrong"
        raise Unsupported("head_dims", f"no candidate works for {fmt}, head_dim {head_dim}: {tried}")
    place = {"format": fmt.name, "head_dim": head_dim, "mask": mask_name(mask), "generation": device_of(device).generation}
    return Tuned(place | vars(min(seconds, key=seconds.__getitem__)), unlaunched, wrong)


@dataclass(frozen=True)
class Candidate:
    """A launch of a kernel."""

    attend: Triton
    launch: Launch
    head_dim: int
    mask: Mask
    device: torch.device

    def is_right(self) -> bool:
        """Whether the error is at most four times, in norm, that of the emulation with the same tile.

        Both round in the same places. What is left is FP32's: other orders of its sums, and an exponential within 2 ulp on a GPU
        (CUDA C++ programming guide, intrinsic functions) where torch's is within half of one or little more.
        """
        q, k, v = self._inputs(2, 200)
        golden, tiled = Exact(), Tiled(self.attend.precision, self._tiling, self.attend.softmax, count=False)
        exact, emulated = (attention(q, k, v, self.mask).out.double() for attention in (golden, tiled))
        return bool((self._call(q, k, v)().double() - exact).norm() <= 4 * (emulated - exact).norm())

    def seconds(self, n: int) -> float:
        """Of one launch."""
        inputs = self._inputs(_WIDTH // self.head_dim * max(1, _TOKENS // n), n)
        return timed(self._call(*inputs), self.device, _BUDGET).latency

    @property
    def _tiling(self) -> Tiling:
        return Tiling(self.launch.br, self.launch.bc)

    def _inputs(self, heads: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        drawn = (torch.randn(1, heads, n, self.head_dim, device=self.device, dtype=torch.float64) for _ in range(3))
        q, k, v = (x.to(self.attend.storage) for x in self.attend.round_inputs(*drawn))
        return q, k, v

    def _call(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        warps, stages = self.launch.warps, self.launch.stages
        request = portable.Request(self.attend.precision, self._tiling, self.attend.softmax, warps=warps, stages=stages)
        return lambda: portable.run(request, q, k, v, self.mask, self.head_dim**-0.5)[0]
