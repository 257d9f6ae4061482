"""The last step of split-KV as a kernel: `numdev.attention.steps` is its specification, cast for cast."""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.attention.kernels.casts import add, cast, decay, times


@triton.jit
def weight(value, reference, RESCALE: tl.constexpr):
    """`exp(LSE_s - LSE)`; 0 for a split that sees no key, whose LSE of minus infinity is not rounded."""
    return decay(value, tl.where(reference == float("-inf"), 0.0, reference), False, RESCALE)


@triton.jit
def combine(
    parts, part_lse, out, lse, splits, rows,
    DIM: tl.constexpr, PAD: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """`O = sum_s w_s O_s`, `w_s = exp(LSE_s - LSE)`, the splits in their order.

    parts are `[splits, rows, DIM]`, part_lse `[splits, rows]`; SPLITS is the smallest power of two of at least splits.
    """
    RESCALE: tl.constexpr = POLICY.rescale
    ROW_SUM: tl.constexpr = POLICY.row_sum
    ACCUMULATOR: tl.constexpr = POLICY.accumulator
    row = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    inner = tl.arange(0, PAD)  # [PAD]
    is_row = row < rows
    is_element = is_row[:, None] & (inner < DIM)[None, :]
    each = tl.arange(0, SPLITS)[:, None]  # [SPLITS, 1]
    every = tl.load(part_lse + each * rows + row[None, :], mask=(each < splits) & is_row[None, :], other=float("-inf"))
    largest = tl.max(every, 0)
    total = tl.zeros([BR], tl.float32)
    for s in tl.range(0, splits, loop_unroll_factor=4):
        value = tl.load(part_lse + s * rows + row, mask=is_row, other=float("-inf"))
        total = add(total, weight(value, largest, RESCALE), ROW_SUM)
    has_sum = total != 0.0
    whole = add(tl.where(has_sum, largest, 0.0), cast(tl.log(tl.where(has_sum, total, 1.0)), ROW_SUM), ROW_SUM)
    whole = tl.where(has_sum, whole, float("-inf"))
    o = tl.zeros([BR, PAD], tl.float32)
    offset = row.to(tl.int64)[:, None] * DIM + inner[None, :]  # [BR, PAD]
    stride = tl.cast(rows, tl.int64) * DIM
    for s in tl.range(0, splits, num_stages=8):
        value = tl.load(part_lse + s * rows + row, mask=is_row, other=float("-inf"))
        part = tl.load(parts + s * stride + offset, mask=is_element, other=0.0)
        share = weight(value, whole, RESCALE)[:, None] + tl.zeros_like(part)
        o = add(o, times(part, share, ACCUMULATOR), ACCUMULATOR)
    tl.store(lse + row, whole, mask=is_row)
    tl.store(out + offset, o.to(out.dtype.element_ty), mask=is_element)
