"""The arguments of the portable backward kernels, by name; see `numdev.attention.kernels.arguments`."""

from __future__ import annotations

from typing import Any, NamedTuple

from numdev.attention.kernels.arguments import Sight, Tile
from numdev.attention.kernels.casts import Spec


class Policy(NamedTuple):
    """One cast for each step; see `numdev.attention.precision.BackwardPrecision`."""

    scores: Spec
    exponential: Spec
    probabilities: Spec
    dp: Spec
    delta: Spec
    difference: Spec
    ds: Spec
    dq: Spec
    dk: Spec
    dv: Spec
    dq_sum: Spec
    dk_sum: Spec
    dv_sum: Spec


class Every(NamedTuple):
    """Products between roundings of the running sum of a `Dot`; 0 for one rounding of the whole sum."""

    scores: int
    dp: int
    delta: int
    dq: int
    dk: int
    dv: int


class Products(NamedTuple):
    """The types in which a tensor core multiplies; see `numdev.attention.kernels.arguments.Products`."""

    inputs: str  # Q K^T and dO V^T
    ds: str  # dS K and dS^T Q
    p: str  # P^T dO


class Fused(NamedTuple):
    """Whether the product of a tile is accumulated directly onto the running sum over tiles, with no rounding between the two."""

    dq: bool
    dk: bool
    dv: bool


class Code(NamedTuple):
    """Everything that is constant in one compiled kernel.

    Attributes:
        masked: whether there may be tiles that need the mask.
        parts: of a walk; see `numdev.attention.kernels.backward_tiles.part_of`.
        binary: exponentials are `2^x`.
        of_probabilities: delta is the row sum of `dP * P`, not of `dO * O`.
    """

    tile: Tile
    sight: Sight
    policy: Policy
    every: Every
    products: Products
    fused: Fused
    masked: bool
    parts: int
    binary: bool
    of_probabilities: bool


class Factors(NamedTuple):
    """The factor of the scores, that of the LSE (log2(e) where exponentials are `2^x`), and the scale of dQ and dK."""

    scores: Any
    log: Any
    scale: Any


class Saved(NamedTuple):
    """What `prepare` computes for each row, FP32 `[batch, heads, queries]`: the LSE as it enters the exponent, and delta."""

    base: Any
    delta: Any


class Limits(NamedTuple):
    """What limits the visible pairs: queries, keys of the batch entry, the shift of a row, the window."""

    queries: Any
    keys: Any
    shift: Any
    window: Any


class Span(NamedTuple):
    """The tiles `[start, stop)` of a loop, each `side` long; none of the tiles `[whole, partial)` needs a mask."""

    start: Any
    whole: Any
    partial: Any
    stop: Any
    side: Any


class Rows(NamedTuple):
    """A block of queries of one head: `q, do [BR, PAD]`, `base, delta [BR]`, and their places `[BR]`."""

    q: Any
    do: Any
    base: Any
    delta: Any
    places: Any


class Keys(NamedTuple):
    """A block of keys of one head: `k, v [BC, PAD]`, their places `[BC]`, and the rows `[low, high)` that see one of them."""

    k: Any
    v: Any
    places: Any
    low: Any
    high: Any


class Sums(NamedTuple):
    """The running sums of a block of keys, `dk, dv [BC, PAD]`."""

    dk: Any
    dv: Any
