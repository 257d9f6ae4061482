"""Tiled attention as one Triton kernel, every step in a format of its own: the readable specification of our kernels.

The recurrence and the names are those of `numdev.attention.recurrence`; `POLICY` holds one cast per step (see
`numdev.attention.kernels.casts`), and a cast that changes nothing leaves no instruction. Under the policy `kernel(F)` this is a
FlashAttention-2 forward pass (Dao 2023, Algorithm 1); under any other it is the instrument, at the speed of a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.attention.kernels.casts import add, cast, decay, over, times
from numdev.attention.kernels.tiles import load, seen, visible


@triton.jit
def multiply(a, b, acc, PRODUCT: tl.constexpr):
    """`a b`, added to acc if there is one, in FP32; products of the type PRODUCT names are exact but for those of `ieee`."""
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
def meet(
    tile, q, k, v, m, row_sum, o, rows, keys, shift, window, factor, threshold, p_scale,
    k_row, k_dim, v_row, v_dim, bc, DIM: tl.constexpr, PAD: tl.constexpr, BC: tl.constexpr,
    MASK: tl.constexpr, POLICY: tl.constexpr, EVERY: tl.constexpr, PRODUCTS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """One tile of keys: `m, l, O -> m', l', O'`."""
    CAUSAL: tl.constexpr = OPTIONS[0]
    WINDOW: tl.constexpr = OPTIONS[1]
    BINARY: tl.constexpr = OPTIONS[2]
    LAZY: tl.constexpr = OPTIONS[3]
    EACH: tl.constexpr = OPTIONS[4]
    FUSED: tl.constexpr = OPTIONS[5]
    SCALED_P: tl.constexpr = OPTIONS[6]
    LOCAL: tl.constexpr = OPTIONS[7]
    QK: tl.constexpr = PRODUCTS[0]
    PV: tl.constexpr = PRODUCTS[1]
    EVERY_QK: tl.constexpr = EVERY[0]
    EVERY_SUM: tl.constexpr = EVERY[1]
    EVERY_PV: tl.constexpr = EVERY[2]
    SCORES: tl.constexpr = POLICY[0]
    EXPONENTIAL: tl.constexpr = POLICY[1]
    RESCALE: tl.constexpr = POLICY[2]
    ROW_SUM: tl.constexpr = POLICY[3]
    PROBABILITIES: tl.constexpr = POLICY[4]
    VALUES: tl.constexpr = POLICY[5]
    ACCUMULATOR: tl.constexpr = POLICY[6]
    columns = tile * bc + tl.arange(0, BC)
    inner = tl.arange(0, PAD)
    end = tile * bc + bc
    k_tile = load(k, columns, k_row, inner, k_dim, tl.minimum(end, keys), DIM, MASK or PAD != DIM)
    s = dot(q, tl.trans(k_tile), PAD, EVERY_QK, QK, SCORES)
    s = times(s, factor + tl.zeros_like(s), SCORES)
    if MASK:
        sees = visible(rows, columns, end, keys, shift, window, CAUSAL, WINDOW)
        s = tl.where(sees, s, float("-inf"))
    largest = tl.max(s, 1)
    if LAZY:
        m_next = tl.where(largest - m > threshold, largest, m)
    else:
        m_next = tl.maximum(m, largest)
    base = tl.where(m_next == float("-inf"), 0.0, m_next)
    if LOCAL:
        own = tl.where(largest == float("-inf"), 0.0, largest)
    else:
        own = base
    p = decay(s, own[:, None] + tl.zeros_like(s), BINARY, EXPONENTIAL)
    alpha = decay(m, base, BINARY, RESCALE)
    kept = times(row_sum, alpha, ROW_SUM)
    tile_sum = row_sums(p, EVERY_SUM, ROW_SUM)
    if LOCAL:
        beta = decay(largest, base, BINARY, RESCALE)
        tile_sum = times(tile_sum, beta, ROW_SUM)
    row_sum_next = add(kept, tile_sum, ROW_SUM)
    v_tile = load(v, columns, v_row, inner, v_dim, tl.minimum(end, keys), DIM, MASK or PAD != DIM)
    if SCALED_P:
        p = times(p, p_scale + tl.zeros_like(p), PROBABILITIES)
    else:
        p = cast(p, PROBABILITIES)
    if FUSED:
        o_next = multiply(p, v_tile, o * alpha[:, None], PV)
    else:
        product = dot(p, v_tile, BC, EVERY_PV, PV, VALUES)
        if SCALED_P:
            product = over(product, p_scale + tl.zeros_like(product), VALUES)
        if LOCAL:
            product = times(product, beta[:, None] + tl.zeros_like(product), ACCUMULATOR)
        if EACH:
            o_next = times(o, kept[:, None] + tl.zeros_like(o), ACCUMULATOR)
        else:
            o_next = times(o, alpha[:, None] + tl.zeros_like(o), ACCUMULATOR)
        o_next = add(o_next, product, ACCUMULATOR)
        if EACH:
            divisor = tl.where(row_sum_next == 0.0, 1.0, row_sum_next)
            o_next = over(o_next, divisor[:, None] + tl.zeros_like(o_next), ACCUMULATOR)
    if MASK:  # a row that sees no key of the tile keeps its state
        touched = tl.max(sees.to(tl.int32), 1) > 0
        m_next = tl.where(touched, m_next, m)
        row_sum_next = tl.where(touched, row_sum_next, row_sum)
        o_next = tl.where(touched[:, None], o_next, o)
    return m_next, row_sum_next, o_next


@triton.jit
def phase(
    first, last, q, k, v, m, row_sum, o, rows, keys, shift, window, factor, threshold, p_scale,
    k_row, k_dim, v_row, v_dim, bc, DIM: tl.constexpr, PAD: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr,
    MASK: tl.constexpr, POLICY: tl.constexpr, EVERY: tl.constexpr, PRODUCTS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The tiles `[first, last)`, which all need the mask or all need none."""
    for i in tl.range(first, last):
        if REVERSE:
            tile = first + last - 1 - i
        else:
            tile = i
        m, row_sum, o = meet(
            tile, q, k, v, m, row_sum, o, rows, keys, shift, window, factor, threshold, p_scale,
            k_row, k_dim, v_row, v_dim, bc, DIM, PAD, BC, MASK, POLICY, EVERY, PRODUCTS, OPTIONS,
        )  # fmt: skip
    return m, row_sum, o


@triton.jit
def attention(
    q, k, v, out, lse, lengths, bounds, factor, log_scale, threshold, p_scale,
    heads, group, queries, keys, window, br, bc,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim, v_batch, v_head, v_row, v_dim,
    DIM: tl.constexpr, PAD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr, LENGTHS: tl.constexpr,
    RAGGED: tl.constexpr, POLICY: tl.constexpr, EVERY: tl.constexpr, PRODUCTS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head against one split of the keys; out and lse are `[splits, batch, heads, queries(, dim)]`."""
    block, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = pair // heads, pair % heads
    shift = keys - queries
    row0 = block * br
    row1 = tl.minimum(row0 + br, queries)
    rows = row0 + tl.arange(0, BR)
    inner = tl.arange(0, PAD)
    if LENGTHS:
        keys = tl.load(lengths + b)
    q += b.to(tl.int64) * q_batch + h.to(tl.int64) * q_head
    k += b.to(tl.int64) * k_batch + (h // group).to(tl.int64) * k_head
    v += b.to(tl.int64) * v_batch + (h // group).to(tl.int64) * v_head
    q_tile = load(q, rows, q_row, inner, q_dim, row1, DIM, True)
    m = tl.full([BR], float("-inf"), tl.float32)
    row_sum = tl.zeros([BR], tl.float32)
    o = tl.zeros([BR, PAD], tl.float32)
    CAUSAL: tl.constexpr = OPTIONS[0]
    WINDOW: tl.constexpr = OPTIONS[1]
    ROW_SUM: tl.constexpr = POLICY[3]
    ACCUMULATOR: tl.constexpr = POLICY[6]
    low, high, all_low, all_high = seen(row0, row1, keys, shift, window, CAUSAL, WINDOW)
    start, stop = tl.load(bounds + split), tl.load(bounds + split + 1)
    start = tl.maximum(start, low // bc)
    stop = tl.maximum(tl.minimum(stop, tl.cdiv(high, bc)), start)
    if RAGGED:  # tiles padded to a power of two, or rows masked in every tile: there is no tile without a mask
        whole0 = stop
        whole1 = stop
    else:
        whole0 = tl.minimum(tl.maximum(tl.cdiv(all_low, bc), start), stop)
        whole1 = tl.minimum(tl.maximum(all_high // bc, whole0), stop)
    # Masked tiles before the whole ones, the whole ones, masked ones behind; in reverse the other way round.
    if REVERSE:
        first, last = whole1, stop
    else:
        first, last = start, whole0
    m, row_sum, o = phase(
        first, last, q_tile, k, v, m, row_sum, o, rows, keys, shift, window, factor, threshold, p_scale,
        k_row, k_dim, v_row, v_dim, bc, DIM, PAD, BC, REVERSE, True, POLICY, EVERY, PRODUCTS, OPTIONS,
    )  # fmt: skip
    m, row_sum, o = phase(
        whole0, whole1, q_tile, k, v, m, row_sum, o, rows, keys, shift, window, factor, threshold, p_scale,
        k_row, k_dim, v_row, v_dim, bc, DIM, PAD, BC, REVERSE, False, POLICY, EVERY, PRODUCTS, OPTIONS,
    )  # fmt: skip
    if REVERSE:
        first, last = start, whole0
    else:
        first, last = whole1, stop
    m, row_sum, o = phase(
        first, last, q_tile, k, v, m, row_sum, o, rows, keys, shift, window, factor, threshold, p_scale,
        k_row, k_dim, v_row, v_dim, bc, DIM, PAD, BC, REVERSE, True, POLICY, EVERY, PRODUCTS, OPTIONS,
    )  # fmt: skip
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    if not OPTIONS[4]:
        o = over(o, divisor[:, None] + tl.zeros_like(o), ACCUMULATOR)
    base = tl.where(m == float("-inf"), 0.0, m)
    if OPTIONS[2]:
        base = over(base, log_scale + tl.zeros_like(base), ROW_SUM)
    value = tl.where(row_sum == 0.0, float("-inf"), add(base, cast(tl.log(divisor), ROW_SUM), ROW_SUM))
    at = (split.to(tl.int64) * tl.num_programs(1) + pair) * queries + rows
    tl.store(lse + at, value, mask=rows < row1)
    tl.store(
        out + at[:, None] * DIM + inner[None, :], o.to(out.dtype.element_ty), mask=(rows < row1)[:, None] & (inner < DIM)[None, :]
    )
