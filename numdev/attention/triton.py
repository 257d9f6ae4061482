"""The fast reference: our own kernels of both passes, portable and for Hopper GPUs, under the policy that kernels have."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from numdev.arithmetic.quantise import Quantised
from numdev.attention.base import (
    Attention,
    Backward,
    Gradients,
    KernelArithmetic,
    Output,
    Saved,
    Stages,
    check_backward_shapes,
    check_shapes,
    softmax_scale,
)
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.groups import PRESET, RECOMPUTED, RECURRENCE, SIDES, STEPS, AcceptedSettings
from numdev.attention.kernels.hopper.launch import BACKWARD, QUANTISED, QUERIES, WIDE, keys_of_block, refusal
from numdev.attention.kernels.hopper.order import TILE
from numdev.attention.kernels.launch import (
    FEW_TILES,
    ROWS,
    STREAMED_ROWS,
    Device,
    Kernel,
    Launch,
    Launches,
    Plan,
    Planned,
    check_scale,
    choose,
    choose_backward,
    device_of,
    few_rows,
    held_dtype,
    interpreting,
    require,
    shared_bytes,
    split_count,
    streaming,
)
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import Exponential, OnlineSoftmax, Recompute, ScaleOn
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiling import KernelLaunch, Order, Tiling
from numdev.errors import BadInput, NotHonoured, Unsupported
from numdev.settings import setting

__all__ = ["Kernel", "Products", "Triton", "TritonBackward"]

Exponentials = tuple[OnlineSoftmax, Recompute]
Sides = tuple[int | None, int | None]  # Br and Bc, None for those of the launch table
_FORMATS = (BF16, FP16, FP32, E4M3FN, E5M2)
_BACKWARD_FORMATS = (BF16, FP16, FP32)


class Products(Enum):
    """How FP32 operands are multiplied."""

    IEEE = "ieee"
    TF32 = "tf32"  # rounded to 10 mantissa bits first, on the tensor cores


_STREAMED = 16384  # keys, up to which the portable kernel streams as fast as the Hopper kernel with as many programs
_TILES = SIDES | {"tiling.order", "tiling.splits", "tiling.split_size"}
_OWN = {"attention.products", "attention.kernel", "attention.promotion"}
_CODES = frozenset({"precision.output"} | {name for name in STEPS if name.startswith("precision.quantise.")})
_NAMED = ("fp8", "fa3_fp8", "fa4_fp8")  # policies of E4M3 with scales
_IN_CODES = "precision=e4m3fn attention.kernel=hopper"
_NEVER = 1 << 20  # products between promotions


@dataclass(frozen=True)
class Triton(Planned, Attention):
    """Our forward kernels under `Precision.kernel(fmt)`: inputs, P and output in `fmt`, FP32 inside.

    FP8 inputs give FP16 output, as FlashAttention-3 does; their P is in FP8. The portable kernel forms their products from FP16
    operands, exactly, because the FP8 tensor cores of Hopper accumulate in fewer bits than FP32. The Hopper kernel, which takes
    E4M3 where it is named, multiplies in these: its policy says so. It takes q, k and v of 16 or 32 bits where they are
    `quantise`d: `numdev.attention.kernels.quantiser` runs before it.

    Attributes:
        fmt: bf16, fp16, fp32, e4m3fn or e5m2.
        br, bc: the tile; None is that of the pinned launch table.
        order: of the tiles of keys; None is the kernel's own, forward for the portable one and reverse for Hopper's.
        splits: split-KV; None is the portable kernel's own rule, `numdev.attention.kernels.launch.split_count`.
        softmax: `exp2` with folded scale, or `exp`; normalised at the end, or at each tile; lazy rescaling; `p_scale`.
        products: of FP32 operands.
        kernel: see `Kernel`. `Output.launch` says which one ran.
        promotion: of the Hopper kernel in E4M3, after how many tiles of keys it adds the tensor cores' sum of `P V` to O.
        split_size: keys of each split; a kernel then gives a row the same bits in every batch and among any number of queries,
            the portable one in one tile for all (`numdev.attention.kernels.forward`).
        quantise: of the Hopper kernel in E4M3, how inputs become codes with scales; None for inputs that are E4M3 themselves.
        output: of the Hopper kernel in E4M3, FP16 or BF16.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(
        PRESET | _TILES | RECURRENCE | _OWN | _CODES, "kernel", _FORMATS
    )

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

    promotion: int = setting(
        1, "in e4m3fn with kernel=hopper, tiles of keys after which the tensor cores' sum of P V is added in FP32; 0 for never"
    )
    split_size: int | None = None
    quantise: Quantised | None = None
    output: Format = FP16

    def __post_init__(self) -> None:
        _check(self.fmt, _FORMATS, self.br, self.bc, self.splits or 1)
        Tiling(bc=self.bc or 1, splits=self.splits or 1, split_size=self.split_size)
        if self.promotion < 0:
            raise BadInput("attention.promotion", self.promotion, "give a number of tiles of keys, or 0 for never")
        if self.quantise is not None and not self._is_narrow:
            hint = f"only the Hopper kernel in e4m3fn takes codes with scales; give {_IN_CODES}"
            raise NotHonoured("precision.quantise", str(self.quantise), hint)
        if self.quantise is not None and (refused := QUANTISED.refusal(self.quantise)) is not None:
            raise NotHonoured(refused.setting, refused.value, f"the Hopper kernel takes {refused.choices or 'the default'} alone")
        if self.output not in (FP16, BF16):
            raise BadInput("precision.output", self.output.name, "the kernel returns fp16 or bf16")

    @staticmethod
    def of_settings(
        preset: str,
        fmt: Format,
        exponentials: Exponentials,
        products: Products,
        kernel: Kernel,
        tile: Sides,
        order: Order | None,
        splits: int | None,
        promotion: int = 1,
        split_size: int | None = None,
        policy: Precision | None = None,
        output: Format | None = None,
    ) -> Triton:
        """From settings, of which what is not set is left to the kernel; of the policy only how it quantises is read.

        Raises:
            NotHonoured: for a policy whose output is in another format than theirs.
        """
        made = Triton(fmt, *tile, order, splits, exponentials[0], products, kernel, promotion, split_size)
        if policy is not None and made._is_narrow:
            inputs = policy.inputs if isinstance(policy.inputs, Quantised) else None
            made = replace(made, quantise=inputs, output=output or (policy.format if preset in _NAMED else FP16))
        if preset in _NAMED:
            if made.quantise is None:
                raise NotHonoured(
                    "precision.preset", preset, "of our kernels the Hopper one takes it; give attention.kernel=hopper"
                )
            return made
        if "_" in preset and Precision.parse(preset).format != made.format:
            raise NotHonoured("precision.preset", preset, f"attention=triton returns {made.format}; name a format alone")
        return made

    @property
    def precision(self) -> Precision:
        """The policy under which it computes."""
        policy = Precision.kernel(self.fmt)
        if self.fmt.bits > 8:
            return policy
        if not self._is_narrow:
            return policy.with_step(output=FP16)
        inputs = self.quantise or policy.inputs
        every = "" if self.promotion == 1 else f"@{self.promotion * keys_of_block(128) or _NEVER}"
        saturated = f"{self.fmt}:saturate"
        return policy.with_step(
            inputs=inputs, output=self.output, scores="hopper", values=f"hopper{every}", probabilities=saturated
        )

    @property
    def _is_narrow(self) -> bool:
        return self.fmt == E4M3FN and self.kernel is Kernel.HOPPER

    @property
    def idle(self) -> dict[str, str]:
        """Only FP32 has two ways to be multiplied, and only the sums of FP8 tensor cores are promoted."""
        unread = {} if self.fmt == FP32 else {"attention.products": "precision=fp32"}
        if self._is_narrow:
            return unread | (self.quantise.idle if self.quantise else {})
        return unread | dict.fromkeys(("attention.promotion", *_CODES), _IN_CODES)

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        """The launch table's Bc is known on the GPU alone."""
        if shape is None or self.bc is None or self.splits is None:
            return []
        return Tiling(bc=self.bc, splits=self.splits).ineffective(shape.keys)

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        """With the rows of the tile that it ran with, where the settings do not say them."""
        br = launch.br if self.br is None else self.br
        packed = few_rows(self.fmt) if self.quantise is None else 0
        return CostModel(Algorithm.TILED, Width.of(self.fmt, self.format), br, packed_rows=packed)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Precision]:
        """That of the kernel of the settings; how it splits the keys of few queries by itself is known for the GPU that is there.

        Raises:
            BadInput: for `Kernel.AUTO`, which is one of two kernels.
        """
        if self.kernel is Kernel.AUTO:
            raise BadInput("attention.kernel", "auto", "an emulation needs one kernel; give portable or hopper")
        splits = self.splits or 1
        if self.kernel is Kernel.HOPPER:
            bc = keys_of_block(shape.head_dim)
            return KernelArithmetic(
                self.precision, self.softmax, bc=bc, order=Order.REVERSE, splits=splits, split_size=self.split_size
            )
        if self.split_size is None:
            device = device_of(torch.device("cuda" if torch.cuda.is_available() and not interpreting() else "cpu"))
            splits = self._split(shape.packed(mask, few_rows(self.fmt)), mask, device)[1]
        order, why = self.order or Order.FORWARD, "it depends on the launch"
        known = KernelArithmetic(self.precision, self.softmax, bc=self.bc, order=order, splits=splits, why=why)
        return replace(known, split_size=self.split_size)

    @property
    def is_tf32(self) -> bool:
        return self.products is Products.TF32

    @property
    def storage(self) -> torch.dtype:
        """Of inputs that are quantised, that of the output."""
        return held_dtype(self.fmt if self.quantise is None else self.output)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs of any dtype in; `out` in the output format's dtype, LSE in FP32.

        Raises:
            BadInput: for a scale that is not positive and finite.
            Unsupported: naming the field that no kernel, or not the one of the settings, can honour.
        """
        plan = self.prepared(q, k, v, mask=mask, scale=scale)
        return Output(*plan.run(q, k, v), launch=plan.launch)

    def _stored(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.quantise is not None:  # by the quantiser, from any of these
            taken = (torch.bfloat16, torch.float16, torch.float32)
            return tuple(x if x.dtype in taken else x.float() for x in tensors)
        storage = self.storage
        return tuple(x.to(storage) for x in tensors)

    def stages(self, inputs: tuple[Tensor, ...], mask: Mask, scale: float | None = None) -> Stages | None:
        """See `Attention`; None where a call does nothing before its kernel."""
        stages = self.prepared(*inputs, mask=mask, scale=scale).stages
        return stages and (partial(stages[0], *self._stored(*inputs)), stages[1])

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Plan:
        check_shapes(q, k, v, mask)
        require(q.device)
        factor = check_scale(softmax_scale(q, scale))
        if self.softmax.scale_on is ScaleOn.QUERIES:
            raise Unsupported("softmax.scale_on", "our kernels scale the scores; give scores, or attention=tiled")
        if self.is_tf32 and self.fmt != FP32:
            raise Unsupported("attention.products", f"only products of fp32 can be in tf32, not {self.fmt.name}; give ieee")
        batch, heads, queries, dim = q.shape
        shape = Shape(batch, heads, k.shape[1], queries, k.shape[2], dim)
        own = shape.packed(mask, few_rows(self.fmt)) if self.quantise is None else shape
        if own == shape:
            return self._attend(shape, q, k, v, mask, factor)

        # Heads that share k and v are rows of one tile, and read them once.
        def packed(q: Tensor) -> Tensor:
            return q.reshape(own.q)

        plan = self._attend(own, packed(q), k, v, replace(mask, causal=False), factor)

        def apart(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
            return out.view(shape.q), lse.view(batch, heads, queries)

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return apart(*plan.run(packed(q), k, v))

        if plan.stages is None:
            return plan._replace(run=run)
        before, attend = plan.stages
        return plan._replace(run=run, stages=(lambda q, k, v: before(packed(q), k, v), lambda *own: apart(*attend(*own))))

    def _splits_by_rule(self, shape: Shape, mask: Mask) -> bool:
        return self.splits is None and shape.queries <= few_rows(self.fmt) and mask.window is None

    def _split(self, shape: Shape, mask: Mask, device: Device) -> tuple[Launch, int]:
        """The launch of the portable kernel, but for the stages of few rows, and in how many ranges it divides the keys."""
        is_fixed = self.split_size is not None  # then all requests have one launch
        masked = (ROWS + 1, Mask(causal=True)) if is_fixed else (shape.queries, mask)
        launch = choose(self.fmt, shape.head_dim, *masked, device, self.br, self.bc)
        if not self._splits_by_rule(shape, mask):
            return launch, self.splits or 1
        blocks = shape.batch * shape.heads * math.ceil(shape.queries / launch.br)
        splits = split_count(blocks, shape.keys, launch.bc, device.multiprocessors)
        # Two programs hide each other's latency: 1.1 to 1.4 times as fast (`decode_variants.txt` of the reference results).
        has_many_tiles = shape.keys > splits * launch.bc * FEW_TILES and blocks <= device.multiprocessors
        if self.fmt == E4M3FN and shape.head_dim <= 128 and has_many_tiles and not is_fixed:
            splits = split_count(blocks, shape.keys, launch.bc, 2 * device.multiprocessors)
        return launch, splits

    def _attend(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Plan:
        device, size, fills = device_of(q.device), self.split_size, False
        launch, splits = self._split(shape, mask, device)
        if self._splits_by_rule(shape, mask):
            # The portable kernel splits the keys to give each multiprocessor a program; all its programs run at once.
            streams = shape.queries <= STREAMED_ROWS and shape.keys <= _STREAMED and size is None and not self._is_narrow
            at_once = streams and shape.batch * shape.heads <= device.multiprocessors
            fills = self.kernel is Kernel.AUTO and (splits > 1 or at_once)
            if device.capability and (self.br, self.bc, size) == (None, None, None):
                tiles, most = math.ceil(shape.keys / launch.bc / splits), 3 if self.fmt == E4M3FN else 4
                launch = streaming(launch, tiles, lambda each: device.holds(shared_bytes(each, self.fmt, shape.head_dim)), most)
        if not fills and _hopper_runs(self, mask, device, q=q, k=k, v=v):
            from numdev.attention.kernels.hopper import host

            narrow = None
            if self._is_narrow:
                out = self.output.dtype or torch.float16
                narrow = host.Narrow(self.promotion, int(math.log2(self.softmax.p_scale)), self.quantise, out)
            return host.forward(q, k, v, mask, scale, self.br, self.softmax.threshold, narrow, size)
        from numdev.attention.kernels import portable

        if self.fmt == E4M3FN and 0 < device.capability < 89:
            raise Unsupported("precision", "e4m3fn on a GPU needs compute capability 8.9; give e5m2, or attention=tiled")
        order, number = self.order or Order.FORWARD, splits if size is None else 1
        tiling = Tiling(launch.br, launch.bc, order, splits=number, split_size=size)
        settings = self.precision, tiling, self.softmax, self.is_tf32
        parallel = size is not None and splits > 1 and shape.keys > size
        request = portable.Request(*settings, warps=launch.warps, stages=launch.stages, parallel=parallel)
        return portable.plan(request, q, k, v, mask, scale)


_PRODUCTS = "backward.products"


@dataclass(frozen=True)
class TritonBackward(Planned, Backward):
    """A forward pass, then our backward kernels under `BackwardPrecision.kernel(fmt)`, deterministic by construction.

    The portable kernels, a preparing one and two others, use no atomic additions: on a GPU the bits depend only on the inputs and
    the tiles. `Gradients.launch` states the kernel, and the tiles with which an emulation sums in the same order: `br`
    of the kernel for dK and dV, `bc` of that for dQ. Up to d = 128 the Hopper kernel has the order
    `numdev.attention.tile_schedule.Turns`; at d = 256 its three kernels visit tiles from the first to the last.

    Attributes:
        forward: the forward pass, which saves O and LSE.
        fmt: bf16, fp16 or fp32.
        br, bc: the tile of both kernels; None takes the pinned launches, whose tiles may differ between the kernels.
        order: order of query tiles and of KV tiles; None is the kernels' own, forward for the portable ones.
        recompute: `exp2` or `exp`; either form of delta.
        tf32: whether FP32 operands are multiplied on tensor cores, with 10 fraction bits.
        kernel: see `Kernel`.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(
        PRESET | SIDES | {"tiling.order", _PRODUCTS, "backward.kernel"} | RECURRENCE | RECOMPUTED, "kernel", _BACKWARD_FORMATS
    )

    forward: Attention
    fmt: Format = BF16
    br: int | None = None
    bc: int | None = None
    order: Order | None = None
    recompute: Recompute = Recompute(exponential=Exponential.EXP2)
    tf32: bool = False
    kernel: Kernel = Kernel.AUTO

    def __post_init__(self) -> None:
        _check(self.fmt, _BACKWARD_FORMATS, self.br, self.bc)
        if self.tf32 and self.fmt != FP32:
            raise BadInput(_PRODUCTS, "tf32", f"only products of fp32 can be in tf32, not those of {self.fmt.name}; give ieee")

    @staticmethod
    def of_settings(
        fmt: Format, exponentials: Exponentials, products: Products, kernel: Kernel, tile: Sides, order: Order | None
    ) -> TritonBackward:
        """From settings: after our forward kernels with the tile of their table. `kernel` is of both passes."""
        softmax, recompute = exponentials
        forward = Triton(fmt, softmax=softmax, products=products, kernel=kernel)
        return TritonBackward(forward, fmt, *tile, order, recompute, products is Products.TF32, kernel)

    @property
    def idle(self) -> dict[str, str]:
        unread = {} if self.recompute.reads_output else {"recompute.output": "recompute.delta=output"}
        return unread if self.fmt == FP32 else {_PRODUCTS: "precision=fp32"} | unread

    @property
    def precision(self) -> BackwardPrecision:
        """The policy under which it computes."""
        return BackwardPrecision.kernel(self.fmt)

    @property
    def storage(self) -> torch.dtype:
        return held_dtype(self.fmt)

    @property
    def is_tf32(self) -> bool:
        return self.tf32

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        """The cost model of the Hopper kernels if they ran, or of the two portable ones with the tile of the settings."""
        width = Width.of(self.fmt, self.fmt)
        if launch.name == BACKWARD:
            return CostModel(Algorithm.TILED, width, TILE, bc=TILE, stores_first=True, scales_lse=True)
        if launch.name == WIDE:
            return CostModel(Algorithm.TILED, width, TILE, bc=TILE, passes=3, scales_lse=True)
        return CostModel(Algorithm.TILED, width, self.br, bc=self.bc, passes=2)

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
            raise BadInput("problem.head_dim", shape.head_dim, "the Hopper kernels have 64, 128 and 256")
        if shape.head_dim == 256:
            return KernelArithmetic(self.precision, recompute=self.recompute, tiling=Tiling(64, 64), query_order=Order.FORWARD)
        tiling = Tiling(QUERIES[shape.head_dim], TILE)
        return KernelArithmetic(self.precision, recompute=self.recompute, tiling=tiling, turns=Turns(TILE))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone. Takes rounded inputs of any dtype; returns the gradients in the format's dtype, delta in FP32.

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
        return *(x.to(storage) for x in four), out, lse.float().contiguous()

    def _prepare(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, out: Tensor, lse: Tensor, mask: Mask, scale: float | None
    ) -> Plan:
        check_backward_shapes(q, k, v, do, mask, Saved(out, lse))
        require(q.device)
        if q.shape[-1] != v.shape[-1]:
            raise Unsupported(
                "problem.head_dim", f"the kernels have one for q, k and v, and v has {v.shape[-1]}, q {q.shape[-1]}"
            )
        factor, device = check_scale(softmax_scale(q, scale)), device_of(q.device)
        from numdev.attention.kernels import portable

        inputs = portable.Inputs(q, k, v, do, out, lse)
        if _hopper_runs(self, mask, device, q=q, k=k, v=v, do=do):
            from numdev.attention.kernels.hopper import host

            return host.gradients(inputs, mask, factor)
        settings = self.launches(q.shape[-1], mask, q.device), self.order or Order.FORWARD, self.tf32
        request = portable.BackwardRequest(self.precision, self.recompute, *settings)
        return portable.BackwardPlan(request, inputs, mask, factor).plan

    def launches(self, head_dim: int, mask: Mask, device: torch.device) -> Launches:
        """The tiles of both portable kernels."""
        return choose_backward(self.fmt, head_dim, mask, device_of(device), self.br, self.bc)


def format_of(preset: str, option: str) -> Format:
    """The format that `precision.preset` names; e4m3fn of a policy of E4M3 with scales.

    Raises:
        NotHonoured: for a precision that the kernels do not have.
    """
    return E4M3FN if preset in _NAMED else Triton.accepted_settings.format_of(preset, option)


def exponentials(
    softmax: OnlineSoftmax, exp: Exponential | None, recompute: Recompute | None = None, recompute_exp: Exponential | None = None
) -> Exponentials:
    """Both with the exponential exp2, unless one is set: `exp` and `recompute_exp`."""
    recompute = Recompute() if recompute is None else recompute
    if exp is None and softmax.exp == Exponential.EXP:
        softmax = replace(softmax, exp=Exponential.EXP2)
        if recompute_exp is None and recompute.exponential == Exponential.EXP:
            recompute = replace(recompute, exponential=Exponential.EXP2)
    return softmax, recompute


def _check(fmt: Format, formats: tuple[Format, ...], br: int | None, bc: int | None, splits: int = 1) -> None:
    """Raise BadInput for a format that the kernels do not have, and for sizes that no tile has."""
    if fmt not in formats:
        raise BadInput("precision", fmt.name, f"use one of {', '.join(each.name for each in formats)}")
    Tiling(64 if br is None else br, 64 if bc is None else bc, splits=splits)


def _hopper_runs(settings: Triton | TritonBackward, mask: Mask, device: Device, **tensors: Tensor) -> bool:
    """Whether the Hopper kernel runs a request, of the backward pass with the tensor `do`.

    Raises:
        Unsupported: where it was set and cannot.
    """
    asked = settings.kernel is Kernel.HOPPER
    # Of 8 bits the two multiply differently; of fixed splits, the alignment of tensors must not choose the kernel, and the bits.
    by_name = settings.fmt.bits == 8 or (isinstance(settings, Triton) and settings.split_size is not None)
    if settings.kernel is Kernel.PORTABLE or (by_name and not asked):
        return False
    reason: str | None = f"it needs a GPU of compute capability 9.0, and this is {device.generation}"
    if device.generation == "sm_90":
        reason = refusal(settings, mask, **tensors)
    if reason is not None and asked:
        field = "backward.kernel" if "do" in tensors else "attention.kernel"
        raise Unsupported(field, f"the Hopper kernel cannot run this: {reason}")
    return reason is None
