"""RMSNorm as one Triton kernel: FP32 inside, one program for each row."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from numdev import BadInput, Format, Unsupported
from numdev.arithmetic.formats import FP32
from rmsnorm.policy import Policy
from rmsnorm.variants import DTYPES, Output


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
class Fused:
    """The kernel on inputs in a format.

    Attributes:
        format: of inputs and output.
        block: columns that a program loads at once, a power of two.
    """

    format: str = "fp16"
    block: int = 1024

    def __post_init__(self) -> None:
        if self.format not in DTYPES:
            raise BadInput("norm.format", self.format, f"give one of {', '.join(DTYPES)}")
        if self.block < 16 or self.block & (self.block - 1):
            raise BadInput("norm.block", self.block, "give a power of two of at least 16")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.format]

    @property
    def formats(self) -> Mapping[str, Format]:
        return {"y": Format.parse(self.format), "rms": FP32}

    @property
    def input_key(self) -> Hashable:
        return self.format

    def round_inputs(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rounded = Policy.uniform(Format.parse(self.format)).round_inputs(x, w)
        return rounded[0].to(self.dtype), rounded[1].to(self.dtype)

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Output:
        if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise Unsupported("variant", "Triton kernels need a CUDA device, or TRITON_INTERPRET=1 to interpret them")
        y, rms = torch.empty_like(x), torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        rmsnorm[(x.shape[0],)](x, w, y, rms, x.shape[-1], eps, self.block)
        return Output(y, rms, kernel=f"rmsnorm block={self.block}")
