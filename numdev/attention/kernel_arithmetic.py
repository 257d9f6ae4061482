"""How a kernel computes, as far as it is known: what its emulation is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Exponential, OnlineSoftmax, Recompute
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiling import Order, Tiling

AnyPrecision = TypeVar("AnyPrecision", Precision, BackwardPrecision)


@dataclass(frozen=True)
class KernelArithmetic(Generic[AnyPrecision]):
    """A kernel's arithmetic, and its order over the tiles of one shape under one mask.

    Forward, `br` changes no bit of a row. Backward, `br` and `query_order` decide the order in which dK and dV are added up, `bc`
    and `order` that of dQ.

    Attributes:
        precision: the format of each step.
        softmax: the recurrence of a forward pass.
        recompute: how a backward pass recomputes P and delta.
        tiling: all of the order but `query_order`, where nothing of it is left to choose.
        br: rows of a tile of queries; None where it is not known.
        bc: keys of a tile of keys; None where it is not known.
        order: of the tiles of keys; None where it is not known. Additions by atomics have none: `Order.RANDOM` draws one.
        query_order: of the tiles of queries; None where it is not known, and with `tiling` where it is the same.
        splits: ranges of keys; None where it is not known.
        turns: with `tiling`, an order of query tiles for each tile of keys; None where they have no own.
        why: the reason why something is not known.
    """

    precision: AnyPrecision
    softmax: OnlineSoftmax = OnlineSoftmax(exp=Exponential.EXP2)
    recompute: Recompute = Recompute(exponential=Exponential.EXP2)
    tiling: Tiling | None = None
    br: int | None = None
    bc: int | None = None
    order: Order | None = None
    query_order: Order | None = None
    splits: int | None = None
    turns: Turns | None = None
    why: str = "it is not published"
