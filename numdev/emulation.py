"""What a kernel is predicted to return: tiled attention with its formats, recurrence, order and tile."""

from __future__ import annotations

from typing import NamedTuple

from numdev.attention.base import Attention
from numdev.attention.flex import Flex
from numdev.attention.sdpa import Backend, Sdpa
from numdev.attention.tiled import Tiled
from numdev.attention.triton import Kernel, Triton
from numdev.errors import BadInput
from numdev.precision import Precision
from numdev.softmax import Exponential, OnlineSoftmax
from numdev.tiling import Order, Tiling


class Walk(NamedTuple):
    """How a kernel walks over the keys, as far as it is known. `Br` changes no bit of a row."""

    bc: int | None = None
    order: Order | None = None


def emulation_of(variant: Attention, head_dim: int, bc: int | None = None, order: Order | None = None, splits: int = 1) -> Tiled:
    """`Tiled` under the policy of `variant`, a kernel: FP32 with its formats, recurrence, order and tile.

    Args:
        variant: the kernel.
        head_dim: of the problem, on which the tile of PyTorch's kernels depends.
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
    known = _known(variant, head_dim)
    bc, order = bc or known.bc, order or known.order
    if bc is None or order is None:
        mend = f"it is not known of {type(variant).__name__.lower()} here; say what the emulation shall take"
        raise BadInput("tiling.bc" if bc is None else "tiling.order", None, mend)
    tiling = Tiling(bc=bc, order=order, splits=getattr(variant, "splits", splits))
    return Tiled(policy, tiling, softmax, count=False)


def _known(variant: Attention, head_dim: int) -> Walk:
    if isinstance(variant, Triton):
        return _ours(variant)
    if isinstance(variant, Flex):
        return Walk(variant.bc, Order.FORWARD)  # but for blocks that a mask cuts, which come first
    if isinstance(variant, Sdpa) and variant.backend is Backend.FLASH:
        # The launch templates of FlashAttention-2, whose blocks go from the last to the first: the last may be ragged.
        return Walk({64: 128, 128: 64}.get(head_dim), Order.REVERSE)
    if isinstance(variant, Sdpa) and variant.backend is Backend.EFFICIENT:
        return Walk(64 if head_dim <= 64 else 128, Order.FORWARD)  # the names of its kernels say so: 64x64, 64x128, 32x128
    return Walk()


def _ours(variant: Triton) -> Walk:
    if variant.kernel is Kernel.AUTO:
        raise BadInput("attention.kernel", "auto", "an emulation needs one kernel; give portable or hopper")
    if variant.kernel is Kernel.HOPPER:
        return Walk(128, Order.REVERSE)
    return Walk(variant.bc, variant.order or Order.FORWARD)
