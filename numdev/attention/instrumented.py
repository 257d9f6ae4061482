"""Tiled attention under any precision policy, in one kernel: `Tiled` at the speed of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import FP16, FP32
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Output, UnderPolicy, check_shapes, softmax_scale
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.honours import PRESET, RECURRENCE, STEPS, TILES, Honours
from numdev.attention.kernels.launch import Device, Launch, with_stages
from numdev.attention.kernels.runtime import check_scale, generation, require, shared_memory
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.ran import Ran
from numdev.attention.softmax import OnlineSoftmax, ScaleOn
from numdev.attention.tiling import Tiling
from numdev.attention.walk import Walk
from numdev.errors import Unsupported


@dataclass(frozen=True)
class Instrumented(UnderPolicy):
    """The recurrence of `Tiled` with its casts compiled into a Triton kernel.

    It agrees with `Tiled` bit for bit where products and sums are exact by construction. Elsewhere the two differ as far as
    the order of summation in FP32 and the hardware's exponential (2 ulp of FP32) let them, before each step's rounding.

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
        return super().idle | self.tiling.idle

    def cost_model(self, ran: Ran) -> CostModel:
        return CostModel(Algorithm.TILED, Width.of(self.format, self.format), self.tiling.br)

    def walk(self, shape: Shape, mask: Mask) -> Walk:
        return Walk(self.precision, self.softmax, self.tiling)

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
        if self.precision.carrier is not torch.float32:
            raise Unsupported("precision", "kernels compute in FP32, and a step of this policy needs FP64; use attention=tiled")
        from numdev.attention.kernels import portable

        factor = check_scale(softmax_scale(q, scale))
        if self.softmax.scale_on is ScaleOn.QUERIES:
            q, factor = self._scale_queries(q.float() * (factor * self.softmax.log_scale)), 1.0 / self.softmax.log_scale
        br, bc, stored = self.tiling.br, self.tiling.bc, FP32 if self.storage == torch.float32 else FP16
        launch = Launch(br, bc, 8 if br * bc > 64 * 64 else 4, 2)
        device = Device(generation(q.device), shared_memory(q.device))
        launch = with_stages(launch, stored, q.shape[-1], device)
        request = portable.Request(
            self.precision, self.tiling, self.softmax, exactly=True, warps=launch.warps, stages=launch.stages
        )
        out, lse = portable.run(request, q.to(self.storage), k.to(self.storage), v.to(self.storage), mask, factor)
        ran = Ran("numdev instrumented", br, bc, launch.warps, launch.stages, self.tiling.splits)
        return Output(self.precision.output.apply_(out), lse, ran=ran)

    @property
    def storage(self) -> torch.dtype:
        """What the inputs are held in, so that a call converts nothing."""
        from numdev.attention.kernels import portable

        return portable.storage(self.precision)

    def _scale_queries(self, q: Tensor) -> Tensor:
        inputs = self.precision.inputs
        return inputs.apply_(q) if isinstance(inputs, Cast) else q
