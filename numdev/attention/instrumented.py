"""Tiled attention under any precision policy, its casts compiled into our portable kernels: `Tiled` at the speed of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import FP16, FP32
from numdev.attention.accepts import TILING
from numdev.attention.base import (
    Attention,
    ForwardPass,
    Gradients,
    Output,
    Saved,
    check_backward_shapes,
    check_shapes,
    softmax_scale,
)
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.differentiable import BackwardPass
from numdev.attention.honours import (
    PRESET,
    RECURRENCE,
    STEPS,
    TILED_BACKWARD,
    TILES,
    Honours,
    backward_ineffective,
    idle_recompute,
    tiled_ineffective,
)
from numdev.attention.kernel_arithmetic import KernelArithmetic
from numdev.attention.kernel_launch import KernelLaunch
from numdev.attention.kernelrun import KernelRun
from numdev.attention.kernels.launch import choose_backward
from numdev.attention.kernels.runtime import BackwardInputs, check_scale, device_of, require
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import OnlineSoftmax, Recompute
from numdev.attention.tiling import Tiling
from numdev.errors import NotHonoured, Unsupported


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

    @property
    def _run(self) -> KernelRun:
        return KernelRun(self.precision, self.tiling, self.softmax)

    @property
    def storage(self) -> torch.dtype:
        """The dtype in which the inputs are stored, so that a call converts nothing."""
        return self._run.storage

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        return CostModel(Algorithm.TILED, Width.of(self.format, self.format), self.tiling.br)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Precision]:
        return KernelArithmetic(self.precision, self.softmax, tiling=self.tiling)

    def unrounded(self) -> Instrumented:
        """Its copy that leaves the output in the format of the accumulator."""
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


@dataclass(frozen=True)
class InstrumentedBackward(BackwardPass):
    """A forward pass, then the backward pass of `TiledBackward` with its casts compiled into Triton kernels.

    It agrees with `TiledBackward` bit for bit where products and sums are exact by construction. Elsewhere the order of summation
    in FP32 and the hardware's exponential may differ, before each step's rounding.

    Attributes:
        forward: the forward pass, which saves O and LSE.
        precision: the format of each step, which FP32 registers must hold, rounded to nearest even or toward zero.
        tiling: `br`, `bc` up to 256, order forward or reverse, one split.
        recompute: `exp` or `exp2`; either form of delta.
    """

    honours: ClassVar[Honours] = Honours(TILED_BACKWARD)

    forward: Attention
    precision: BackwardPrecision
    tiling: Tiling = Tiling()
    recompute: Recompute = Recompute()

    def __post_init__(self) -> None:
        if self.tiling.splits != 1:
            raise Unsupported("tiling.splits", "gradients of ranges of keys cannot be combined; give 1")

    @property
    def idle(self) -> dict[str, str]:
        """Settings that have no effect, and the setting under which each would."""
        return self.tiling.idle | idle_recompute(self.recompute)

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        """See `numdev.attention.honours.OnShape`."""
        return backward_ineffective(self.forward, self.precision, self.tiling, self.recompute, shape)

    @property
    def storage(self) -> torch.dtype:
        """The dtype in which the inputs are stored, so that a call converts nothing."""
        from numdev.attention.kernels import portable

        return portable.storage(self.precision)

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        """The cost model of two kernels, one for dK and dV and one for dQ."""
        width = Width(float(self.storage.itemsize), 4.0)
        return CostModel(Algorithm.TILED, width, self.tiling.br, bc=self.tiling.bc, recomputes_twice=True)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[BackwardPrecision]:
        return KernelArithmetic(self.precision, recompute=self.recompute, tiling=self.tiling)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone. Takes rounded inputs and returns FP32. Shapes as in `Gradients`.

        Raises:
            BadInput: for a scale that is not positive and finite.
            Unsupported: naming the field, if the kernels do not support the request, or if no kernel can run here.
        """
        check_backward_shapes(q, k, v, do, mask)
        saved.check(q, v)
        require(q.device)
        if self.precision.carrier is not torch.float32:
            raise Unsupported("precision", "kernels compute in FP32, and a step of this policy needs FP64; use backward=tiled")
        TILING.check(self.tiling, "the kernel", "backward=tiled")
        factor = check_scale(softmax_scale(q, scale))
        from numdev.attention.kernels import portable

        stored = FP32 if self.storage == torch.float32 else FP16
        launches = choose_backward(stored, q.shape[-1], mask, device_of(q.device), self.tiling.br, self.tiling.bc)
        request = portable.BackwardRequest(self.precision, self.recompute, launches, self.tiling.order, exactly=True)
        q, k, v, do = (x.to(self.storage) for x in (q, k, v, do))
        inputs = BackwardInputs(q, k, v, do, saved.out.float(), saved.lse.float().contiguous())
        *gradients, delta = portable.BackwardCall(request, inputs, mask, factor).run()
        dq, dk, dv = (self.precision.output.apply_(gradient) for gradient in gradients)
        launch = launches.keys
        used = KernelLaunch("numdev instrumented backward", launch.br, launch.bc, launch.warps, launch.stages)
        return Gradients(dq, dk, dv, delta, launch=used)
