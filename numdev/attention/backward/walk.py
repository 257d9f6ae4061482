"""How a backward kernel computes, as far as it is known: what its emulation is made of."""

from __future__ import annotations

from dataclasses import dataclass

from numdev.attention.backward.meetings import Turns
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.backward.recompute import Recompute
from numdev.attention.softmax import Exponential
from numdev.attention.tiling import Order, Tiling


@dataclass(frozen=True)
class BackwardWalk:
    """A kernel's arithmetic, and its walk over pairs of tiles on one shape under one mask.

    `br` and `query_order` decide the order in which dK and dV are added up, `bc` and `order` that of dQ.

    Attributes:
        precision: the format of each step.
        recompute: how P and delta are recomputed.
        tiling: the whole walk beside `query_order`, where nothing of it is left to state.
        br: rows of a tile of queries; None where it is not known.
        bc: keys of a tile of keys; None where it is not known.
        order: of the tiles of keys; None where it is not known. Additions by atomics have none: `Order.RANDOM` draws one.
        query_order: of the tiles of queries; None where it is not known, and with `tiling` where it is the same.
        turns: with `tiling`, a walk in which each tile of keys has an order of query tiles of its own; None where none has.
        why: the reason why something is not known.
    """

    precision: BackwardPrecision
    recompute: Recompute = Recompute(exponential=Exponential.EXP2)
    tiling: Tiling | None = None
    br: int | None = None
    bc: int | None = None
    order: Order | None = None
    query_order: Order | None = None
    turns: Turns | None = None
    why: str = "it is not published"
