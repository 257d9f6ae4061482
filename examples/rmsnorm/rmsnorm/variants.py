"""RMSNorm exactly, as tensor operations, and in blocks under a policy."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from numdev import BadInput, Format
from numdev.arithmetic.formats import FP64
from rmsnorm.policy import Policy
from rmsnorm.problem import Problem

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The formats that torch computes in."""


@dataclass(frozen=True)
class Output:
    """`y` `[rows, hidden]`, `rms` `[rows, 1]`, and what a run counted of itself."""

    y: Tensor
    rms: Tensor
    counters: dict[str, float] = field(default_factory=dict)
    kernel: str = ""

    def tensors(self) -> dict[str, Tensor]:
        """The outputs by name, the primary one first."""
        return {"y": self.y, "rms": self.rms}


@dataclass(frozen=True)
class Golden:
    """Exact to FP64: `y = x / sqrt(mean(x^2) + eps) w`."""

    @property
    def formats(self) -> Mapping[str, Format]:
        return {"y": FP64, "rms": FP64}

    @property
    def input_key(self) -> Hashable:
        return "golden"

    def round_inputs(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.double(), w.double()

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Output:
        x, w = x.double(), w.double()
        rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return Output(x / rms * w, rms)


@dataclass(frozen=True)
class Blocked:
    """RMSNorm over blocks of columns: squares are summed block by block, every step in the format of its policy.

    Attributes:
        policy: the format of each step.
        block: columns whose squares are added in the carrier before the running sum is rounded.
    """

    policy: Policy
    block: int = 256

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadInput("norm.block", self.block, "give the number of columns, at least 1")

    @property
    def formats(self) -> Mapping[str, Format]:
        return {"y": self.policy.format, "rms": self.policy.rsqrt.to}

    @property
    def input_key(self) -> Hashable:
        return self.policy.inputs

    def round_inputs(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy.round_inputs(x, w)

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Output:
        policy, n = self.policy, x.shape[-1]
        squares = policy.times("square", x, x)
        total = torch.zeros_like(squares[..., :1])
        for start in range(0, n, self.block):
            part = policy.sum.sum(squares[..., start : start + self.block])
            total = policy.sum.accumulate(total + part)
        mean = policy.over("mean", total, torch.full_like(total, float(n)))
        mean = policy.plus("mean", mean, torch.full_like(mean, eps))
        r = policy.rsqrt(mean.rsqrt())
        y = policy.times("weigh", policy.times("normalise", x, r), w)
        return Output(policy.output(y), 1 / r)


@dataclass(frozen=True)
class Eager:
    """Three tensor operations of torch in a dtype: what a model that is not fused runs."""

    format: str = "bf16"

    def __post_init__(self) -> None:
        if self.format not in DTYPES:
            raise BadInput("norm.format", self.format, f"give one of {', '.join(DTYPES)}")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.format]

    @property
    def formats(self) -> Mapping[str, Format]:
        return {"y": Format.parse(self.format), "rms": Format.parse(self.format)}

    @property
    def input_key(self) -> Hashable:
        return self.format

    def round_inputs(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        policy = Policy.uniform(Format.parse(self.format))
        rounded = policy.round_inputs(x, w)
        return rounded[0].to(self.dtype), rounded[1].to(self.dtype)

    def __call__(self, x: Tensor, w: Tensor, *, eps: float) -> Output:
        rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return Output(x / rms * w, rms)


@dataclass(frozen=True)
class InItsFormat:
    """The baseline of a variant: eager, in the format of the variant's `y`; in FP32 where torch has none of that format."""

    def of(self, variant: Any, problem: Problem) -> Eager:
        """The baseline of a variant on a problem."""
        name = str(variant.formats["y"])
        return Eager(name if name in DTYPES else "fp32")
