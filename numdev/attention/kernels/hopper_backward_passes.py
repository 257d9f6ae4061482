"""What runs before and after the Hopper backward kernels: delta, LSE in units of log 2, counters; dQ in the output's format."""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.attention.kernels import hopper_backward_order as order

TILE = tl.constexpr(order.TILE)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["queries", "rows_of_head", "heads"])
def preprocess(
    out, do, lse, lse2, delta, turns, queries, rows_of_head, heads, DIM: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr
):
    """`delta_i = sum_d dO_id O_id` in FP32, `lse2 = LSE log2(e)`, and a 0 in `turns` for each PART rows.

    out, do and lse are views; lse2 and delta are `[batch, heads, rows_of_head]`, a multiple of ROWS. Rows that see no key and
    rows beyond the last have lse2 of infinity, so that their P is 0, and a delta of 0.
    """
    tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0).to(tl.int64) * ROWS
    tl.store(turns + first // PART, 0)
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


@triton.jit
def additions(unit, keys, shift, CAUSAL: tl.constexpr):
    """How many tiles of `keys` keys hold a key that a unit of queries sees; query i sees keys up to `i + shift`."""
    seen = keys
    if CAUSAL:
        seen = tl.minimum(keys, (unit + 1) * TILE + shift)
    return (seen + TILE - 1) // TILE


@triton.jit(do_not_specialize=["queries", "rows_of_head", "heads", "shift"])
def convert(
    total, dq, lengths, turns, scale, queries, rows_of_head, heads, shift,
    DIM: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """`dQ = F(scale * total)`, total `[batch, heads, rows_of_head, DIM]`; 0 for batch entries without keys, where total is unset.

    It may start while the kernel that computes `total` still runs, and waits for the counter of its tile of BR queries.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    head = first // rows_of_head
    b = head // heads
    at = first % rows_of_head
    row = at + tl.arange(0, ROWS)  # [ROWS]
    inner = tl.arange(0, DIM)[None, :]
    is_row = (row < queries)[:, None] & (inner < DIM)
    keys = tl.load(lengths + b)
    needed = additions(at // TILE, keys, shift, CAUSAL)
    while tl.atomic_add(turns + first // BR, 0, sem="acquire", scope="gpu") < needed:
        tl.inline_asm_elementwise("nanosleep.u32 256; mov.u32 $0, 0;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
    x = tl.load(total + (first + tl.arange(0, ROWS))[:, None] * DIM + inner, mask=is_row & (keys > 0), other=0.0)  # [ROWS, DIM]
    o_dq = b * dq.batch + (head % heads) * dq.head + row[:, None] * dq.row + inner * dq.dim
    tl.store(dq.at + o_dq, (x * scale).to(dq.at.dtype.element_ty), mask=is_row)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()  # so that this kernel ends after its predecessor, whose dK and dV it does not read
