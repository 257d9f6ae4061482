"""Tiled attention as one Triton kernel, every step in a format of its own: the readable specification of our kernels.

The recurrence and the names are those of `numdev.attention.recurrence`. `CODE` (`numdev.attention.kernels.arguments`) holds the
constants of one compiled kernel, such as one cast for each step; a cast that changes nothing compiles to no instruction. Under
the policy `kernel(F)` this is a FlashAttention-2 forward pass (Dao 2023, Algorithm 1); under any other policy it measures that
policy at the speed of a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.attention.kernels.arguments import Rows, State, View
from numdev.attention.kernels.casts import add, cast, decay, over, times
from numdev.attention.kernels.tiles import load, seen, visible


@triton.jit
def multiply(a, b, acc, PRODUCT: tl.constexpr):
    """`a [M, K] b [K, N]`, added to `acc [M, N]` if given, in FP32. Each product of two operands is exact, except with `ieee`."""
    if PRODUCT == "fp16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16), acc)
    if PRODUCT == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    if PRODUCT == "tf32":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32")
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def dot(a, b, INNER: tl.constexpr, EVERY: tl.constexpr, PRODUCT: tl.constexpr, SPEC: tl.constexpr):
    """`numdev.arithmetic.dot.Dot`: the running sum is rounded after every EVERY products, 0 for once."""
    if EVERY == 0:
        return cast(multiply(a, b, None, PRODUCT), SPEC)
    inner = tl.arange(0, INNER)[None, :]
    total = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    for start in tl.range(0, INNER, EVERY):
        part = tl.where((inner >= start) & (inner < start + EVERY), a, 0.0)  # adding zeros is exact
        total = add(total, multiply(part, b, None, PRODUCT), SPEC)
    return total


@triton.jit
def row_sums(p, EVERY: tl.constexpr, SPEC: tl.constexpr):
    """`numdev.arithmetic.dot.Dot.sum`."""
    if EVERY == 0:
        return cast(tl.sum(p, 1), SPEC)
    inner = tl.arange(0, p.shape[1])[None, :]
    total = tl.zeros([p.shape[0]], tl.float32)
    for start in tl.range(0, p.shape[1], EVERY):
        total = add(total, tl.sum(tl.where((inner >= start) & (inner < start + EVERY), p, 0.0), 1), SPEC)
    return total


@triton.jit
def head(view, b, h):
    """One head of a tensor."""
    return View(view.at + b.to(tl.int64) * view.batch + h.to(tl.int64) * view.head, view.batch, view.head, view.row, view.dim)


@triton.jit
def meet(tile, rows, k, v, state, factors, bc, MASK: tl.constexpr, CODE: tl.constexpr):
    """One tile of keys: `m, l, O -> m', l', O'`; k and v are one head's."""
    # Bound to names because triton 3.6 accepts a number from a tuple as a constant in a call, but no string and no tuple.
    SCORES: tl.constexpr = CODE.policy.scores
    EXPONENTIAL: tl.constexpr = CODE.policy.exponential
    RESCALE: tl.constexpr = CODE.policy.rescale
    ROW_SUM: tl.constexpr = CODE.policy.row_sum
    PROBABILITIES: tl.constexpr = CODE.policy.probabilities
    VALUES: tl.constexpr = CODE.policy.values
    ACCUMULATOR: tl.constexpr = CODE.policy.accumulator
    QK: tl.constexpr = CODE.products.scores
    PV: tl.constexpr = CODE.products.values
    FORM: tl.constexpr = CODE.recurrence
    DIM: tl.constexpr = CODE.tile.dim
    PAD: tl.constexpr = CODE.tile.pad
    BC: tl.constexpr = CODE.tile.bc
    m = state.m  # [BR]
    row_sum = state.row_sum  # [BR]
    o = state.o  # [BR, PAD]
    columns = tile * bc + tl.arange(0, BC)  # [BC]
    inner = tl.arange(0, PAD)  # [PAD]
    end = tile * bc + bc
    k_tile = load(k, columns, inner, tl.minimum(end, rows.keys), DIM, MASK or PAD != DIM)  # [BC, PAD]
    s = dot(rows.q, tl.trans(k_tile), PAD, CODE.every.scores, QK, SCORES)  # [BR, BC]
    s = times(s, factors.scores + tl.zeros_like(s), SCORES)
    if MASK:
        # [BR, BC]
        sees = visible(rows.places, columns, end, rows.keys, rows.shift, rows.window, CODE.sight.causal, CODE.sight.window)
        s = tl.where(sees, s, float("-inf"))
    largest = tl.max(s, 1)  # [BR]
    if FORM.lazy:
        m_next = tl.where(largest - m > factors.threshold, largest, m)
    else:
        m_next = tl.maximum(m, largest)
    base = tl.where(m_next == float("-inf"), 0.0, m_next)  # [BR]
    if FORM.local:
        own = tl.where(largest == float("-inf"), 0.0, largest)
    else:
        own = base
    p = decay(s, own[:, None] + tl.zeros_like(s), FORM.binary, EXPONENTIAL)  # [BR, BC]
    alpha = decay(m, base, FORM.binary, RESCALE)  # [BR]
    kept = times(row_sum, alpha, ROW_SUM)
    tile_sum = row_sums(p, CODE.every.row_sum, ROW_SUM)  # [BR]
    if FORM.local:
        beta = decay(largest, base, FORM.binary, RESCALE)  # [BR]
        tile_sum = times(tile_sum, beta, ROW_SUM)
    row_sum_next = add(kept, tile_sum, ROW_SUM)
    v_tile = load(v, columns, inner, tl.minimum(end, rows.keys), DIM, MASK or PAD != DIM)  # [BC, PAD]
    if FORM.scaled:
        p = times(p, factors.p + tl.zeros_like(p), PROBABILITIES)
    else:
        p = cast(p, PROBABILITIES)
    if FORM.fused:
        o_next = multiply(p, v_tile, o * alpha[:, None], PV)
    else:
        product = dot(p, v_tile, BC, CODE.every.values, PV, VALUES)  # [BR, PAD]
        if FORM.scaled:
            product = over(product, factors.p + tl.zeros_like(product), VALUES)
        if FORM.local:
            product = times(product, beta[:, None] + tl.zeros_like(product), ACCUMULATOR)
        if FORM.each:
            o_next = times(o, kept[:, None] + tl.zeros_like(o), ACCUMULATOR)
        else:
            o_next = times(o, alpha[:, None] + tl.zeros_like(o), ACCUMULATOR)
        o_next = add(o_next, product, ACCUMULATOR)
        if FORM.each:
            divisor = tl.where(row_sum_next == 0.0, 1.0, row_sum_next)
            o_next = over(o_next, divisor[:, None] + tl.zeros_like(o_next), ACCUMULATOR)
    if MASK:  # a row that sees no key of the tile keeps its state
        touched = tl.max(sees.to(tl.int32), 1) > 0  # [BR]
        m_next = tl.where(touched, m_next, m)
        row_sum_next = tl.where(touched, row_sum_next, row_sum)
        o_next = tl.where(touched[:, None], o_next, o)
    return State(m_next, row_sum_next, o_next)


@triton.jit
def phase(first, last, rows, k, v, state, factors, bc, MASK: tl.constexpr, CODE: tl.constexpr):
    """The tiles `[first, last)`; either all of them need the mask or none does."""
    for i in tl.range(first, last):
        if CODE.tile.reverse:
            tile = first + last - 1 - i
        else:
            tile = i
        state = meet(tile, rows, k, v, state, factors, bc, MASK, CODE)
    return state


@triton.jit
def finish(state, factors, CODE: tl.constexpr):
    """The normalised `O [BR, PAD]`, and the natural LSE `[BR]`, minus infinity for a row that sees no key."""
    ROW_SUM: tl.constexpr = CODE.policy.row_sum
    ACCUMULATOR: tl.constexpr = CODE.policy.accumulator
    divisor = tl.where(state.row_sum == 0.0, 1.0, state.row_sum)
    o = state.o
    if not CODE.recurrence.each:
        o = over(o, divisor[:, None] + tl.zeros_like(o), ACCUMULATOR)
    base = tl.where(state.m == float("-inf"), 0.0, state.m)
    if CODE.recurrence.binary:
        base = over(base, factors.log + tl.zeros_like(base), ROW_SUM)
    lse = tl.where(state.row_sum == 0.0, float("-inf"), add(base, cast(tl.log(divisor), ROW_SUM), ROW_SUM))
    return o, lse


@triton.jit
def attention(q, k, v, out, lse, lengths, bounds, factors, sizes, CODE: tl.constexpr):
    """One block of rows of one head against one split of the keys.

    q, k and v are `View`s; out is `[splits, batch, heads, queries, dim]`, lse the same without dim, lengths `[batch]`. bounds
    `[splits + 1]` are the tiles at which the splits begin and end.
    """
    BR: tl.constexpr = CODE.tile.br
    PAD: tl.constexpr = CODE.tile.pad
    DIM: tl.constexpr = CODE.tile.dim
    block, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = pair // sizes.heads, pair % sizes.heads
    keys = sizes.keys
    shift = sizes.keys - sizes.queries
    row0 = block * sizes.br
    row1 = tl.minimum(row0 + sizes.br, sizes.queries)
    places = row0 + tl.arange(0, BR)  # [BR]
    inner = tl.arange(0, PAD)  # [PAD]
    if CODE.sight.lengths:
        keys = tl.load(lengths + b)
    q_tile = load(head(q, b, h), places, inner, row1, DIM, True)  # [BR, PAD]
    rows = Rows(q_tile, places, keys, shift, sizes.window)
    k = head(k, b, h // sizes.group)
    v = head(v, b, h // sizes.group)
    state = State(tl.full([BR], float("-inf"), tl.float32), tl.zeros([BR], tl.float32), tl.zeros([BR, PAD], tl.float32))
    bc = sizes.bc
    low, high, all_low, all_high = seen(row0, row1, keys, shift, sizes.window, CODE.sight.causal, CODE.sight.window)
    start, stop = tl.load(bounds + split), tl.load(bounds + split + 1)
    start = tl.maximum(start, low // bc)
    stop = tl.maximum(tl.minimum(stop, tl.cdiv(high, bc)), start)
    if CODE.tile.ragged:
        whole0 = stop
        whole1 = stop
    else:
        whole0 = tl.minimum(tl.maximum(tl.cdiv(all_low, bc), start), stop)
        whole1 = tl.minimum(tl.maximum(all_high // bc, whole0), stop)
    # Masked tiles, then whole tiles, then masked tiles; in reverse the other way round.
    if CODE.tile.reverse:
        state = phase(whole1, stop, rows, k, v, state, factors, bc, True, CODE)
    else:
        state = phase(start, whole0, rows, k, v, state, factors, bc, True, CODE)
    state = phase(whole0, whole1, rows, k, v, state, factors, bc, False, CODE)
    if CODE.tile.reverse:
        state = phase(start, whole0, rows, k, v, state, factors, bc, True, CODE)
    else:
        state = phase(whole1, stop, rows, k, v, state, factors, bc, True, CODE)
    o, value = finish(state, factors, CODE)
    at = (split.to(tl.int64) * tl.num_programs(1) + pair) * sizes.queries + places  # [BR]
    is_row = places < row1
    tl.store(lse + at, value, mask=is_row)
    elements = out + at[:, None] * DIM + inner[None, :]  # [BR, PAD]
    tl.store(elements, o.to(out.dtype.element_ty), mask=is_row[:, None] & (inner < DIM)[None, :])
