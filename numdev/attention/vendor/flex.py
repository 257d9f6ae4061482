"""PyTorch's FlexAttention, compiled, and its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, Format
from numdev.attention.base import KernelArithmetic, Output, check_shapes, softmax_scale
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.groups import PRESET, SIDES, AcceptedSettings
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Shape
from numdev.attention.tiling import KernelLaunch, Order
from numdev.attention.vendor.dispatch import IN_TORCH, ByAutograd, InDtype, Result, is_refusal, proven
from numdev.errors import BadInput, Unsupported

_FIELD = "attention"
_CUTS = "blocks that the mask cuts come first, an order that no tiling here has"


@dataclass(frozen=True)
class Flex(InDtype):
    """`torch.nn.attention.flex_attention` under `torch.compile`, never in its eager form.

    `br` and `bc` are the tile of the generated kernel; None leaves it to PyTorch. `fmt` is that of inputs and output.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET | SIDES, "kernel", IN_TORCH)

    br: int | None = None
    bc: int | None = None
    fmt: Format = BF16

    @staticmethod
    def of_settings(fmt: Format, tile: tuple[int | None, int | None]) -> Flex:
        """From settings: `tile` as `numdev.attention.tiling.sides` has it."""
        return Flex(*tile, fmt)

    @property
    def family(self) -> str:
        return "flex"

    def __post_init__(self) -> None:
        for field, side in (("br", self.br), ("bc", self.bc)):
            if side is not None and (side < 16 or side & (side - 1)):
                raise BadInput(f"tiling.{field}", side, "FlexAttention takes powers of two of at least 16, or null")

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        return CostModel(Algorithm.TILED, Width.of(self.fmt, self.fmt), self.br, packed_rows=1)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Precision]:
        """Under a mask it visits the blocks that the mask cuts first, an order that no tiling here has."""
        order, why = (Order.FORWARD, "it depends on the launch") if mask.is_none else (None, _CUTS)
        return KernelArithmetic(self.precision, bc=self.bc, order=order, why=why)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        check_shapes(q, k, v, mask)
        if q.device.type != "cuda":
            raise Unsupported(_FIELD, "FlexAttention is compiled for CUDA devices here; use device=cuda")
        q, k, v = q.to(self.storage), k.to(self.storage), v.to(self.storage)
        options = {name: side for name, side in (("BLOCK_M", self.br), ("BLOCK_N", self.bc)) if side is not None}
        call = _compiled(tuple(options.items()), softmax_scale(q, scale), q.shape[1] != k.shape[1])
        blocks = None if mask.is_none else _block_mask(mask, q.shape[0], q.shape[-2], k.shape[-2], q.device)
        key = (self, tuple((t.shape, t.stride()) for t in (q, k, v)), mask, scale, q.device)
        # Beyond its limit of recompilations the compiler would silently run the eager form.
        limits = {"recompile_limit": 4096, "accumulated_recompile_limit": 4096, "fail_on_recompile_limit_hit": True}
        with torch._dynamo.config.patch(limits), keeping_graphs():
            try:
                (out, lse), kernel = proven(lambda: call(q, k, v, blocks), "flex", _FIELD, key, q.device)
            except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
                if not is_refusal(error):
                    raise
                raise Unsupported(_FIELD, f"FlexAttention: {_reason(error)}") from None
        return Output(out, lse, launch=KernelLaunch(kernel))


def keeping_graphs() -> AbstractContextManager[None]:
    """Within it the compiler leaves what a forward pass saved as it was, so that gradients can be taken again and again."""
    from torch._functorch import config  # late: it imports torch's compiler

    context: AbstractContextManager[None] = config.patch(donated_buffer=False)
    return context


def _reason(error: Exception) -> str:
    """The sentence of a compiler's error that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "out of resource" in line or "shared memory" in line]
    return (telling or lines or [type(error).__name__])[0][:300]


@lru_cache(maxsize=256)
def _compiled(options: tuple[tuple[str, int], ...], scale: float, grouped: bool) -> Callable[..., Result]:
    from torch.nn.attention import flex_attention as flex

    attention: Any = flex.flex_attention
    wants: dict[str, Any] = {"return_lse": True}
    if "return_aux" in inspect.signature(flex.flex_attention).parameters:
        wants = {"return_aux": flex.AuxRequest(lse=True)}

    def run(q: Tensor, k: Tensor, v: Tensor, blocks: Any) -> Result:
        out, extra = attention(q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped, kernel_options=dict(options), **wants)
        return out, getattr(extra, "lse", extra)

    return torch.compile(run, dynamic=False, fullgraph=True)


@lru_cache(maxsize=64)
def _block_mask(mask: Mask, batch: int, queries: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    shift = keys - queries
    lengths = None if mask.key_lengths is None else torch.tensor(mask.key_lengths, device=device)
    limits: list[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = []
    if mask.causal:
        limits.append(lambda b, h, i, j: j <= i + shift)
    if (window := mask.window) is not None:
        limits.append(lambda b, h, i, j: (i + shift - j).abs() < window)
    if lengths is not None:
        limits.append(lambda b, h, i, j: j < lengths[b])
    return create_block_mask(and_masks(*limits), None if lengths is None else batch, None, queries, keys, device=device)


@dataclass(frozen=True)
class FlexBackward(ByAutograd):
    """The gradients of `torch.nn.attention.flex_attention` under `torch.compile`, never in its eager form; see `Flex`.

    `br` and `bc` are the tile of the forward pass; that of the backward pass is always left to PyTorch.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET | SIDES, "kernel", IN_TORCH)

    br: int | None = None
    bc: int | None = None
    fmt: Format = BF16

    @staticmethod
    def of_settings(fmt: Format, tile: tuple[int | None, int | None]) -> FlexBackward:
        """See `Flex.of_settings`."""
        return FlexBackward(*tile, fmt)

    def __post_init__(self) -> None:
        Flex(self.br, self.bc)  # checks the sizes

    @property
    def forward(self) -> Flex:
        return Flex(self.br, self.bc, self.fmt)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[BackwardPrecision]:
        """One pass computes dQ, another dK and dV, each over the tiles in order; but blocks that the mask cuts come first."""
        order, why = (Order.FORWARD, "it depends on the launch") if mask.is_none else (None, _CUTS)
        return KernelArithmetic(self.precision, order=order, query_order=order, why=why)

    def compiling(self) -> AbstractContextManager[None]:
        return keeping_graphs()
