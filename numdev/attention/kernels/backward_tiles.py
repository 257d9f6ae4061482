"""Which pairs of queries and keys a backward kernel visits, and in which tiles: `numdev.attention.mask.Mask` from both sides."""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.attention.kernels.backward_arguments import Limits, Saved, Span


@triton.jit
def limits_of(lengths, b, sizes, CODE: tl.constexpr):
    """The limits of batch entry `b`."""
    keys = sizes.keys
    if CODE.sight.lengths:
        keys = tl.load(lengths + b)
    return Limits(sizes.queries, keys, sizes.keys - sizes.queries, sizes.window)


@triton.jit
def seeing(column0, column1, limits, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Two half-open ranges of queries, low and high of each.

    Every query that sees a key of `[column0, column1)` lies in the first; every query of the second sees all of these keys.
    """
    low, high = column0 * 0, limits.queries
    all_low, all_high = column0 * 0, limits.queries
    if CAUSAL:
        low = column0 - limits.shift
        all_low = column1 - 1 - limits.shift
    if WINDOW:
        low = tl.maximum(low, column0 - limits.shift - limits.window + 1)
        high = tl.minimum(high, column1 - 1 - limits.shift + limits.window)
        all_low = tl.maximum(all_low, column1 - limits.shift - limits.window)
        all_high = tl.minimum(all_high, column0 - limits.shift + limits.window)
    high = tl.where(column0 < column1, high, 0)
    return tl.maximum(low, 0), tl.maximum(high, 0), tl.maximum(all_low, 0), tl.maximum(all_high, 0)


@triton.jit
def span_of(low, high, all_low, all_high, side, RAGGED: tl.constexpr):
    """The tiles of `[low, high)`. RAGGED tiles, which are shorter than a block in registers, all need the mask."""
    start = low // side
    stop = tl.maximum(tl.cdiv(high, side), start)
    if RAGGED:
        whole = start
        partial = start
    else:
        whole = tl.minimum(tl.maximum(tl.cdiv(all_low, side), start), stop)
        partial = tl.minimum(tl.maximum(all_high // side, whole), stop)
    return Span(start, whole, partial, stop, side)


@triton.jit
def part_of(part, span, CODE: tl.constexpr):
    """One part of a walk: tiles that need the mask, then tiles that need none, each as a range `[first, last)`.

    A walk visits masked tiles, then whole tiles, then masked tiles. The first part covers the first two of these groups, a
    second part, if there is one, the third. The code for a masked tile thus exists only once, which saves registers.
    """
    if CODE.tile.reverse:
        first = tl.where(part == 0, span.partial, span.start)
        last = tl.where(part == 0, span.stop, span.whole)
    else:
        first = tl.where(part == 0, span.start, span.partial)
        last = tl.where(part == 0, span.whole, span.stop)
    return first, last, span.whole, tl.where(part == 0, span.partial, span.whole)


@triton.jit
def pairs(exist, rows, columns, limits, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the pairs that `exist` are visible; `rows` and `columns` broadcast over the tile."""
    sees = exist
    if CAUSAL:
        sees = sees & (columns <= rows + limits.shift)
    if WINDOW:
        sees = sees & (tl.abs(rows + limits.shift - columns) < limits.window)
    return sees


@triton.jit
def load_between(view, index, inner, low, high, DIM: tl.constexpr, MASKED: tl.constexpr):
    """As `numdev.attention.kernels.tiles.load`, and 0 before `low` too: nothing outside `[low, high)` is read."""
    pointers = view.at + index.to(tl.int64)[:, None] * view.row + inner.to(tl.int64)[None, :] * view.dim  # [rows, PAD]
    if MASKED:
        inside = (index >= low) & (index < high)
        return tl.load(pointers, mask=inside[:, None] & (inner < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def saved_head(saved, pair, queries):
    """The part of `saved` that belongs to one head of one batch entry."""
    offset = pair.to(tl.int64) * queries
    return Saved(saved.base + offset, saved.delta + offset)
