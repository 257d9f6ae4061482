"""The fast reference: our own forward kernels, under the policy that kernels have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from numdev.attention.base import ForwardPass, Output, check_shapes, softmax_scale
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.honours import PRESET, RECURRENCE, SIDES, Honours
from numdev.attention.kernel_arithmetic import KernelArithmetic
from numdev.attention.kernel_launch import KernelLaunch
from numdev.attention.kernels.hopper.launch import keys_of_block, refusal
from numdev.attention.kernels.launch import ROWS, Device, Kernel, Launch, choose, split_count
from numdev.attention.kernels.runtime import check_scale, generation, held_dtype, multiprocessors, require, shared_memory
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import Exponential, OnlineSoftmax, ScaleOn
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput, NotHonoured, Unsupported
from numdev.settings import setting

__all__ = ["Kernel", "Products", "Triton"]

_FORMATS = (BF16, FP16, FP32, E4M3FN, E5M2)


class Products(Enum):
    """How FP32 operands are multiplied."""

    IEEE = "ieee"
    TF32 = "tf32"  # rounded to 10 mantissa bits first, on the tensor cores


_TILES = SIDES | {"tiling.order", "tiling.splits"}
_OWN = {"attention.products", "attention.kernel"}


@dataclass(frozen=True)
class Triton(ForwardPass):
    """Our forward kernels under `Precision.kernel(fmt)`: inputs, P and output in `fmt`, FP32 inside.

    FP8 inputs give FP16 output, as FlashAttention-3 does; their P is in FP8 and their products are formed from FP16 operands,
    exactly, because the FP8 tensor cores of Hopper accumulate in fewer bits than FP32.

    Attributes:
        fmt: bf16, fp16, fp32, e4m3fn or e5m2.
        br, bc: the tile; None is that of the pinned launch table.
        order: of the tiles of keys; None is the kernel's own, forward for the portable one and reverse for Hopper's.
        splits: split-KV; None is the portable kernel's own rule, `numdev.attention.kernels.launch.split_count`.
        softmax: `exp2` with folded scale, or `exp`; normalised at the end, or at each tile; lazy rescaling; `p_scale`.
        products: of FP32 operands.
        kernel: see `Kernel`. `Output.launch` says which one ran.
    """

    honours: ClassVar[Honours] = Honours(PRESET | _TILES | RECURRENCE | _OWN, "kernel", _FORMATS)

    fmt: Format = BF16
    br: int | None = None
    bc: int | None = None
    order: Order | None = None
    splits: int | None = None
    softmax: OnlineSoftmax = OnlineSoftmax(exp=Exponential.EXP2)
    products: Products = setting(
        Products.IEEE, "how a kernel multiplies FP32: `ieee`, or `tf32` with operands of 10 fraction bits"
    )
    kernel: Kernel = setting(
        Kernel.AUTO, "which kernel of numdev is asked for: auto, portable or hopper; the column `kernel` names what ran"
    )

    def __post_init__(self) -> None:
        if self.fmt not in _FORMATS:
            raise BadInput("precision", self.fmt.name, f"use one of {', '.join(f.name for f in _FORMATS)}")
        Tiling(
            64 if self.br is None else self.br, 64 if self.bc is None else self.bc, splits=self.splits or 1
        )  # checks the sizes

    @property
    def precision(self) -> Precision:
        """The policy under which it computes."""
        policy = Precision.kernel(self.fmt)
        return policy if self.fmt.bits > 8 else policy.with_step(output=FP16)

    @property
    def idle(self) -> dict[str, str]:
        """Only FP32 has two ways to be multiplied."""
        return {} if self.fmt == FP32 else {"attention.products": "precision=fp32"}

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        """See `numdev.attention.honours.OnShape`; the launch table's Bc is known on the GPU alone."""
        if shape is None or self.bc is None or self.splits is None:
            return []
        return Tiling(bc=self.bc, splits=self.splits).ineffective(shape.keys)

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        """With the rows of the tile that it ran with, where the settings do not say them."""
        br = launch.br if self.br is None else self.br
        return CostModel(Algorithm.TILED, Width.of(self.fmt, self.format), br, packs_heads=True)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Precision]:
        """Of the kernel that is asked for.

        Raises:
            BadInput: for `Kernel.AUTO`, which is one of two kernels, and for splits that the kernel chooses on the GPU.
        """
        if self.kernel is Kernel.AUTO:
            raise BadInput("attention.kernel", "auto", "an emulation needs one kernel; give portable or hopper")
        splits = self._stated_splits(shape, mask)
        if self.kernel is Kernel.HOPPER:
            bc = keys_of_block(shape.head_dim)
            return KernelArithmetic(self.precision, self.softmax, bc=bc, order=Order.REVERSE, splits=splits)
        order, why = self.order or Order.FORWARD, "it depends on the launch"
        return KernelArithmetic(self.precision, self.softmax, bc=self.bc, order=order, splits=splits, why=why)

    def _stated_splits(self, shape: Shape, mask: Mask) -> int:
        """One, unless more are asked for, or its own rule may find more."""
        rows = shape.packed.queries if mask.window is None else shape.queries
        if self.splits is None and self.kernel is Kernel.PORTABLE and rows <= ROWS and mask.window is None:
            why = "with so few queries the kernel splits the keys by a rule that depends on the GPU; give a number"
            raise BadInput("tiling.splits", None, why)
        return self.splits or 1

    @property
    def is_tf32(self) -> bool:
        """Whether FP32 operands are multiplied in TF32."""
        return self.products is Products.TF32

    @property
    def storage(self) -> torch.dtype:
        """What the inputs are held in, so that a call converts nothing."""
        return held_dtype(self.fmt)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs of any dtype in; `out` in the output format's dtype, LSE in FP32.

        Raises:
            BadInput: for a scale that is not positive and finite.
            Unsupported: naming the field that no kernel, or not the one asked for, can honour.
        """
        check_shapes(q, k, v, mask)
        require(q.device)
        scale = check_scale(softmax_scale(q, scale))
        if self.softmax.scale_on is ScaleOn.QUERIES:
            raise Unsupported("softmax.scale_on", "our kernels scale the scores; give scores, or attention=tiled")
        if self.products is Products.TF32 and self.fmt != FP32:
            raise Unsupported("attention.products", f"only products of fp32 can be in tf32, not {self.fmt.name}; give ieee")
        q, k, v = q.to(self.storage), k.to(self.storage), v.to(self.storage)
        kv_heads = k.shape[1]
        if q.shape[2] > 1 or q.shape[1] == kv_heads or mask.window is not None:
            return self._attend(q, k, v, mask, scale)
        # Heads that share k and v are rows of one tile, and read them once. One query sees every key, also under a causal limit.
        rows = q.squeeze(2).unflatten(1, (kv_heads, -1))
        found = self._attend(rows, k, v, replace(mask, causal=False), scale)
        assert found.lse is not None
        return Output(found.out.flatten(1, 2).unsqueeze(2), found.lse.flatten(1, 2).unsqueeze(2), launch=found.launch)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Output:
        refused = self._hopper_refusal(q, k, v, mask)
        if refused is None:
            from numdev.attention.kernels.hopper import host

            out, lse, used = host.forward(q, k, v, mask, scale, self.br)
            return Output(out, lse, launch=used)
        if self.kernel is Kernel.HOPPER:
            raise Unsupported("attention.kernel", f"the Hopper kernel cannot run this: {refused}")
        return self._portable(q, k, v, mask, scale)

    def _hopper_refusal(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
        if self.kernel is Kernel.PORTABLE:
            return "the portable kernel is asked for"
        if (found := generation(q.device)) != "sm_90":
            return f"it needs a GPU of compute capability 9.0, and this is {found}"
        if self.kernel is Kernel.AUTO and self._split(q, k, mask, self._launch(q, mask)) > 1:
            return "the portable kernel splits the keys, and fills the GPU so"
        return refusal(q, k, v, mask, self)

    def _launch(self, q: Tensor, mask: Mask) -> Launch:
        """Of the portable kernel."""
        device = Device(generation(q.device), shared_memory(q.device))
        return choose(self.fmt, q.shape[-1], q.shape[2], mask, device, self.br, self.bc)

    def _split(self, q: Tensor, k: Tensor, mask: Mask, launch: Launch) -> int:
        """Ranges of keys of the portable kernel."""
        if self.splits is not None or q.shape[2] > ROWS or mask.window is not None:
            return self.splits or 1
        return split_count(q.shape[0] * q.shape[1], k.shape[2], launch.bc, multiprocessors(q.device))

    def _portable(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Output:
        from numdev.attention.kernels import portable

        launch = self._launch(q, mask)
        splits = self._split(q, k, mask, launch)
        tiling = Tiling(launch.br, launch.bc, self.order or Order.FORWARD, splits=splits)
        tf32 = self.products is Products.TF32
        request = portable.Request(self.precision, tiling, self.softmax, tf32, warps=launch.warps, stages=launch.stages)
        native = self.format.dtype
        assert native is not None
        out, lse = portable.run(request, q, k, v, mask, scale, held_dtype(self.format))
        if out.dtype != native:
            out = self.precision.output.apply_(out).to(native)
        used = KernelLaunch("numdev portable", launch.br, launch.bc, launch.warps, launch.stages, splits)
        return Output(out, lse, launch=used)
