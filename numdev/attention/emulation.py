"""The prediction of a kernel's result: tiled attention with the kernel's formats, recurrence, tiles and orders."""

from __future__ import annotations

from collections.abc import Mapping

from numdev.attention.base import Attention, ForwardPass
from numdev.attention.differentiable import WithGradients
from numdev.attention.mask import Mask
from numdev.attention.problem import Shape
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput

_NO_MASK = Mask()


def emulation_of(
    variant: ForwardPass, shape: Shape, mask: Mask = _NO_MASK, bc: int | None = None, order: Order | None = None, splits: int = 1
) -> Tiled:
    """`Tiled` with the formats, recurrence, order and tile that the kernel `variant` declares; see `KernelArithmetic`.

    Args:
        variant: the kernel.
        shape: of the problem, on which the tiles of PyTorch's kernels depend.
        mask: likewise.
        bc: keys in a tile; None is the kernel's own number.
        order: of the tiles; None is the kernel's own.
        splits: ranges of keys, for a kernel that does not say its own.

    Raises:
        BadInput: where something is not known and not given, and for `Kernel.AUTO`, which is one of two kernels.
        NotHonoured: for an implementation that declares no arithmetic.
    """
    known = variant.arithmetic(shape, mask)
    tiling = known.tiling
    if tiling is None:
        bc, order = bc or known.bc, order or known.order
        if bc is None or order is None:
            raise _unknown(variant, known.why, {"tiling.bc": bc, "tiling.order": order})
        tiling = Tiling(bc=bc, order=order, splits=known.splits or splits)
    return Tiled(known.precision, tiling, known.softmax, count=False)


def gradients_emulation_of(
    variant: WithGradients,
    shape: Shape,
    mask: Mask,
    br: int | None = None,
    bc: int | None = None,
    order: Order | None = None,
    query_order: Order | None = None,
    forward: Attention | None = None,
) -> TiledBackward:
    """`TiledBackward` with the formats, tiles and orders that the kernel `variant` declares; see `KernelArithmetic`.

    Args:
        variant: the kernel.
        shape: of the problem, on which the tiles of PyTorch's kernels depend.
        mask: likewise.
        br: rows in a tile of queries; None is the kernel's own number.
        bc: keys in a tile of keys; None is the kernel's own number.
        order: order of the tiles of keys; None is the kernel's own.
        query_order: order of the tiles of queries; None is the kernel's own.
        forward: the forward pass from which the emulation takes O and LSE; None is the emulation of the variant's own. With
            `variant.forward_pass` only the backward pass is emulated.

    Raises:
        BadInput: if something about the kernel is neither known nor given.
        NotHonoured: for an implementation that declares no arithmetic.
    """
    known = variant.arithmetic(shape, mask)
    tiling, rows_in = known.tiling, known.query_order
    if tiling is None:
        br, bc = br or known.br, bc or known.bc
        order, rows_in = order or known.order, query_order or known.query_order
        if br is None or bc is None or order is None or rows_in is None:
            needed = {"tiling.br": br, "tiling.bc": bc, "tiling.order": order, "baseline.query_order": rows_in}
            raise _unknown(variant, known.why, needed)
        tiling = Tiling(br, bc, order)
    if forward is None:
        forward = _emulated_forward(variant.forward, shape, mask)
    return TiledBackward(forward, known.precision, tiling, known.recompute, rows_in, count=False, turns=known.turns)


def _emulated_forward(forward: object, shape: Shape, mask: Mask) -> Tiled:
    name = type(forward).__name__
    if not isinstance(forward, ForwardPass):
        raise BadInput("forward", name, "its arithmetic is not declared; give the forward pass")
    try:
        return emulation_of(forward, shape, mask)
    except BadInput as error:
        mend = f"its emulation needs more settings: {error}; or give the forward pass"
        raise BadInput("forward", name.lower(), mend) from None


def _unknown(variant: object, why: str, needed: Mapping[str, object]) -> BadInput:
    mend = f"{why}, for {type(variant).__name__.lower()}; state what the emulation should use"
    return BadInput(next(name for name, value in needed.items() if value is None), None, mend)
