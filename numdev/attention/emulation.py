"""What a kernel is predicted to return: tiled attention with its formats, recurrence, order and tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from numdev.attention.base import Attention
from numdev.attention.kernels.launch import hopper_bc
from numdev.attention.kernels.splits import ROWS
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Kernel, Triton
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.errors import BadInput

_NO_MASK = Mask()


@dataclass(frozen=True)
class Walk:
    """How a kernel walks over the keys, as far as it is known; `why` it is not. `Br` changes no bit of a row."""

    bc: int | None = None
    order: Order | None = None
    why: str = "it is not published"


def emulation_of(
    variant: Attention,
    shape: Shape,
    mask: Mask = _NO_MASK,
    bc: int | None = None,
    order: Order | None = None,
    splits: int = 1,
) -> Tiled:
    """`Tiled` under the policy of `variant`, a kernel: FP32 with its formats, recurrence, order and tile.

    Args:
        variant: the kernel.
        shape: of the problem, on which the walk of PyTorch's kernels depends.
        mask: likewise.
        bc: what the emulation takes; None is what is known of the CUDA kernel.
        order: likewise.
        splits: likewise, for a kernel that does not say its own.

    Raises:
        BadInput: where it is not known and not given, and for `Kernel.AUTO`, which is one of two kernels.
    """
    policy = getattr(variant, "precision", Precision.kernel(variant.format))
    softmax = getattr(variant, "softmax", OnlineSoftmax(exp=Exponential.EXP2))
    if isinstance(tiling := getattr(variant, "tiling", None), Tiling):
        return Tiled(policy, tiling, softmax, count=False)
    known = _known(variant, shape, mask)
    bc, order = bc or known.bc, order or known.order
    if bc is None or order is None:
        mend = f"{known.why}, for {type(variant).__name__.lower()}; say what the emulation shall take"
        raise BadInput("tiling.bc" if bc is None else "tiling.order", None, mend)
    tiling = Tiling(bc=bc, order=order, splits=_splits(variant, shape, mask) if isinstance(variant, Triton) else splits)
    return Tiled(policy, tiling, softmax, count=False)


def _known(variant: Attention, shape: Shape, mask: Mask) -> Walk:
    if isinstance(variant, Triton):
        return _ours(variant, shape.head_dim)
    if isinstance(variant, Flex):
        why = (
            "it depends on the launch"
            if mask.is_none
            else "blocks that the mask cuts come first, an order that no tiling here has"
        )
        return Walk(variant.bc, Order.FORWARD if mask.is_none else None, why)
    if isinstance(variant, Sdpa) and variant.backend is Backend.FLASH:
        return _flash(shape)
    if isinstance(variant, Sdpa) and variant.backend is Backend.EFFICIENT:
        return Walk(64 if shape.head_dim <= 64 else 128, Order.FORWARD)  # the names of its kernels: 64x64, 64x128, 32x128
    return Walk()


def _flash(shape: Shape) -> Walk:
    """The launch templates of FlashAttention-2, whose blocks go from the last to the first: the last may be ragged.

    Where blocks of 64 rows would fill less than 0.8 of twice the multiprocessors, it takes another kernel, of wider tiles, and
    splits the keys (its `num_splits_heuristic`).
    """
    rows = shape.packed
    blocks = rows.batch * rows.heads * math.ceil(rows.queries / 64)
    if torch.cuda.is_available() and blocks < 1.6 * torch.cuda.get_device_properties(0).multi_processor_count:
        why = f"{blocks} blocks of 64 rows do not fill the GPU, so that it splits the keys: give more heads, or a larger batch"
        return Walk(why=why)
    return Walk({64: 128, 128: 64}.get(shape.head_dim), Order.REVERSE, "its tile is known at head_dim 64 and 128 alone")


def _splits(variant: Triton, shape: Shape, mask: Mask) -> int:
    """Of ours: one, unless its own rule may find more."""
    rows = shape.packed.queries if mask.window is None else shape.queries
    if variant.splits is None and variant.kernel is Kernel.PORTABLE and rows <= ROWS and mask.window is None:
        why = "the kernel divides the keys of so few queries by a rule of its own, which depends on the GPU; give a number"
        raise BadInput("tiling.splits", None, why)
    return variant.splits or 1


def _ours(variant: Triton, head_dim: int) -> Walk:
    if variant.kernel is Kernel.AUTO:
        raise BadInput("attention.kernel", "auto", "an emulation needs one kernel; give portable or hopper")
    if variant.kernel is Kernel.HOPPER:
        return Walk(hopper_bc(head_dim), Order.REVERSE)
    return Walk(variant.bc, variant.order or Order.FORWARD, "it depends on the launch")
