"""How a kernel computes, as far as it is known: what its emulation is made of."""

from __future__ import annotations

from dataclasses import dataclass

from numdev.attention.precision import Precision
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiling import Order, Tiling


@dataclass(frozen=True)
class Walk:
    """A kernel's arithmetic, and its walk over the keys on one shape under one mask. `Br` changes no bit of a row.

    Attributes:
        precision: the format of each step.
        softmax: the recurrence.
        tiling: the whole walk, where nothing of it is left to state.
        bc: keys of a tile; None where it is not known.
        order: of the tiles; None where it is not known.
        splits: ranges of keys; None where it is not known.
        why: the reason why something is not known.
    """

    precision: Precision
    softmax: OnlineSoftmax = OnlineSoftmax(exp=Exponential.EXP2)
    tiling: Tiling | None = None
    bc: int | None = None
    order: Order | None = None
    splits: int | None = None
    why: str = "it is not published"
