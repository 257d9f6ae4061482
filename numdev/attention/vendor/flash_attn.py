"""FlashAttention from its own packages, versions 2, 3 and 4, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, Format
from numdev.attention.base import KernelArithmetic, Output, check_shapes, softmax_scale
from numdev.attention.groups import PRESET, AcceptedSettings
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Shape
from numdev.attention.tiling import Order
from numdev.attention.vendor.dispatch import ByAutograd, Packaged, Result, hides_rows
from numdev.errors import BadInput, Unsupported
from numdev.settings import setting

_FORMATS = (BF16, FP16)
_VERSION = "which FlashAttention: fa2, fa3 or fa4, of the packages flash-attn, flash-attn-3 (or fa3-fwd) and flash-attn-4"


class FlashVersion(Enum):
    """Which FlashAttention."""

    FA2 = "fa2"
    FA3 = "fa3"
    FA4 = "fa4"


_PLACES = {
    FlashVersion.FA2: {"flash-attn": "flash_attn.flash_attn_interface"},
    FlashVersion.FA3: {"flash-attn-3": "flash_attn_interface", "fa3-fwd": "fa3_fwd_interface"},
    FlashVersion.FA4: {"flash-attn-4": "flash_attn.cute.interface"},
}
# Keys in a tile on a Hopper GPU, by head_dim: without a mask, and under a causal limit or a window. From hopper/tile_size.h, and
# `_tile_size_fwd_sm90` of flash_attn/cute/interface.py.
_KEYS = {FlashVersion.FA3: {64: (192, 128), 128: (176, 128)}, FlashVersion.FA4: {64: (128, 128), 96: (144, 128), 128: (128, 128)}}


@dataclass(frozen=True)
class FlashAttn(Packaged):
    """`flash_attn_func` of one version and no other, inputs and output in `fmt`; it exchanges tokens and heads by views."""

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET | {"attention.version"}, "kernel", _FORMATS)
    field: ClassVar[str] = "attention.version"
    deterministic: ClassVar[bool] = False

    version: FlashVersion = setting(FlashVersion.FA4, _VERSION)
    fmt: Format = BF16

    @property
    def family(self) -> str:
        return "flash" if self.version is FlashVersion.FA2 else self.version.value

    @property
    def places(self) -> Mapping[str, str]:
        return _PLACES[self.version]

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Precision]:
        """The tiles of versions 3 and 4 on Hopper GPUs, whose blocks go from the last to the first, unsplit."""
        if self.version is FlashVersion.FA2:
            return flash_2(self.precision, shape)
        bc = _KEYS[self.version].get(shape.head_dim, (None, None))[not mask.is_none] if _is_hopper() else None
        why = f"its tile is known on Hopper GPUs alone, at head_dim {' and '.join(map(str, _KEYS[self.version]))}"
        return KernelArithmetic(self.precision, bc=bc, order=Order.REVERSE, why=why)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """What the package cannot run is refused with its own reason. Its causal limit is aligned bottom right, as `Mask` is."""
        check_shapes(q, k, v, mask)
        function = self.function("flash_attn_func", q.device)
        if mask.key_lengths is not None:
            raise Unsupported("problem.key_lengths", "flash_attn_func takes none; leave them out, or give attention=flex")
        factor, causal, window = softmax_scale(q, scale), mask.causal, mask.window
        q, k, v = (x.to(self.storage).transpose(1, 2) for x in (q, k, v))
        more: dict[str, Any] = {"return_lse" if self.version is FlashVersion.FA4 else "return_attn_probs": True}
        if window is not None:  # keys to the left and to the right
            more["window_size"] = (window - 1, 0 if causal else window - 1)

        def run() -> Result:
            out, lse, *_ = function(q, k, v, softmax_scale=factor, causal=causal, deterministic=self.deterministic, **more)
            if self.version is FlashVersion.FA2 and hides_rows(mask, q.shape[0], q.shape[1], k.shape[1]):
                lse = lse.masked_fill(lse.isposinf(), float("-inf"))  # which its backward pass wants for rows that see no key
            return out.transpose(1, 2), lse

        return self.launched(run, q, k, v, mask, factor)


class _Deterministic(FlashAttn):
    """The forward pass before a deterministic backward pass: the package takes the choice with it."""

    deterministic = True


@dataclass(frozen=True)
class FlashAttnBackward(ByAutograd):
    """The gradients of `flash_attn_func` of one version and no other; see `FlashAttn`."""

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(
        PRESET | {"backward.version", "backward.deterministic"}, "kernel", _FORMATS
    )
    field: ClassVar[str] = "backward.version"

    version: FlashVersion = setting(FlashVersion.FA4, _VERSION)
    deterministic: bool = setting(False, "whether FlashAttention adds to dQ in one order, with the same bits in each call")
    fmt: Format = BF16

    @property
    def forward(self) -> FlashAttn:
        return (_Deterministic if self.deterministic else FlashAttn)(self.version, self.fmt)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[BackwardPrecision]:
        """The tiles of versions 3 and 4 on Hopper GPUs, where a tile of keys meets those of queries from the first to the last.

        They add to dQ in any order; a deterministic pass from the first tile of keys, under a limit from the last.

        Raises:
            BadInput: for heads that share a KV head.
        """
        if shape.heads != shape.kv_heads:
            hint = "give as many as heads: no emulation sums dK and dV of heads that share a KV head as the package does"
            raise BadInput("problem.kv_heads", shape.kv_heads, hint)
        if self.version is FlashVersion.FA2:
            known = flash_2_gradients(self.fmt, shape)
            why = "the sums of dQ that a deterministic pass adds up depend on the GPU"
            return replace(known, order=None, why=why) if self.deterministic else known
        cut = not mask.is_none
        tiles = {64: (128, 128), 96: (64, 128), 128: (64 if cut else 80, 128)}
        br, bc = tiles.get(shape.head_dim, (None, None)) if _is_hopper() else (None, None)
        last_first = cut if self.version is FlashVersion.FA4 else mask.causal and mask.window is None
        order = (Order.REVERSE if last_first else Order.FORWARD) if self.deterministic else Order.RANDOM
        why = "its tiles are known on Hopper GPUs alone, at head_dim 64, 96 and 128"
        return KernelArithmetic(self.precision, br=br, bc=bc, order=order, query_order=Order.FORWARD, why=why)


def _is_hopper() -> bool:
    """Whether the GPU is one; without a GPU the emulation is that of a Hopper GPU."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9


def flash_2(policy: Precision, shape: Shape) -> KernelArithmetic[Precision]:
    """The launch templates of FlashAttention-2, whose blocks go from the last to the first: the last may be ragged.

    Where blocks of 64 rows would fill less than 0.8 of twice the multiprocessors, it takes another kernel, of wider tiles, and
    splits the keys (its `num_splits_heuristic`).
    """
    rows = shape.packed(Mask(), 0)
    blocks = rows.batch * rows.heads * math.ceil(rows.queries / 64)
    if torch.cuda.is_available() and blocks < 1.6 * torch.cuda.get_device_properties(0).multi_processor_count:
        why = f"{blocks} blocks of 64 rows do not fill the GPU, so that it splits the keys: give more heads, or a larger batch"
        return KernelArithmetic(policy, why=why)
    bc = {64: 128, 128: 64}.get(shape.head_dim)
    return KernelArithmetic(policy, bc=bc, order=Order.REVERSE, why="its tile is known at head_dim 64 and 128 alone")


def flash_2_gradients(fmt: Format, shape: Shape) -> KernelArithmetic[BackwardPrecision]:
    """The launch templates of FlashAttention-2 for GPUs with 144 KiB of shared memory.

    A block of keys meets the tiles of queries from the last to the first, and adds to dQ by atomics, in any order.
    """
    tiles = {32: (128, 128), 64: (128, 128), 96: (64, 128), 128: (64, 128)}
    br, bc = tiles.get(shape.head_dim, (None, None))
    why = "its tiles are known only at head_dim 32, 64, 96 and 128"
    policy = BackwardPrecision.kernel(fmt)
    return KernelArithmetic(policy, br=br, bc=bc, order=Order.RANDOM, query_order=Order.REVERSE, why=why)
