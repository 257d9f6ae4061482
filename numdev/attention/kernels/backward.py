"""The gradients of tiled attention as Triton kernels, every step in a format of its own.

Dao 2023, Algorithm 2, as a preparing kernel and two others. None uses atomic additions: the tiling fixes the order of every sum.

    prepare   delta_i = sum_d dO_id O_id, and the LSE as it enters the exponent
    dk_dv     one program owns a block of keys of one KV head; it meets the tiles of queries of each head of the group:
                  P^T = exp(S^T - LSE), S^T = scale K Q^T;  dP^T = V dO^T;  dS^T = P^T o (dP^T - delta)
                  dV += P^T dO;  dK += dS^T Q
    walk      one program owns a block of rows of one head; it meets the tiles of keys: dQ += dS K;
              or, for delta = rowsum(dP * P), delta_i += sum_j dP_ij P_ij

The scale multiplies dK and dQ once at the end. `dk_dv` works on transposed tiles, because one product then leaves P^T and dS^T
in registers in the layout in which the next product reads them. Under the policy `kernel(F)` this is the backward pass of
FlashAttention-2; under any other policy it measures that policy. Names are those of `numdev.attention.kernels.forward`.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import fields
from typing import Any, NamedTuple

import triton
import triton.language as tl

from numdev.attention.kernels.casts import IDENTITY, add, cast, decay, times
from numdev.attention.kernels.forward import Tile, dot, head, load, multiply, row_sums, seen
from numdev.attention.precision import BackwardPrecision

# A `Spec` for each step between inputs and output; see `numdev.attention.precision.BackwardPrecision`.
Policy = namedtuple("Policy", [step.name for step in fields(BackwardPrecision)][1:-1])  # type: ignore[misc]


class Code(NamedTuple):
    """The constants of one compiled kernel.

    Attributes:
        policy: a `Policy`.
        masked: whether there may be tiles that need the mask.
        parts: of a walk; see `part_of`.
        binary: exponentials are `2^x`.
        of_probabilities: delta is the row sum of `dP * P`, not of `dO * O`.
    """

    tile: Tile
    policy: tuple[Any, ...]
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
    """The results of `prepare`, FP32 `[batch, heads, queries]`: the LSE as it enters the exponent, and delta."""

    base: Any
    delta: Any


class Limits(NamedTuple):
    """The limits of visible pairs: queries, keys of the batch entry, the shift of a row, the window."""

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


@triton.jit
def limits_of(lengths, b, sizes, CODE: tl.constexpr):
    """The limits of batch entry `b`."""
    keys = sizes.keys
    if CODE.tile.lengths:
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
    """As `load`, and 0 before `low` too: nothing outside `[low, high)` is read."""
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


@triton.jit
def recompute(left, right, base, sees, factors, MASK: tl.constexpr, CODE: tl.constexpr):
    """`P [M, N]`, 0 for pairs that are not visible.

    left `[M, PAD]` is q and right `[N, PAD]` k, or the other way round; base, the LSE, is `[M, 1]` or `[1, N]`.
    """
    # Bound to names because triton 3.6 accepts a number from a tuple as a constant in a call, but no string and no tuple.
    SCORES: tl.constexpr = CODE.policy.scores
    EXPONENTIAL: tl.constexpr = CODE.policy.exponential
    s = dot(left, tl.trans(right), CODE.tile.pad, SCORES)
    s = times(s, factors.scores + tl.zeros_like(s), SCORES)
    if MASK:
        s = tl.where(sees, s, float("-inf"))
    return decay(s, base + tl.zeros_like(s), CODE.binary, EXPONENTIAL)


@triton.jit
def gradient_of_p(left, right, CODE: tl.constexpr):
    """`dP [M, N]`: left is do and right v, or the other way round."""
    DP: tl.constexpr = CODE.policy.dp
    return dot(left, tl.trans(right), CODE.tile.pad, DP)


@triton.jit
def weigh(p, dp, delta, sees, MASK: tl.constexpr, CODE: tl.constexpr):
    """`dS = P (dP - delta)`, 0 for pairs that are not visible, even if delta is NaN."""
    DIFFERENCE: tl.constexpr = CODE.policy.difference
    DS: tl.constexpr = CODE.policy.ds
    ds = add(dp, -delta + tl.zeros_like(dp), DIFFERENCE)
    ds = times(p, ds, DIFFERENCE)
    if MASK:
        ds = tl.where(sees, ds, 0.0)
    return cast(ds, DS)


@triton.jit
def accumulate(a, b, total, INNER: tl.constexpr, STEP: tl.constexpr, SUM: tl.constexpr):
    """`total + a b`: the product of a tile in the format of its step, then the running sum over tiles.

    Where nothing is rounded between the two, the product is accumulated directly onto the running sum.
    """
    if STEP.kind == IDENTITY and STEP.every == 0 and SUM.kind == IDENTITY:
        return multiply(a, b, total, STEP)
    return add(total, dot(a, b, INNER, STEP), SUM)


@triton.jit
def meet_queries(tile, keys, q, do, saved, sums, limits, factors, side, MASK: tl.constexpr, CODE: tl.constexpr):
    """One tile of queries of one head: `dK, dV -> dK', dV'`."""
    PROBABILITIES: tl.constexpr = CODE.policy.probabilities
    DK: tl.constexpr = CODE.policy.dk
    DV: tl.constexpr = CODE.policy.dv
    DK_SUM: tl.constexpr = CODE.policy.dk_sum
    DV_SUM: tl.constexpr = CODE.policy.dv_sum
    BR: tl.constexpr = CODE.tile.br
    PAD: tl.constexpr = CODE.tile.pad
    DIM: tl.constexpr = CODE.tile.dim
    places = tile * side + tl.arange(0, BR)  # [BR]
    inner = tl.arange(0, PAD)  # [PAD]
    end = tl.minimum(tile * side + side, keys.high)
    q_tile = load_between(q, places, inner, keys.low, end, DIM, MASK or PAD != DIM)  # [BR, PAD]
    do_tile = load_between(do, places, inner, keys.low, end, DIM, MASK or PAD != DIM)  # [BR, PAD]
    inside = (places >= keys.low) & (places < end)  # [BR]
    sees = True
    if MASK:
        base = tl.load(saved.base + places, mask=inside, other=0.0)  # [BR]
        delta = tl.load(saved.delta + places, mask=inside, other=0.0)  # [BR]
        exist = inside[None, :] & (keys.places >= 0)[:, None]
        sees = pairs(exist, places[None, :], keys.places[:, None], limits, CODE.tile.causal, CODE.tile.window)  # [BC, BR]
    else:
        base = tl.load(saved.base + places)  # [BR]
        delta = tl.load(saved.delta + places)  # [BR]
    p = recompute(keys.k, q_tile, base[None, :], sees, factors, MASK, CODE)  # [BC, BR]
    rounded = cast(p, PROBABILITIES)
    dv = accumulate(rounded, do_tile, sums.dv, BR, DV, DV_SUM)  # [BC, PAD]
    dp = gradient_of_p(keys.v, do_tile, CODE)  # [BC, BR]
    ds = weigh(p, dp, delta[None, :], sees, MASK, CODE)  # [BC, BR]
    dk = accumulate(ds, q_tile, sums.dk, BR, DK, DK_SUM)  # [BC, PAD]
    return Sums(dk, dv)


@triton.jit
def queries_between(first, last, keys, q, do, saved, sums, limits, factors, side, MASK: tl.constexpr, CODE: tl.constexpr):
    """The tiles `[first, last)` of queries of one head; either all of them need the mask or none does."""
    for i in tl.range(first, last):
        if CODE.tile.reverse:
            tile = first + last - 1 - i
        else:
            tile = i
        sums = meet_queries(tile, keys, q, do, saved, sums, limits, factors, side, MASK, CODE)
    return sums


@triton.jit
def dk_dv(q, k, v, do, dk, dv, saved, lengths, factors, sizes, CODE: tl.constexpr):
    """One block of keys of one KV head against the queries of its group; dk and dv are `[batch, kv_heads, keys, dim]`."""
    DK_SUM: tl.constexpr = CODE.policy.dk_sum
    BC: tl.constexpr = CODE.tile.bc
    PAD: tl.constexpr = CODE.tile.pad
    DIM: tl.constexpr = CODE.tile.dim
    block, pair = tl.program_id(0), tl.program_id(1)
    kv_heads = sizes.heads // sizes.group
    b, h = pair // kv_heads, pair % kv_heads
    limits = limits_of(lengths, b, sizes, CODE)
    column0 = block * sizes.bc
    column1 = tl.minimum(column0 + sizes.bc, sizes.keys)
    end = tl.minimum(column1, limits.keys)  # of the keys that exist
    places = column0 + tl.arange(0, BC)  # [BC]
    inner = tl.arange(0, PAD)  # [PAD]
    low, high, all_low, all_high = seeing(column0, end, limits, CODE.tile.causal, CODE.tile.window)
    span = span_of(low, high, all_low, all_high, sizes.br, CODE.tile.ragged)
    k_tile = load(head(k, b, h), places, inner, end, DIM, True)  # [BC, PAD]
    v_tile = load(head(v, b, h), places, inner, end, DIM, True)  # [BC, PAD]
    keys = Keys(k_tile, v_tile, places, low, high)
    sums = Sums(tl.zeros([BC, PAD], tl.float32), tl.zeros([BC, PAD], tl.float32))
    for i in tl.range(0, sizes.group * CODE.parts):
        own = h * sizes.group + i // CODE.parts
        rows = saved_head(saved, b * sizes.heads + own, sizes.queries)
        q_head = head(q, b, own)
        do_head = head(do, b, own)
        first, last, whole0, whole1 = part_of(i % CODE.parts, span, CODE)
        if CODE.masked:
            sums = queries_between(first, last, keys, q_head, do_head, rows, sums, limits, factors, span.side, True, CODE)
        sums = queries_between(whole0, whole1, keys, q_head, do_head, rows, sums, limits, factors, span.side, False, CODE)
    exists = (places < end)[:, None]
    out_k = tl.where(exists, times(sums.dk, factors.scale + tl.zeros_like(sums.dk), DK_SUM), 0.0)
    out_v = tl.where(exists, sums.dv, 0.0)
    at = (pair.to(tl.int64) * sizes.keys + places)[:, None] * DIM + inner[None, :]  # [BC, PAD]
    is_element = (places < column1)[:, None] & (inner < DIM)[None, :]
    tl.store(dk + at, out_k.to(dk.dtype.element_ty), mask=is_element)
    tl.store(dv + at, out_v.to(dv.dtype.element_ty), mask=is_element)


@triton.jit
def meet_keys(tile, rows, k, v, total, limits, factors, side, MASK: tl.constexpr, DELTA: tl.constexpr, CODE: tl.constexpr):
    """One tile of keys: `dQ -> dQ' [BR, PAD]`, or with DELTA `delta -> delta' [BR]`."""
    DQ: tl.constexpr = CODE.policy.dq
    DQ_SUM: tl.constexpr = CODE.policy.dq_sum
    SPEC: tl.constexpr = CODE.policy.delta
    BC: tl.constexpr = CODE.tile.bc
    PAD: tl.constexpr = CODE.tile.pad
    DIM: tl.constexpr = CODE.tile.dim
    places = tile * side + tl.arange(0, BC)  # [BC]
    inner = tl.arange(0, PAD)  # [PAD]
    end = tl.minimum(tile * side + side, limits.keys)
    k_tile = load(k, places, inner, end, DIM, MASK or PAD != DIM)  # [BC, PAD]
    v_tile = load(v, places, inner, end, DIM, MASK or PAD != DIM)  # [BC, PAD]
    sees = True
    if MASK:
        exist = (places < end)[None, :] & (rows.places >= 0)[:, None]
        sees = pairs(exist, rows.places[:, None], places[None, :], limits, CODE.tile.causal, CODE.tile.window)  # [BR, BC]
    p = recompute(rows.q, k_tile, rows.base[:, None], sees, factors, MASK, CODE)  # [BR, BC]
    dp = gradient_of_p(rows.do, v_tile, CODE)  # [BR, BC]
    if DELTA:
        products = times(dp, p, SPEC)
        if MASK:
            products = tl.where(sees, products, 0.0)
        total = add(total, row_sums(products, SPEC), SPEC)
    else:
        ds = weigh(p, dp, rows.delta[:, None], sees, MASK, CODE)
        total = accumulate(ds, k_tile, total, BC, DQ, DQ_SUM)
    return total


@triton.jit
def keys_between(
    first, last, rows, k, v, total, limits, factors, side, MASK: tl.constexpr, DELTA: tl.constexpr, CODE: tl.constexpr
):  # fmt: skip
    """The tiles `[first, last)` of keys; either all of them need the mask or none does."""
    for i in tl.range(first, last):
        if CODE.tile.reverse:
            tile = first + last - 1 - i
        else:
            tile = i
        total = meet_keys(tile, rows, k, v, total, limits, factors, side, MASK, DELTA, CODE)
    return total


@triton.jit
def walk(q, k, v, do, dq, saved, lengths, factors, sizes, DELTA: tl.constexpr, CODE: tl.constexpr):
    """One block of rows of one head against its keys: `dq [batch, heads, queries, dim]`, or with DELTA `saved.delta`."""
    DQ_SUM: tl.constexpr = CODE.policy.dq_sum
    BR: tl.constexpr = CODE.tile.br
    PAD: tl.constexpr = CODE.tile.pad
    DIM: tl.constexpr = CODE.tile.dim
    block, pair = tl.program_id(0), tl.program_id(1)
    if CODE.tile.causal:
        block = tl.num_programs(0) - 1 - block  # the longest first
    b, h = pair // sizes.heads, pair % sizes.heads
    limits = limits_of(lengths, b, sizes, CODE)
    row0 = block * sizes.br
    row1 = tl.minimum(row0 + sizes.br, sizes.queries)
    places = row0 + tl.arange(0, BR)  # [BR]
    inner = tl.arange(0, PAD)  # [PAD]
    is_row = places < row1
    own = saved_head(saved, pair, sizes.queries)
    base = tl.load(own.base + places, mask=is_row, other=float("-inf"))  # [BR]
    hidden = base == float("-inf")  # [BR]
    base = tl.where(hidden, 0.0, base)
    q_tile = load(head(q, b, h), places, inner, row1, DIM, True)  # [BR, PAD]
    do_tile = load(head(do, b, h), places, inner, row1, DIM, True)  # [BR, PAD]
    k = head(k, b, h // sizes.group)
    v = head(v, b, h // sizes.group)
    if DELTA:
        delta = base
        total = tl.zeros([BR], tl.float32)
    else:
        delta = tl.load(own.delta + places, mask=is_row, other=0.0)  # [BR]
        total = tl.zeros([BR, PAD], tl.float32)
    rows = Rows(q_tile, do_tile, base, delta, places)
    low, high, all_low, all_high = seen(row0, row1, limits.keys, limits.shift, limits.window, CODE.tile.causal, CODE.tile.window)
    span = span_of(low, high, all_low, all_high, sizes.bc, CODE.tile.ragged)
    for part in tl.range(0, CODE.parts):
        first, last, whole0, whole1 = part_of(part, span, CODE)
        if CODE.masked:
            total = keys_between(first, last, rows, k, v, total, limits, factors, span.side, True, DELTA, CODE)
        total = keys_between(whole0, whole1, rows, k, v, total, limits, factors, span.side, False, DELTA, CODE)
    if DELTA:
        tl.store(own.delta + places, tl.where(hidden, 0.0, total), mask=is_row)
    else:
        total = tl.where(hidden[:, None], 0.0, total)  # such a row has met keys of other rows, which may hold NaN
        total = times(total, factors.scale + tl.zeros_like(total), DQ_SUM)
        at = (pair.to(tl.int64) * sizes.queries + places)[:, None] * DIM + inner[None, :]  # [BR, PAD]
        tl.store(dq + at, total.to(dq.dtype.element_ty), mask=is_row[:, None] & (inner < DIM)[None, :])


@triton.jit
def prepare(out, do, lse, saved, factors, sizes, CODE: tl.constexpr):
    """One block of rows of one head: the LSE in the units of the exponent, and delta where it is `rowsum(dO * O)`.

    A row that sees no key keeps its LSE of minus infinity and gets a delta of 0, even if its dO holds NaN.
    """
    SPEC: tl.constexpr = CODE.policy.delta
    EXPONENTIAL: tl.constexpr = CODE.policy.exponential
    BR: tl.constexpr = CODE.tile.br
    PAD: tl.constexpr = CODE.tile.pad
    DIM: tl.constexpr = CODE.tile.dim
    block, pair = tl.program_id(0), tl.program_id(1)
    b, h = pair // sizes.heads, pair % sizes.heads
    places = block * BR + tl.arange(0, BR)  # [BR]
    inner = tl.arange(0, PAD)  # [PAD]
    is_row = places < sizes.queries
    own = saved_head(saved, pair, sizes.queries)
    value = tl.load(lse + pair.to(tl.int64) * sizes.queries + places, mask=is_row, other=float("-inf"))  # [BR]
    hidden = value == float("-inf")
    base = tl.where(hidden, 0.0, value)
    if CODE.binary:
        base = times(base, factors.log + tl.zeros_like(base), EXPONENTIAL)
    tl.store(own.base + places, tl.where(hidden, value, base), mask=is_row)
    if not CODE.of_probabilities:
        o = load(head(out, b, h), places, inner, sizes.queries, DIM, True).to(tl.float32)  # [BR, PAD]
        gradient = load(head(do, b, h), places, inner, sizes.queries, DIM, True).to(tl.float32)  # [BR, PAD]
        delta = row_sums(times(gradient, o, SPEC), SPEC)  # [BR]
        tl.store(own.delta + places, tl.where(hidden, 0.0, delta), mask=is_row)
