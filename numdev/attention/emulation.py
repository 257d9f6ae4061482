"""What a kernel is predicted to return: tiled attention with its formats, recurrence, order and tile."""

from __future__ import annotations

from numdev.attention.base import Emulated
from numdev.attention.mask import Mask
from numdev.attention.problem import Shape
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput

_NO_MASK = Mask()


def emulation_of(
    variant: Emulated,
    shape: Shape,
    mask: Mask = _NO_MASK,
    bc: int | None = None,
    order: Order | None = None,
    splits: int = 1,
) -> Tiled:
    """`Tiled` with the formats, recurrence, order and tile that `variant`, a kernel, says it has; see `Walk`.

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
    walk = variant.walk(shape, mask)
    if walk.tiling is not None:
        return Tiled(walk.precision, walk.tiling, walk.softmax, count=False)
    bc, order = bc or walk.bc, order or walk.order
    if bc is None or order is None:
        mend = f"{walk.why}, for {type(variant).__name__.lower()}; state what the emulation should use"
        raise BadInput("tiling.bc" if bc is None else "tiling.order", None, mend)
    return Tiled(walk.precision, Tiling(bc=bc, order=order, splits=walk.splits or splits), walk.softmax, count=False)
