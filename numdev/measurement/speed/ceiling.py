"""The operations per second of a matrix product on this machine: the ceiling with which an implementation is compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from numdev.measurement.speed.timing import Budget, timed

_GPU_SIDE, _CPU_SIDE = 8192, 512  # on a CPU some formats are multiplied a thousand times more slowly than FP32
_BUDGET = Budget(seconds=0.2, least=3, most=50)


@lru_cache(maxsize=16)
def matmul_flops(dtype: torch.dtype, device: torch.device, tf32: bool = False) -> float:
    """Operations per second of `torch.matmul` on square matrices, 2 n^3 over the median time; once per process.

    FP32 is IEEE FP32 unless `tf32`. Formats of 8 bits are compared with FP16, since kernels without a product in 8 bits convert
    their operands to it.
    """
    if dtype.itemsize == 1:
        dtype = torch.float16
    side = _GPU_SIDE if device.type == "cuda" else _CPU_SIDE
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    with _products("high" if tf32 else "highest"):
        return 2 * side**3 / timed(lambda: torch.matmul(a, b), device, _BUDGET).latency


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Sets the precision of torch's FP32 products, and restores the previous one."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
