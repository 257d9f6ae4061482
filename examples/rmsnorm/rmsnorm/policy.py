"""Which format each arithmetic step of RMSNorm uses."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from numdev import BadInput, Cast, Dot, Format
from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import FP32, FP64


@dataclass(frozen=True)
class Policy:
    """One Cast or Dot for each step of `y = x / sqrt(mean(x^2) + eps) w` (Zhang & Sennrich 2019, equation 4).

    Attributes:
        inputs: x and w as the algorithm receives them.
        square: `x^2`.
        sum: the running sum of the squares.
        mean: the sum over n, then `+ eps`.
        rsqrt: `1 / sqrt(mean)`; from FP64's, whose error of an ulp is the only one beside the rounding.
        normalise: `x r`.
        weigh: `x r w`.
        output: what is returned.
    """

    inputs: Cast
    square: Cast
    sum: Dot
    mean: Cast
    rsqrt: Cast
    normalise: Cast
    weigh: Cast
    output: Cast

    @staticmethod
    def uniform(fmt: Format) -> Policy:
        """Every step in `fmt`."""
        return Policy.mixed(fmt, fmt)

    @staticmethod
    def mixed(low: Format, high: Format) -> Policy:
        """Inputs and output in `low`, everything between in `high`."""
        ends, inside = Cast(low), Cast(high)
        return Policy(
            inputs=ends,
            square=inside,
            sum=Dot(inside),
            mean=inside,
            rsqrt=inside,
            normalise=inside,
            weigh=inside,
            output=ends,
        )

    @staticmethod
    def compose(preset: str = "kernel_bf16", every: int | None = None, **steps: str | None) -> Policy:
        """A preset (`bf16`: every step, `kernel_bf16`: FP32 inside, `golden`) and the steps that differ, as text.

        Raises:
            BadInput: for a step or a format that there is not.
        """
        kind, _, name = preset.rpartition("_")
        if preset == "golden":
            policy = Policy.uniform(FP64)
        elif kind in ("", "kernel"):
            fmt = Format.parse(name)
            policy = Policy.mixed(fmt, FP32) if kind else Policy.uniform(fmt)
        else:
            raise BadInput("policy.preset", preset, "give golden, a format, or kernel_ and a format")
        known = {field.name for field in fields(Policy)}
        for step, text in steps.items():
            if step not in known:
                raise BadInput(f"policy.{step}", text, f"there is no such step; give one of {', '.join(sorted(known))}")
            if text is not None:
                policy = replace(policy, **{step: Dot.parse(text) if step == "sum" else Cast.parse(text)})
        return policy if every is None else replace(policy, sum=Dot(policy.sum.accumulate, every))

    @property
    def format(self) -> Format:
        """The format of the output."""
        return self.output.to

    def round_inputs(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """x and w as the algorithm sees them, in FP64."""
        return self.inputs(x.double()), self.inputs(w.double())

    def times(self, step: str, x: Tensor, y: Tensor) -> Tensor:
        """`x y`, rounded once to the format of a step."""
        return RoundedOnce(Operation.MULTIPLY, getattr(self, step), FP64, FP64, torch.float64)(x.clone(), y.expand_as(x))

    def plus(self, step: str, x: Tensor, y: Tensor) -> Tensor:
        """`x + y`, likewise."""
        return RoundedOnce(Operation.ADD, getattr(self, step), FP64, FP64, torch.float64)(x.clone(), y.expand_as(x))

    def over(self, step: str, x: Tensor, y: Tensor) -> Tensor:
        """`x / y`, likewise."""
        return RoundedOnce(Operation.DIVIDE, getattr(self, step), FP64, FP64, torch.float64)(x.clone(), y.expand_as(x))
