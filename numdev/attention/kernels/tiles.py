"""Which keys a tile of rows sees, and how tiles are read: `numdev.attention.mask.Mask` inside a kernel.

With Nq queries and Nk keys, query i stands at `p = i + shift`, `shift = Nk - Nq`; the first and last key that it sees are
`p - window + 1` and `min(p, p + window - 1)`, within the keys of its batch entry.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def seen(row0, row1, keys, shift, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Two half-open ranges of keys: every key that a row of `[row0, row1)` sees lies in the first; all rows see the second."""
    low, high = row0 * 0, keys
    all_low, all_high = row0 * 0, keys
    if CAUSAL:
        high = tl.minimum(high, row1 + shift)
        all_high = tl.minimum(all_high, row0 + shift + 1)
    if WINDOW:
        low = row0 + shift - window + 1
        high = tl.minimum(high, row1 - 1 + shift + window)
        all_low = row1 - 1 + shift - window + 1
        all_high = tl.minimum(all_high, row0 + shift + window)
    return tl.maximum(low, 0), tl.maximum(high, 0), tl.maximum(all_low, 0), tl.maximum(all_high, 0)


@triton.jit
def visible(rows, columns, end, keys, shift, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether each row sees each column of a tile that ends before `end`."""
    position = rows[:, None] + shift
    column = columns[None, :]
    sees = (column < tl.minimum(end, keys)) & (position >= shift)
    if CAUSAL:
        sees = sees & (column <= position)
    if WINDOW:
        sees = sees & (tl.abs(position - column) < window)
    return sees


@triton.jit
def load(view, index, inner, count, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load rows `index` and columns `inner` of one head, 0 beyond `count` rows and beyond DIM; offsets are 64 bits wide."""
    pointers = view.at + index.to(tl.int64)[:, None] * view.row + inner.to(tl.int64)[None, :] * view.dim  # [rows, PAD]
    if MASKED:
        return tl.load(pointers, mask=(index < count)[:, None] & (inner < DIM)[None, :], other=0.0)
    return tl.load(pointers)
