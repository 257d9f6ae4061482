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

import triton
import triton.language as tl

from numdev.attention.kernels.backward_arguments import Keys, Rows, Sums
from numdev.attention.kernels.backward_steps import accumulate, gradient_of_p, recompute, weigh
from numdev.attention.kernels.backward_tiles import limits_of, load_between, pairs, part_of, saved_head, seeing, span_of
from numdev.attention.kernels.casts import add, cast, times
from numdev.attention.kernels.forward import head, row_sums
from numdev.attention.kernels.tiles import load, seen


@triton.jit
def meet_queries(tile, keys, q, do, saved, sums, limits, factors, side, MASK: tl.constexpr, CODE: tl.constexpr):
    """One tile of queries of one head: `dK, dV -> dK', dV'`."""
    PROBABILITIES: tl.constexpr = CODE.policy.probabilities
    DK: tl.constexpr = CODE.policy.dk
    DV: tl.constexpr = CODE.policy.dv
    DK_SUM: tl.constexpr = CODE.policy.dk_sum
    DV_SUM: tl.constexpr = CODE.policy.dv_sum
    OF_DS: tl.constexpr = CODE.products.ds
    OF_P: tl.constexpr = CODE.products.p
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
        sees = pairs(exist, places[None, :], keys.places[:, None], limits, CODE.sight.causal, CODE.sight.window)  # [BC, BR]
    else:
        base = tl.load(saved.base + places)  # [BR]
        delta = tl.load(saved.delta + places)  # [BR]
    p = recompute(keys.k, q_tile, base[None, :], sees, factors, MASK, CODE)  # [BC, BR]
    rounded = cast(p, PROBABILITIES)
    dv = accumulate(rounded, do_tile, sums.dv, BR, CODE.every.dv, OF_P, DV, DV_SUM, CODE.fused.dv)  # [BC, PAD]
    dp = gradient_of_p(keys.v, do_tile, CODE)  # [BC, BR]
    ds = weigh(p, dp, delta[None, :], sees, MASK, CODE)  # [BC, BR]
    dk = accumulate(ds, q_tile, sums.dk, BR, CODE.every.dk, OF_DS, DK, DK_SUM, CODE.fused.dk)  # [BC, PAD]
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
    low, high, all_low, all_high = seeing(column0, end, limits, CODE.sight.causal, CODE.sight.window)
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
    OF_DS: tl.constexpr = CODE.products.ds
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
        sees = pairs(exist, rows.places[:, None], places[None, :], limits, CODE.sight.causal, CODE.sight.window)  # [BR, BC]
    p = recompute(rows.q, k_tile, rows.base[:, None], sees, factors, MASK, CODE)  # [BR, BC]
    dp = gradient_of_p(rows.do, v_tile, CODE)  # [BR, BC]
    if DELTA:
        products = times(dp, p, SPEC)
        if MASK:
            products = tl.where(sees, products, 0.0)
        total = add(total, row_sums(products, CODE.every.delta, SPEC), SPEC)
    else:
        ds = weigh(p, dp, rows.delta[:, None], sees, MASK, CODE)
        total = accumulate(ds, k_tile, total, BC, CODE.every.dq, OF_DS, DQ, DQ_SUM, CODE.fused.dq)
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
    if CODE.sight.causal:
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
    low, high, all_low, all_high = seen(
        row0, row1, limits.keys, limits.shift, limits.window, CODE.sight.causal, CODE.sight.window
    )
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
        delta = row_sums(times(gradient, o, SPEC), CODE.every.delta, SPEC)  # [BR]
        tl.store(own.delta + places, tl.where(hidden, 0.0, delta), mask=is_row)
