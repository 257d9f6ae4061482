"""The arguments of the portable kernel, by name: `Code` holds compile-time constants, the others are passed at each launch."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import fields
from typing import Any, NamedTuple

from numdev.attention.precision import Precision

# A `Spec` for each step between inputs and output; see `numdev.attention.precision.Precision`.
Policy = namedtuple("Policy", [step.name for step in fields(Precision)][1:-1])  # type: ignore[misc]


class Every(NamedTuple):
    """Products between roundings of the running sum of a `Dot`; 0 for one rounding of the whole sum."""

    scores: int
    row_sum: int
    values: int


class Products(NamedTuple):
    """The types in which a tensor core multiplies: `fp16`, `bf16`, `tf32`, or `ieee` for FP32 itself."""

    scores: str
    values: str


class Recurrence(NamedTuple):
    """Which form of the online softmax is compiled.

    Attributes:
        binary: exponentials are `2^x`.
        lazy: the maximum moves only beyond a threshold.
        each: O is divided by the row sum after each tile, not once at the end.
        fused: `alpha O + P V` is one accumulation.
        scaled: P is scaled before its cast, and `P V` scaled back.
        local: P is relative to the tile's own maximum.
    """

    binary: bool
    lazy: bool
    each: bool
    fused: bool
    scaled: bool
    local: bool


class Tile(NamedTuple):
    """Sides of a block in registers, powers of two of at least 16, and the head_dim, which is padded to PAD."""

    br: int
    bc: int
    pad: int
    dim: int
    reverse: bool
    ragged: bool  # whether tiles of keys are shorter than `bc`, so that every tile needs a mask


class Sight(NamedTuple):
    """Which limits there are on the keys that a row sees."""

    causal: bool
    window: bool
    lengths: bool


class Code(NamedTuple):
    """Everything that is constant in one compiled kernel."""

    tile: Tile
    sight: Sight
    policy: tuple[Any, ...]  # a `Policy`
    every: Every
    products: Products
    recurrence: Recurrence


class View(NamedTuple):
    """A tensor `[batch, heads, tokens, dim]` in memory: a pointer, and its strides in elements."""

    at: Any
    batch: Any
    head: Any
    row: Any
    dim: Any


class Factors(NamedTuple):
    """Factors of the recurrence: that of the scores, `log_scale`, the threshold of the lazy maximum, and the scale of P."""

    scores: Any
    log: Any
    threshold: Any
    p: Any


class Sizes(NamedTuple):
    """Sizes of the problem (heads, query heads per KV head, queries, keys, window), and the sides of a tile."""

    heads: Any
    group: Any
    queries: Any
    keys: Any
    window: Any
    br: Any
    bc: Any


class Rows(NamedTuple):
    """A block of query rows: `q [BR, PAD]`, their places `[BR]`, and the limits of the keys that they see."""

    q: Any
    places: Any
    keys: Any
    shift: Any
    window: Any


class State(NamedTuple):
    """The recurrence of a block of rows: `m [BR]`, `l [BR]` and `O [BR, PAD]`."""

    m: Any
    row_sum: Any
    o: Any
