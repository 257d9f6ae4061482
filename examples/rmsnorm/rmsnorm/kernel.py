"""RMSNorm as one Triton kernel: FP32 inside, one program for each row."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from numdev import BadInput, Format, Unsupported
from numdev.arithmetic.formats import FP32
from numdev.measurement.operation import Result
from rmsnorm.operation import InDtype


@triton.jit
def rmsnorm(x_ptr, w_ptr, y_ptr, rms_ptr, n, eps, BLOCK: tl.constexpr):
    """Row `program_id(0)`: the sum of squares over blocks of columns, then the row once more."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)  # [BLOCK] partial sums
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + columns, mask=columns < n, other=0.0).to(tl.float32)
        total += x * x
    rms = tl.sqrt_rn(tl.sum(total, 0) / n + eps)
    tl.store(rms_ptr + row, rms)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + columns, mask=columns < n, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n + columns, (x / rms * w).to(y_ptr.dtype.element_ty), mask=columns < n)


@dataclass(frozen=True)
class Fused(InDtype):
    """The kernel on inputs in a format; a program loads `block` columns at once, a power of two."""

    FORMATS = InDtype.FORMATS[1:]

    block: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 16 or self.block & (self.block - 1):
            raise BadInput("norm.block", self.block, "give a power of two of at least 16")

    @property
    def formats(self) -> dict[str, Format]:
        return {"y": self.format, "rms": FP32}

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Result:
        if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise Unsupported("variant", "Triton kernels need a CUDA device, or TRITON_INTERPRET=1 to interpret them")
        y, rms = torch.empty_like(x), torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        rmsnorm[(x.shape[0],)](x, w, y, rms, x.shape[-1], eps, self.block)
        return Result({"y": y, "rms": rms}, kernel=f"rmsnorm block={self.block}")
