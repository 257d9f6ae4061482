"""Tiled attention under any precision policy, in one kernel: `Tiled` at the speed of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from numdev.attention.base import ForwardPass, Output, check_shapes
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.honours import PRESET, RECURRENCE, STEPS, TILES, Honours, tiled_ineffective
from numdev.attention.kernel_arithmetic import KernelArithmetic
from numdev.attention.kernel_launch import KernelLaunch
from numdev.attention.kernelrun import KernelRun
from numdev.attention.kernels.runtime import require
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.tiling import Tiling
from numdev.errors import NotHonoured


@dataclass(frozen=True)
class Instrumented(ForwardPass):
    """The recurrence of `Tiled` with its casts compiled into a Triton kernel.

    It agrees with `Tiled` bit for bit where products and sums are exact by construction. Elsewhere the two differ as far as
    the order of summation in FP32 and the hardware's exponential let them, before each step's rounding. That is within 2 ulp of
    FP32, and `exp(x)`, which is `exp2(x log2 e)`, within |x| ulp more. On a GPU `Tiled` takes long runs by the same kernel.

    Attributes:
        precision: the format of each step; those that FP32 registers hold, rounded to nearest even or toward zero.
        tiling: `br`, `bc` up to 256, order forward or reverse, splits.
        softmax: the recurrence; `exp` or `exp2`, without shifting ties.
    """

    honours: ClassVar[Honours] = Honours(PRESET | STEPS | TILES | RECURRENCE)

    precision: Precision
    tiling: Tiling = Tiling()
    softmax: OnlineSoftmax = OnlineSoftmax()

    @property
    def idle(self) -> dict[str, str]:
        return self.precision.idle | self.tiling.idle

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        """See `numdev.attention.honours.OnShape`."""
        return tiled_ineffective(self.precision, self.tiling, self.softmax, shape)

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        return CostModel(Algorithm.TILED, Width.of(self.format, self.format), self.tiling.br)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Precision]:
        return KernelArithmetic(self.precision, self.softmax, tiling=self.tiling)

    def unrounded(self) -> Instrumented:
        """The same, its output left in the format of the accumulator."""
        return replace(self, precision=self.precision.with_step(output=self.precision.accumulator))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs in, FP32 out. Shapes as in `Output`.

        Raises:
            BadInput: for a scale that is not positive and finite.
            Unsupported: naming the field, for what the kernel does not have, and where no kernel can run.
        """
        check_shapes(q, k, v, mask)
        require(q.device)
        return self._run(q, k, v, mask, scale)

    @property
    def storage(self) -> torch.dtype:
        """What the inputs are held in, so that a call converts nothing."""
        return self._run.storage

    @property
    def _run(self) -> KernelRun:
        return KernelRun(self.precision, self.tiling, self.softmax)
