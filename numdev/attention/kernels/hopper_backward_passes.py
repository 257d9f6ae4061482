"""Before and after the Hopper backward kernels: delta and the LSE in units of log 2, counters, and dQ in the format of the output."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["queries", "rows_of_head", "heads"])
def preprocess(out, do, lse, lse2, delta, turns, queries, rows_of_head, heads, DIM: tl.constexpr, ROWS: tl.constexpr):
    """`delta_i = sum_d dO_id O_id` in FP32, `lse2 = LSE log2(e)`, and a 0 for each of the programs in `turns`.

    out, do and lse are views; lse2 and delta are `[batch, heads, rows_of_head]`, a multiple of ROWS. Rows that see no key and rows
    beyond the last have lse2 of infinity, so that their P is 0, and a delta of 0.
    """
    tl.store(turns + tl.program_id(0), 0)
    first = tl.program_id(0).to(tl.int64) * ROWS
    head = first // rows_of_head
    b = head // heads
    h = head % heads
    row = (first % rows_of_head) + tl.arange(0, ROWS)  # [ROWS]
    is_row = row < queries
    inner = tl.arange(0, DIM)[None, :]
    o_out = b * out.batch + h * out.head + row[:, None] * out.row + inner * out.dim
    o_do = b * do.batch + h * do.head + row[:, None] * do.row + inner * do.dim
    product = tl.load(out.at + o_out, mask=is_row[:, None], other=0.0).to(tl.float32)
    product *= tl.load(do.at + o_do, mask=is_row[:, None], other=0.0).to(tl.float32)  # [ROWS, DIM]
    value = tl.load(lse.at + b * lse.batch + h * lse.head + row * lse.row, mask=is_row, other=float("-inf"))  # [ROWS]
    empty = value == float("-inf")
    at = first + tl.arange(0, ROWS)
    tl.store(delta + at, tl.where(empty, 0.0, tl.sum(product, 1)))
    tl.store(lse2 + at, tl.where(empty, float("inf"), value * LOG2E))


@triton.jit(do_not_specialize=["queries", "rows_of_head", "heads"])
def convert(total, dq, lengths, scale, queries, rows_of_head, heads, DIM: tl.constexpr, ROWS: tl.constexpr):
    """`dQ = F(scale * total)`; 0 where a batch entry has no key, whose rows of `total [batch, heads, rows_of_head, DIM]` nobody wrote."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    head = first // rows_of_head
    b = head // heads
    row = (first % rows_of_head) + tl.arange(0, ROWS)  # [ROWS]
    inner = tl.arange(0, DIM)[None, :]
    is_row = (row < queries)[:, None] & (inner < DIM)
    has_keys = tl.load(lengths + b) > 0
    x = tl.load(total + (first + tl.arange(0, ROWS))[:, None] * DIM + inner, mask=is_row & has_keys, other=0.0)  # [ROWS, DIM]
    o_dq = b * dq.batch + (head % heads) * dq.head + row[:, None] * dq.row + inner * dq.dim
    tl.store(dq.at + o_dq, (x * scale).to(dq.at.dtype.element_ty), mask=is_row)
