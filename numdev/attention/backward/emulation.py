"""What the gradients of a kernel are predicted to be: the tiled backward pass with its formats, tiles and orders."""

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
        """The same with the O and the LSE that the backward pass reads."""
        ...

    def walk(self, shape: Shape, mask: Mask) -> BackwardWalk:
        """How it computes and walks over the tiles, as far as it is known, and why the rest is not."""
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
    """`TiledBackward` with the formats, tiles and orders that `variant`, a kernel, says it has; see `BackwardWalk`.

    Args:
        variant: the kernel.
        shape: of the problem, on which the tiles of PyTorch's kernels depend.
        mask: likewise.
        br: rows of a tile of queries that the emulation takes; None is what is known of the kernel.
        bc: keys of a tile of keys, likewise.
        order: of the tiles of keys, likewise.
        query_order: of the tiles of queries, likewise.
        forward: what the emulation takes O and LSE from; None is the emulation of the variant's own forward pass. With
            `variant.forward_pass` the backward pass alone is emulated.

    Raises:
        BadInput: where something is not known and not given.
    """
    walk = variant.walk(shape, mask)
    tiling, rows_in = walk.tiling, walk.query_order
    if tiling is None:
        br, bc = br or walk.br, bc or walk.bc
        order, rows_in = order or walk.order, query_order or walk.query_order
        if br is None or bc is None or order is None or rows_in is None:
            needed = {"tiling.br": br, "tiling.bc": bc, "tiling.order": order, "baseline.query_order": rows_in}
            mend = f"{walk.why}, for {type(variant).__name__.lower()}; say what the emulation shall take"
            raise BadInput(next(name for name, value in needed.items() if value is None), None, mend)
        tiling = Tiling(br, bc, order)
    if forward is None:
        if not isinstance(variant.forward, Emulated):
            raise BadInput("forward", type(variant.forward).__name__, "it does not say how it computes; give the forward pass")
        try:
            forward = emulation_of(variant.forward, shape, mask)
        except BadInput as error:
            name = type(variant.forward).__name__.lower()
            raise BadInput("forward", name, f"its emulation needs more, {error}; or give the forward pass") from None
    return TiledBackward(forward, walk.precision, tiling, walk.recompute, rows_in, count=False, turns=walk.turns)
