"""The predicted gradients of a kernel: the tiled backward pass with the kernel's formats, tiles and orders."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from numdev.attention.backward.tiled import TiledBackward
from numdev.attention.backward.walk import BackwardWalk
from numdev.attention.base import Attention, Emulated
from numdev.attention.emulation import emulation_of
from numdev.attention.mask import Mask
from numdev.attention.problem import Shape
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput


@runtime_checkable
class EmulatedBackward(Protocol):
    """An implementation of the backward pass that declares its own emulation."""

    @property
    def forward(self) -> Attention:
        """The forward pass that it follows."""
        ...

    @property
    def forward_pass(self) -> Attention:
        """The forward pass that returns the O and the LSE that the backward pass reads."""
        ...

    def walk(self, shape: Shape, mask: Mask) -> BackwardWalk:
        """How it computes and visits the tiles, as far as this is known, and why the rest is not."""
        ...


def gradients_emulation_of(
    variant: EmulatedBackward,
    shape: Shape,
    mask: Mask,
    br: int | None = None,
    bc: int | None = None,
    order: Order | None = None,
    query_order: Order | None = None,
    forward: Attention | None = None,
) -> TiledBackward:
    """`TiledBackward` with the formats, tiles and orders that the kernel `variant` declares; see `BackwardWalk`.

    Args:
        variant: the kernel.
        shape: shape of the problem, on which the tiles of PyTorch's kernels depend.
        mask: mask of the problem, on which they depend too.
        br: rows in a tile of queries; None is the kernel's own number.
        bc: keys in a tile of keys; None is the kernel's own number.
        order: order of the tiles of keys; None is the kernel's own.
        query_order: order of the tiles of queries; None is the kernel's own.
        forward: the forward pass from which the emulation takes O and LSE; None is the emulation of the variant's own. With
            `variant.forward_pass` only the backward pass is emulated.

    Raises:
        BadInput: if something about the kernel is neither known nor given.
    """
    walk = variant.walk(shape, mask)
    tiling, rows_in = walk.tiling, walk.query_order
    if tiling is None:
        br, bc = br or walk.br, bc or walk.bc
        order, rows_in = order or walk.order, query_order or walk.query_order
        if br is None or bc is None or order is None or rows_in is None:
            needed = {"tiling.br": br, "tiling.bc": bc, "tiling.order": order, "baseline.query_order": rows_in}
            mend = f"{walk.why}, for {type(variant).__name__.lower()}; state what the emulation should use"
            raise BadInput(next(name for name, value in needed.items() if value is None), None, mend)
        tiling = Tiling(br, bc, order)
    if forward is None:
        if not isinstance(variant.forward, Emulated):
            raise BadInput("forward", type(variant.forward).__name__, "its arithmetic is not declared; give the forward pass")
        try:
            forward = emulation_of(variant.forward, shape, mask)
        except BadInput as error:
            name = type(variant.forward).__name__.lower()
            raise BadInput("forward", name, f"its emulation needs more settings: {error}; or give the forward pass") from None
    return TiledBackward(forward, walk.precision, tiling, walk.recompute, rows_in, count=False, turns=walk.turns)
