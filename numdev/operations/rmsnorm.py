"""RMSNorm (Zhang & Sennrich 2019), `y = x / sqrt(mean(x^2) + eps) w`, and the root `rms` of each row.

A fused kernel sums the squares of a row in FP32 and rounds y once; three tensor operations round after each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from numdev.arithmetic.elementary import Operation as Elementary
from numdev.arithmetic.formats import FP64, Format
from numdev.arithmetic.products import Dot
from numdev.arithmetic.rounding import Cast
from numdev.errors import BadInput
from numdev.measurement.operation import Inputs, Operation, Output, Result
from numdev.operations.base import Compiled, Emulated, Entries, InDtype, Seeded, Steps, columns, jit, power_of_two
from numdev.settings import held, setting

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class Problem(Seeded):
    """x `[rows, hidden]` and w `[hidden]`, uniform in [0.5, 1.5)."""

    rows: int = setting(256, "rows of x", "count")
    hidden: int = setting(1024, "entries of a row", "count")
    eps: float = setting(1e-6, "what is added to the mean of the squares")
    kind: Entries = setting(Entries.NORMAL, "entries of x: normal, uniform in [0, 1), or normal with outliers")

    @property
    def largest(self) -> int:
        return self.rows * self.hidden

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        x = self.kind.draw(generator, self.rows, self.hidden)
        return {"x": x, "w": 0.5 + Entries.UNIFORM.draw(generator, self.hidden)}

    def arguments(self) -> dict[str, float]:
        return {"eps": self.eps}

    def naive(self, fmt: Format) -> Eager:
        return Eager(fmt)


@dataclass(frozen=True, repr=False)
class Policy(Steps):
    """One Cast or Dot for each step (Zhang & Sennrich 2019, equation 4)."""

    inputs: Cast = setting(None, "x and w as the algorithm receives them", "format")
    square: Cast = setting(None, "x^2", "format")
    sum: Dot = setting(None, "the running sum of the squares", "format")
    mean: Cast = setting(None, "the sum over n, then + eps", "format")
    rsqrt: Cast = setting(None, "1 / sqrt(mean), from that of FP64, which is off by at most an ulp of FP64", "format")
    normalise: Cast = setting(None, "x r", "format")
    weigh: Cast = setting(None, "x r w", "format")
    output: Cast = setting(None, "y as it is returned", "format")


@dataclass(frozen=True)
class Blocked(Emulated):
    """Squares are summed in blocks of columns, in FP64, before the running sum is rounded; each step under a policy."""

    precision: Policy = held(follows="precision")
    block: int = setting(256, "columns whose squares are summed before the running sum is rounded", "count")

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadInput("variant.block", self.block, "give the number of columns, at least 1")

    @property
    def formats(self) -> dict[str, Format]:
        return {"y": self.precision.format, "rms": self.precision.rsqrt.to}

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Result:
        policy, n = self.precision, x.shape[-1]
        squares = policy.do(Elementary.MULTIPLY, "square", x, x)
        total = policy.sum.sum(squares[..., : self.block])
        for start in range(self.block, n, self.block):
            total = policy.do(Elementary.ADD, "sum", total, policy.sum.sum(squares[..., start : start + self.block]))
        mean = policy.do(Elementary.ADD, "mean", policy.do(Elementary.DIVIDE, "mean", total, float(n)), eps)
        r = policy.rsqrt(mean.rsqrt())
        y = policy.do(Elementary.MULTIPLY, "weigh", policy.do(Elementary.MULTIPLY, "normalise", x, r), w)
        return Result({"y": policy.output(y), "rms": 1 / r})


@dataclass(frozen=True)
class Eager(InDtype):
    """Tensor operations of torch, each in the format, as a model runs that is not fused; golden is that in FP64."""

    OUTPUTS = ("y", "rms")

    upcast: bool = setting(False, "whether x / rms is computed in FP32 and rounded before it is weighed, as models do")

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Result:
        x, w = x.to(torch.float32 if self.upcast else self.dtype), w.to(self.dtype)
        rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return Result({"y": (x / rms).to(self.dtype) * w, "rms": rms.to(self.dtype)})


class Torch(InDtype):
    """`torch.nn.functional.rms_norm`; it returns no root."""

    OUTPUTS = ("y",)

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Result:
        return Result({"y": torch.nn.functional.rms_norm(x, w.shape, w, eps)}, kernel="torch rms_norm")


@jit
def _rmsnorm(
    x_ptr: tl.tensor, w_ptr: tl.tensor, y_ptr: tl.tensor, rms_ptr: tl.tensor, n: tl.tensor, eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
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
class Triton(Compiled):
    """A Triton kernel, FP32 inside; one program for each row."""

    OUTPUTS = ("y", "rms")
    WIDE = ("rms",)

    block: int = setting(1024, "columns that a program loads at once, a power of two", "count")

    def __post_init__(self) -> None:
        super().__post_init__()
        power_of_two("block", self.block)

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Result:
        y, rms = torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=torch.float32)
        _rmsnorm(x)[(x.shape[0],)](x, w, y, rms, x.shape[-1], eps, self.block)
        return Result({"y": self.stored(y), "rms": rms}, kernel=f"triton rmsnorm block={self.block}")


RMSNORM = Operation(
    name="rmsnorm",
    golden=Eager(FP64),
    inputs=(Inputs(("x", "w")),),
    outputs=(Output("y", "the normalised row, weighed"), Output("rms", "root of the mean of the squares of a row")),
    rows={"x": 0, "y": 0, "rms": 0},
    steps=tuple(field.name for field in fields(Policy)),
    settings=columns(Problem, Policy, Blocked, Eager, Triton),
    smaller="fewer rows or hidden entries",
)
