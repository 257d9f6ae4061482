"""The fast reference of the backward pass: our own kernels, portable and for Hopper GPUs, under the policy `kernel(F)`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, FP32, Format
from numdev.attention.base import Attention, Gradients, Saved, check_backward_shapes, softmax_scale
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.differentiable import BackwardPass
from numdev.attention.honours import PRESET, RECOMPUTED, RECURRENCE, SIDES, Honours
from numdev.attention.kernel_arithmetic import KernelArithmetic
from numdev.attention.kernel_launch import KernelLaunch
from numdev.attention.kernels.hopper.launch import BACKWARD, QUERIES, backward_refusal, hidden_queries
from numdev.attention.kernels.hopper.order import TILE, group_of
from numdev.attention.kernels.launch import Device, Kernel, Launches, choose_backward
from numdev.attention.kernels.runtime import (
    BackwardInputs,
    check_scale,
    generation,
    held_dtype,
    multiprocessors,
    require,
    shared_memory,
)
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision
from numdev.attention.problem import Shape
from numdev.attention.softmax import Exponential, Recompute
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput, Unsupported

_FORMATS = (BF16, FP16, FP32)
_FIELD = "backward.products"
_OWN = {"tiling.order", _FIELD, "backward.kernel"}


@dataclass(frozen=True)
class TritonBackward(BackwardPass):
    """A forward pass, then our backward kernels under `BackwardPrecision.kernel(fmt)`, deterministic by construction.

    The portable kernels, a preparing one and two others, use no atomic additions: on a GPU the bits depend only on the inputs and
    the tiles. `Gradients.launch` states the kernel, and the tiles with which an emulation sums in the same order: `br`
    of the kernel for dK and dV, `bc` of that for dQ. The order of the Hopper kernels is `numdev.attention.tile_schedule.Turns`.

    Attributes:
        forward: the forward pass, which saves O and LSE.
        fmt: bf16, fp16 or fp32.
        br, bc: the tile of both kernels; None takes the pinned launches, whose tiles may differ between the kernels.
        order: order of query tiles and of KV tiles; None is the kernels' own, forward for the portable ones.
        recompute: `exp2` or `exp`; either form of delta.
        tf32: whether FP32 operands are multiplied on tensor cores, with 10 fraction bits.
        kernel: see `Kernel`.
    """

    honours: ClassVar[Honours] = Honours(PRESET | SIDES | _OWN | RECURRENCE | RECOMPUTED, "kernel", _FORMATS)

    forward: Attention
    fmt: Format = BF16
    br: int | None = None
    bc: int | None = None
    order: Order | None = None
    recompute: Recompute = Recompute(exponential=Exponential.EXP2)
    tf32: bool = False
    kernel: Kernel = Kernel.AUTO

    def __post_init__(self) -> None:
        if self.fmt not in _FORMATS:
            raise BadInput("precision", self.fmt.name, f"use one of {', '.join(fmt.name for fmt in _FORMATS)}")
        Tiling(64 if self.br is None else self.br, 64 if self.bc is None else self.bc)  # checks the sizes
        if self.tf32 and self.fmt != FP32:
            raise BadInput(_FIELD, "tf32", f"only products of fp32 can be in tf32, not those of {self.fmt.name}; give ieee")

    @property
    def idle(self) -> dict[str, str]:
        unread = {} if self.recompute.reads_output else {"recompute.output": "recompute.delta=output"}
        return unread if self.fmt == FP32 else {_FIELD: "precision=fp32"} | unread

    @property
    def precision(self) -> BackwardPrecision:
        """The policy under which it computes."""
        return BackwardPrecision.kernel(self.fmt)

    @property
    def storage(self) -> torch.dtype:
        """The dtype in which the inputs are stored, so that a call converts nothing."""
        return held_dtype(self.fmt)

    @property
    def is_tf32(self) -> bool:
        """Whether FP32 operands are multiplied in TF32."""
        return self.tf32

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        """The cost model of the Hopper kernel if it ran, or of the two portable kernels with the tile of the settings."""
        width = Width.of(self.fmt, self.fmt)
        if launch.name == BACKWARD:
            return CostModel(Algorithm.TILED, width, TILE, bc=TILE, stores_first=True, scales_lse=True)
        return CostModel(Algorithm.TILED, width, self.br, bc=self.bc, recomputes_twice=True)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[BackwardPrecision]:
        """See `Implementation`; `Gradients.launch` states the tile of a launch.

        Raises:
            BadInput: for `Kernel.AUTO`, as several kernels are possible.
        """
        if self.kernel is Kernel.AUTO:
            raise BadInput("backward.kernel", "auto", "an emulation needs one kernel; give portable or hopper")
        if self.kernel is Kernel.PORTABLE:
            order, why = self.order or Order.FORWARD, "it depends on the launch"
            return KernelArithmetic(
                self.precision, recompute=self.recompute, br=self.br, bc=self.bc, order=order, query_order=order, why=why
            )
        if shape.head_dim not in QUERIES:
            raise BadInput("problem.head_dim", shape.head_dim, "the Hopper kernel has 64 and 128")
        queries, tiling = shape.queries - hidden_queries(shape.queries, shape.keys, mask), Tiling(QUERIES[shape.head_dim], TILE)
        turns = Turns(None if mask.causal else group_of(math.ceil(queries / TILE)), shared=True)
        return KernelArithmetic(self.precision, recompute=self.recompute, tiling=tiling, turns=turns)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone. Takes rounded inputs of any dtype; returns the gradients in the format's dtype, delta in FP32.

        Raises:
            BadInput: for a scale that is not positive and finite.
            Unsupported: naming the field, if the kernels do not support the request, or if no kernel can run here.
        """
        check_backward_shapes(q, k, v, do, mask)
        saved.check(q, v)
        require(q.device)
        if q.shape[-1] != v.shape[-1]:
            raise Unsupported(
                "problem.head_dim", f"the kernels have one for q, k and v, and v has {v.shape[-1]}, q {q.shape[-1]}"
            )
        factor = check_scale(softmax_scale(q, scale))
        q, k, v, do = (x.to(self.storage) for x in (q, k, v, do))
        inputs = BackwardInputs(q, k, v, do, saved.out, saved.lse.float().contiguous())
        refused = self._hopper_refusal(q, k, v, do, mask)
        if refused is None:
            from numdev.attention.kernels.hopper import host

            (dq, dk, dv, delta), used = host.gradients(inputs, mask, factor)
            return Gradients(dq, dk, dv, delta, launch=used)
        if self.kernel is Kernel.HOPPER:
            raise Unsupported("backward.kernel", f"the Hopper kernel cannot run this: {refused}")
        from numdev.attention.kernels import portable

        launches = self.launches(q.shape[-1], mask, q.device)
        order = self.order or Order.FORWARD
        request = portable.BackwardRequest(self.precision, self.recompute, launches, order, self.tf32)
        native = self.fmt.dtype
        assert native is not None, "each of the formats has a dtype"
        *gradients, delta = portable.BackwardCall(request, inputs, mask, factor, self.storage).run()
        dq, dk, dv = (x if x.dtype == native else self.precision.output.apply_(x).to(native) for x in gradients)
        br, bc = launches.keys, launches.rows
        return Gradients(dq, dk, dv, delta, launch=KernelLaunch("numdev portable backward", br.br, bc.bc, br.warps, br.stages))

    def _hopper_refusal(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask) -> str | None:
        if self.kernel is Kernel.PORTABLE:
            return "backward.kernel=portable asks for the portable kernels"
        if (device := generation(q.device)) != "sm_90":
            return f"it needs a GPU of compute capability 9.0, and this is {device}"
        return backward_refusal(q, k, v, do, mask, self, multiprocessors(q.device))

    def launches(self, head_dim: int, mask: Mask, device: torch.device) -> Launches:
        """The tiles of both kernels."""
        return choose_backward(self.fmt, head_dim, mask, Device(generation(device), shared_memory(device)), self.br, self.bc)
