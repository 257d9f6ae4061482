"""PyTorch's scaled_dot_product_attention, pinned to one of its backends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from numdev.arithmetic.formats import BF16, Format
from numdev.attention.base import Output, check_shapes, softmax_scale
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.honours import PRESET, Honours
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.ran import Ran
from numdev.attention.tiling import Order
from numdev.attention.vendor.dispatch import IN_TORCH, InDtype, Result, dense, hides_rows, proven, refusals
from numdev.attention.walk import Walk
from numdev.errors import Unsupported
from numdev.settings import setting

_FIELD = "attention.backend"


class Backend(Enum):
    """Which of PyTorch's implementations."""

    FLASH = "flash"
    CUDNN = "cudnn"
    EFFICIENT = "efficient"
    MATH = "math"


_BACKENDS = {
    Backend.FLASH: SDPBackend.FLASH_ATTENTION,
    Backend.CUDNN: SDPBackend.CUDNN_ATTENTION,
    Backend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Backend.MATH: SDPBackend.MATH,
}


@dataclass(frozen=True)
class Sdpa(InDtype):
    """`torch.nn.functional.scaled_dot_product_attention` by one backend and no other.

    Attributes:
        backend: see `Backend`.
        fmt: of inputs and output.
    """

    honours: ClassVar[Honours] = Honours(PRESET | {_FIELD}, "kernel", IN_TORCH)

    backend: Backend = setting(Backend.FLASH, "which implementation of PyTorch is asked for: flash, cudnn, efficient or math")
    fmt: Format = BF16

    @property
    def family(self) -> str:
        return self.backend.value

    def cost_model(self, ran: Ran) -> CostModel:
        """The math backend is vanilla attention, on FP32 copies of 16-bit inputs."""
        if self.backend is Backend.MATH:
            width = Width(max(4.0, self.fmt.bits / 8), self.fmt.bits / 8)
            return CostModel(Algorithm.VANILLA, width, holds_scores=True, packs_heads=True)
        return CostModel(Algorithm.TILED, Width.of(self.fmt, self.fmt), packs_heads=True)

    def walk(self, shape: Shape, mask: Mask) -> Walk:
        policy = Precision.kernel(self.fmt)
        if self.backend is Backend.FLASH:
            return _flash(policy, shape)
        if self.backend is Backend.EFFICIENT:  # the names of its kernels: 64x64, 64x128, 32x128
            return Walk(policy, bc=64 if shape.head_dim <= 64 else 128, order=Order.FORWARD)
        return Walk(policy)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """No LSE: the function does not return it.

        Raises:
            Unsupported: with PyTorch's own reason, if the backend cannot run the request or another one ran.
        """
        check_shapes(q, k, v, mask)
        self._check_device(q.device)
        factor = softmax_scale(q, scale)
        q, k, v = q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)
        arguments: dict[str, Any] = {"scale": factor, "enable_gqa": q.shape[1] != k.shape[1]} | self._mask(q, k, mask)

        def run() -> Result:
            with sdpa_kernel([_BACKENDS[self.backend]]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments), None

        layouts = tuple((t.shape, t.stride(), t.data_ptr() % 16) for t in (q, k, v))
        key = (self, layouts, mask, factor, q.device)
        with refusals(_FIELD, self.backend.value):
            (out, _), kernel = proven(run, self.backend.value, _FIELD, key, q.device)
        return Output(out, None, ran=Ran(kernel))

    def _check_device(self, device: torch.device) -> None:
        if device.type != "cuda" and self.backend not in (Backend.FLASH, Backend.MATH):
            raise Unsupported(_FIELD, f"{self.backend.value} runs on CUDA devices; on a CPU there are flash and math")

    def _mask(self, q: Tensor, k: Tensor, mask: Mask) -> dict[str, Any]:
        if mask.is_none:
            return {}
        return _arguments(self.backend, mask, q.shape[0], q.shape[-2], k.shape[-2], q.device)


def _flash(policy: Precision, shape: Shape) -> Walk:
    """The launch templates of FlashAttention-2, whose blocks go from the last to the first: the last may be ragged.

    Where blocks of 64 rows would fill less than 0.8 of twice the multiprocessors, it takes another kernel, of wider tiles, and
    splits the keys (its `num_splits_heuristic`).
    """
    rows = shape.packed
    blocks = rows.batch * rows.heads * math.ceil(rows.queries / 64)
    if torch.cuda.is_available() and blocks < 1.6 * torch.cuda.get_device_properties(0).multi_processor_count:
        why = f"{blocks} blocks of 64 rows do not fill the GPU, so that it splits the keys: give more heads, or a larger batch"
        return Walk(policy, why=why)
    bc = {64: 128, 128: 64}.get(shape.head_dim)
    return Walk(policy, bc=bc, order=Order.REVERSE, why="its tile is known at head_dim 64 and 128 alone")


def _arguments(backend: Backend, mask: Mask, batch: int, queries: int, keys: int, device: torch.device) -> dict[str, Any]:
    """The arguments that state the mask. torch aligns `is_causal` top left, numdev bottom right: equal only for equal lengths."""
    causal = mask == Mask(causal=True)
    if causal and queries == keys:
        return {"is_causal": True}
    if hides_rows(mask, batch, queries, keys):
        raise Unsupported("problem", "some rows see no key, for which PyTorch does not define a result")
    seen = dense(mask, queries, keys, device)
    if seen is None:
        return {}
    if causal and backend in (Backend.FLASH, Backend.EFFICIENT) and device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # late: it imports torch's compiler

        return {"attn_mask": causal_lower_right(queries, keys)}
    if backend is Backend.FLASH:
        field = "problem.window" if mask.window is not None else "problem.key_lengths" if mask.key_lengths else "problem.causal"
        raise Unsupported(field, "flash takes no mask but a causal one, on a CPU only for as many queries as keys")
    return {"attn_mask": seen.expand(batch, 1, queries, keys)}
