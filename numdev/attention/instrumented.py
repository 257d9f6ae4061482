"""Tiled attention under any precision policy, its casts compiled into our portable kernels: `Tiled` at the speed of a GPU.

The kernel does the operations of `numdev.attention.recurrence` on the same tiles in the same order, and rounds the result of each
by the policy's step. Before a step rounds, two things differ: the order in which FP32 adds up, which tensor operations leave to a
library too, and the exponential. Where both are exact the bits are the same. Elsewhere a step that gets the same operands rounds
two FP32 numbers that are at most `2^-14` of the added magnitudes apart (256 terms; `u + 2u` for each, as tensor cores truncate),
or for an exponential `exp(x)` at most `4 + |x|` ulp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import FP16, FP32, Format
from numdev.attention.accepts import TILING
from numdev.attention.base import Gradients, Output, Saved, check_backward_shapes, check_shapes, softmax_scale
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.groups import AcceptedSettings
from numdev.attention.kernels.launch import (
    LARGE,
    Launch,
    Plan,
    Planned,
    check_scale,
    choose_backward,
    device_of,
    require,
    shared_bytes,
    triton_version,
)
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import ScaleOn
from numdev.attention.tiled import READ, READ_BACKWARD, GradientsOverTiles, OverTiles
from numdev.attention.tiling import KernelLaunch
from numdev.errors import BadInput, Unsupported

# Tensor operations take about a millisecond to launch for each tile of keys. With fewer tiles, ten replicates do not repay the
# seconds in which a kernel is compiled for a policy (`benchmarks/choice.py`), unless a tile has so many scores that they decide.
_FEWEST_TILES, _MOST_SCORES = 128, 1 << 31


@dataclass(frozen=True)
class Instrumented(Planned, OverTiles):
    """The recurrence of `Tiled` with its casts compiled into a Triton kernel.

    It agrees with `Tiled` bit for bit where products and sums are exact by construction, elsewhere as this module's text says.
    On a GPU `Tiled` takes long runs by it.

    Attributes:
        precision: the format of each step; those that FP32 registers hold, rounded to nearest even or toward zero.
        tiling: `br`, `bc` up to 256, order forward or reverse, splits.
        softmax: the recurrence; `exp` or `exp2`, without shifting ties.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(READ)

    @property
    def storage(self) -> torch.dtype:
        from numdev.attention.kernels import portable

        return portable.storage(self.precision)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs in, FP32 out. Shapes as in `Output`.

        Raises:
            BadInput: for a scale that is not positive and finite.
            Unsupported: naming the field, for what the kernel does not have, and where no kernel can run.
        """
        plan = self.prepared(q, k, v, mask=mask, scale=scale)
        return Output(*plan.run(q, k, v), launch=plan.launch)

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Plan:
        check_shapes(q, k, v, mask)
        require(q.device)
        from numdev.attention.kernels import portable

        factor, device, storage = _factor(self.precision, q, scale), device_of(q.device), self.storage
        launch = Launch(0, 0, 4, 2).with_sides(self.tiling.br, self.tiling.bc, LARGE)
        launch = launch.with_stages(lambda each: device.holds(shared_bytes(each, _stored(storage), q.shape[-1])))
        settings = self.precision, self.tiling, self.softmax
        request = portable.Request(*settings, exactly=True, warps=launch.warps, stages=launch.stages)
        log_scale, scaled = self.softmax.log_scale, self.softmax.scale_on is ScaleOn.QUERIES

        def stored(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q = self.precision.scale_queries(q.float(), factor * log_scale) if scaled else q
            return q.to(storage), k.to(storage), v.to(storage)

        plan = portable.plan(request, *stored(q, k, v), mask, 1.0 / log_scale if scaled else factor)
        return plan._replace(run=lambda *qkv: plan.run(*stored(*qkv)))

    def refusal(self, q: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> str | None:
        """Why the kernel does not take a run, in its own words; None where it does, unless a tile does not fit into the GPU."""
        from numdev.attention.kernels import portable

        try:
            factor = _factor(self.precision, q, scale)
            portable.check_dims(q, v)
            request = portable.Request(self.precision, self.tiling, self.softmax, exactly=True)
            portable.code(request, mask, q.shape[-1], factor * self.softmax.log_scale)
        except (BadInput, Unsupported) as error:
            return str(error)
        return None


def _factor(precision: Precision | BackwardPrecision, q: Tensor, scale: float | None, instead: str = "attention=tiled") -> float:
    """The scale of the scores, for a policy and a scale that kernels have."""
    if precision.carrier is not torch.float32:
        raise Unsupported("precision", f"kernels compute in FP32, and a step of this policy needs FP64; use {instead}")
    return check_scale(softmax_scale(q, scale))


def _stored(storage: torch.dtype) -> Format:
    """A format as wide as those that a tile holds in memory."""
    return FP32 if storage == torch.float32 else FP16


def kernel_refusal(kernel: Instrumented, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> str | None:
    """Why a run of `Tiled` on a GPU goes without the kernel; None where the kernel takes it."""
    if triton_version() == "none":
        return "Triton is not installed"
    if kernel.precision.is_random:
        return "a step rounds stochastically"
    keys = k.shape[-2]
    if math.ceil(keys / kernel.tiling.bc) < _FEWEST_TILES and q[..., 0].numel() * keys < _MOST_SCORES:
        return "it is too short to pay for compiling the kernel"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "torch is to differentiate it"
    if not (mask.is_none or bool(v.isfinite().all())):  # the kernel multiplies by the zeros of what a row does not see
        return "a key that is not seen may hold a value that is not finite"
    return kernel.refusal(q, v, mask, scale)


@dataclass(frozen=True)
class InstrumentedBackward(Planned, GradientsOverTiles):
    """A forward pass, then the backward pass of `TiledBackward` with its casts compiled into Triton kernels.

    It agrees with `TiledBackward` as `Instrumented` does with `Tiled`.

    Attributes:
        forward: the forward pass, which saves O and LSE.
        precision: the format of each step, which FP32 registers must hold, rounded to nearest even or toward zero.
        tiling: `br`, `bc` up to 256, order forward or reverse, one split.
        recompute: `exp` or `exp2`; either form of delta.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(READ_BACKWARD)

    @property
    def storage(self) -> torch.dtype:
        from numdev.attention.kernels import portable

        return portable.storage(self.precision)

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        """The cost model of two kernels, one for dK and dV and one for dQ."""
        width = Width(float(self.storage.itemsize), 4.0)
        return CostModel(Algorithm.TILED, width, self.tiling.br, bc=self.tiling.bc, passes=2)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone. Takes rounded inputs and returns FP32. Shapes as in `Gradients`.

        Raises:
            BadInput: for a scale that is not positive and finite.
            Unsupported: naming the field, if the kernels do not support the request, or if no kernel can run here.
        """
        inputs = q, k, v, do, saved.out, saved.lse
        plan = self.prepared(*inputs, mask=mask, scale=scale)
        return Gradients(*plan.run(*inputs), launch=plan.launch)

    def _stored(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        *four, out, lse = tensors
        storage = self.storage
        return *(x.to(storage) for x in four), out.float(), lse.float().contiguous()

    def _prepare(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, out: Tensor, lse: Tensor, mask: Mask, scale: float | None
    ) -> Plan:
        check_backward_shapes(q, k, v, do, mask, Saved(out, lse))
        require(q.device)
        factor = _factor(self.precision, q, scale, "backward=tiled")
        TILING.check(self.tiling, "the kernel", "backward=tiled")
        from numdev.attention.kernels import portable

        stored, device = _stored(self.storage), device_of(q.device)
        launches = choose_backward(stored, q.shape[-1], mask, device, self.tiling.br, self.tiling.bc)
        request = portable.BackwardRequest(self.precision, self.recompute, launches, self.tiling.order, exactly=True)
        return portable.BackwardPlan(request, portable.Inputs(q, k, v, do, out, lse), mask, factor).plan
