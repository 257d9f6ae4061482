"""RMSNorm, `y = x / sqrt(mean(x^2) + eps) w`: its problem, its policy, its implementations, and what a measurement must know."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from numdev import BadInput, Cast, Dot, Format
from numdev.arithmetic.elementary import Operation as Elementary
from numdev.arithmetic.elementary import RoundedOnce
from numdev.arithmetic.formats import BF16, FP16, FP32, FP64
from numdev.attention.precision import Policy as Steps
from numdev.measurement.operation import Draws, Inputs, Operation, Output, Result, RoundsInputs
from numdev.settings import setting


class Kind(Enum):
    """How the entries of x are distributed: normal, or one in a thousand enlarged a hundred times, as activations have them."""

    NORMAL = "normal"
    OUTLIERS = "outliers"


@dataclass(frozen=True)
class Problem(Draws):
    """x `[rows, hidden]` and w `[hidden]` from a seed; `eps` is added to the mean of the squares."""

    rows: int = 256
    hidden: int = 1024
    eps: float = 1e-6
    kind: Kind = Kind.NORMAL

    def __post_init__(self) -> None:
        for name in ("rows", "hidden"):
            if getattr(self, name) < 1:
                raise BadInput(f"problem.{name}", getattr(self, name), "give a whole number of at least 1")

    def inputs(self, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """`x` and `w` in FP64, drawn on the CPU: the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, self.hidden, generator=generator, dtype=torch.float64)
        if self.kind is Kind.OUTLIERS:
            chosen = torch.rand(self.rows, self.hidden, generator=generator, dtype=torch.float64) < 1e-3
            x = torch.where(chosen, 100 * x, x)
        w = 0.5 + torch.rand(self.hidden, generator=generator, dtype=torch.float64)
        return {"x": x.to(device), "w": w.to(device)}

    def arguments(self) -> dict[str, float]:
        return {"eps": self.eps}

    @property
    def bytes(self) -> int:
        """About what a measurement holds at once, in FP64."""
        return 8 * 12 * self.rows * self.hidden


@dataclass(frozen=True, repr=False)
class Policy(Steps):
    """One Cast or Dot for each step (Zhang & Sennrich 2019, equation 4); a `kernel` stores inputs and output in its format."""

    WIDE = ()
    STORED = ("inputs", "output")

    inputs: Cast = setting(None, "x and w as the algorithm receives them", "format")
    square: Cast = setting(None, "x^2", "format")
    sum: Dot = setting(None, "the running sum of the squares", "format")
    mean: Cast = setting(None, "the sum over n, then + eps", "format")
    rsqrt: Cast = setting(None, "1 / sqrt(mean), from that of FP64, which is off by at most an ulp of FP64", "format")
    normalise: Cast = setting(None, "x r", "format")
    weigh: Cast = setting(None, "x r w", "format")
    output: Cast = setting(None, "y as it is returned", "format")

    def do(self, kind: Elementary, step: str, x: Tensor, y: Tensor | float) -> Tensor:
        """An operation on FP64 numbers, rounded once to the format of a step."""
        second = y.expand_as(x) if isinstance(y, Tensor) else torch.full_like(x, y)
        cast = getattr(self, step)
        return RoundedOnce(kind, cast, FP64, FP64, torch.float64)(x.clone(), second)


@dataclass(frozen=True)
class Blocked(RoundsInputs):
    """Squares are summed in blocks of so many columns, in the carrier, before the running sum is rounded; all under a policy."""

    policy: Policy
    block: int = 256

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadInput("norm.block", self.block, "give the number of columns, at least 1")

    @property
    def rounds(self) -> Cast:
        return self.policy.inputs

    @property
    def formats(self) -> dict[str, Format]:
        return {"y": self.policy.format, "rms": self.policy.rsqrt.to}

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Result:
        policy, n = self.policy, x.shape[-1]
        squares = policy.do(Elementary.MULTIPLY, "square", x, x)
        total = torch.zeros_like(squares[..., :1])
        for start in range(0, n, self.block):
            part = policy.sum.sum(squares[..., start : start + self.block])
            total = policy.sum.accumulate(total + part)
        mean = policy.do(Elementary.ADD, "mean", policy.do(Elementary.DIVIDE, "mean", total, float(n)), eps)
        r = policy.rsqrt(mean.rsqrt())
        y = policy.do(Elementary.MULTIPLY, "weigh", policy.do(Elementary.MULTIPLY, "normalise", x, r), w)
        return Result({"y": policy.output(y), "rms": 1 / r})


@dataclass(frozen=True)
class InDtype(RoundsInputs):
    """The base of what computes on tensors of a dtype of torch."""

    FORMATS = (FP64, FP32, BF16, FP16)

    format: Format = BF16

    def __post_init__(self) -> None:
        if self.format not in self.FORMATS:
            raise BadInput("norm.format", self.format.name, f"give one of {', '.join(fmt.name for fmt in self.FORMATS)}")

    @property
    def rounds(self) -> Cast:
        return Cast(self.format)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        assert self.format.dtype is not None
        return self.format.dtype

    @property
    def formats(self) -> dict[str, Format]:
        return {"y": self.format, "rms": self.format}


class Eager(InDtype):
    """Three tensor operations in the dtype itself, what a model that is not fused runs; golden is that in FP64."""

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Result:
        x, w = x.to(self.dtype), w.to(self.dtype)
        rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return Result({"y": x / rms * w, "rms": rms})


@dataclass(frozen=True)
class InItsFormat:
    """The baseline of a variant: eager, in the format of the variant's `y`; in FP32 where torch has none of that format."""

    def of(self, variant: Any, problem: Problem) -> Eager:
        """The baseline of a variant on a problem."""
        fmt = variant.formats["y"]
        return Eager(fmt if fmt in (BF16, FP16) else FP32)


RMSNORM = Operation(
    name="rmsnorm",
    golden=Eager(FP64),
    inputs=(Inputs(("x", "w")),),
    outputs=(Output("y", "the normalised row, weighed"), Output("rms", "root of the mean of the squares of a row")),
    steps=tuple(field.name for field in fields(Policy)),
    smaller="fewer rows or hidden entries",
)
