"""Tiled attention as one Triton kernel, every step in a format of its own: the readable specification of our kernels.

The recurrence and the names are those of `numdev.attention.recurrence`. `CODE`, a `Code`, holds the constants of one compiled
kernel, such as one cast for each step; a cast that changes nothing compiles to no instruction. Under the policy `kernel(F)` this
is a FlashAttention-2 forward pass (Dao 2023, Algorithm 1); under any other policy it measures that policy at the speed of a GPU.
`combine` is the last step of split-KV; `numdev.attention.steps` is its specification, cast for cast.

With splits of a fixed size a program does all of them in order and joins them (`join`), or each program does one and `joined`
joins them: the bits of a row are the same, since tiles lie at the same keys, all launches have one tile (`launch.choose`), and
the compiler contracts no product with a sum: it would where a whole tile meets the row, but not where other rows need a mask.

With Nq queries and Nk keys, query i stands at `p = i + shift`, `shift = Nk - Nq`; the first and last key that it sees are
`p - window + 1` and `min(p, p + window - 1)`, within the keys of its batch entry (`numdev.attention.mask.Mask`).
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import fields
from typing import Any, NamedTuple

import triton
import triton.language as tl

from numdev.attention.kernels.casts import BF16_OPERANDS, FP16_OPERANDS, TF32_OPERANDS, add, cast, decay, over, times
from numdev.attention.precision import Precision

# A `Spec` for each step between inputs and output; see `numdev.attention.precision.Precision`.
Policy = namedtuple("Policy", [step.name for step in fields(Precision)][1:-1])  # type: ignore[misc]


class Tile(NamedTuple):
    """The blocks in registers, which tiles of keys are visited in which order, and what limits the keys that a row sees.

    Attributes:
        br, bc, pad: sides of a block, powers of two of at least 16; `dim` is padded to `pad`.
        reverse: whether tiles are visited from the last to the first.
        ragged: whether the tiles of the loop are shorter than a block, so that every tile needs a mask.
        causal, window, lengths: which limits there are.
    """

    br: int
    bc: int
    pad: int
    dim: int
    reverse: bool
    ragged: bool
    causal: bool
    window: bool
    lengths: bool


class Code(NamedTuple):
    """The constants of one compiled kernel.

    Attributes:
        policy: a `Policy`.
        binary: exponentials are `2^x`.
        lazy: the maximum moves only beyond a threshold.
        each: O is divided by the row sum after each tile, not once at the end.
        fused: `alpha O + P V` is one accumulation.
        scaled: P is scaled before its cast, and `P V` scaled back.
        local: P is relative to the tile's own maximum.
        per: tiles of a split that is joined to those before it; 0 where a program has one split.
        parts: whether a program leaves `m`, `l` and `O` of its split to `joined`.
        words: whether v is read as words of four E4M3 numbers, see `multiply_words`.
    """

    tile: Tile
    policy: tuple[Any, ...]
    binary: bool
    lazy: bool
    each: bool
    fused: bool
    scaled: bool
    local: bool
    per: int = 0
    parts: bool = False
    words: bool = False


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


@triton.jit
def multiply(a, b, acc, SPEC: tl.constexpr):
    """`a [M, K] b [K, N]`, added to `acc [M, N]` if that is not None, in FP32. Only products of FP32 operands are not exact."""
    if SPEC.product == FP16_OPERANDS:
        return tl.dot(a.to(tl.float16), b.to(tl.float16), acc)
    if SPEC.product == BF16_OPERANDS:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    if SPEC.product == TF32_OPERANDS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32")
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def multiply_words(p, words, acc, BR: tl.constexpr, PAD: tl.constexpr):
    """`acc [BR, PAD] + P V`, p not yet rounded; word j of a row of `words [BC, PAD / 4]` holds columns 4 j to 4 j + 3 of V.

    The tensor cores want numbers of several keys side by side, which leave shared memory one byte at a time otherwise. P is at
    most about 1, so the instruction that rounds it to E4M3 never saturates.
    """
    asm: tl.constexpr = (
        "{ .reg .b16 low, high; .reg .b32 a, b; mov.b32 {low, high}, $4; cvt.rn.f16x2.e4m3x2 a, low;"
        " cvt.rn.f16x2.e4m3x2 b, high; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
    )
    four: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
    v_0, v_1, v_2, v_3 = tl.inline_asm_elementwise(asm, "=h,=h,=h,=h,r", [words], dtype=four, is_pure=True, pack=1)
    p = p.to(tl.float8e4nv).to(tl.float16)
    even, odd = tl.split(acc.reshape([BR, PAD // 4, 2, 2]))  # [BR, PAD / 4, 2]
    o_0, o_2 = tl.split(even)
    o_1, o_3 = tl.split(odd)
    even = tl.join(tl.dot(p, v_0, o_0), tl.dot(p, v_2, o_2))
    odd = tl.join(tl.dot(p, v_1, o_1), tl.dot(p, v_3, o_3))
    return tl.join(even, odd).reshape([BR, PAD])


@triton.jit
def dot(a, b, INNER: tl.constexpr, SPEC: tl.constexpr):
    """`numdev.arithmetic.products.Dot`: the running sum is rounded after every `SPEC.every` products, 0 for once."""
    if SPEC.every == 0:
        return cast(multiply(a, b, None, SPEC), SPEC)
    inner = tl.arange(0, INNER)[None, :]
    total = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    for start in tl.range(0, INNER, SPEC.every):
        part = tl.where((inner >= start) & (inner < start + SPEC.every), a, 0.0)  # adding zeros is exact
        total = add(total, multiply(part, b, None, SPEC), SPEC)
    return total


@triton.jit
def row_sums(p, SPEC: tl.constexpr):
    """`numdev.arithmetic.products.Dot.sum`."""
    if SPEC.every == 0:
        return cast(tl.sum(p, 1), SPEC)
    inner = tl.arange(0, p.shape[1])[None, :]
    total = tl.zeros([p.shape[0]], tl.float32)
    for start in tl.range(0, p.shape[1], SPEC.every):
        total = add(total, tl.sum(tl.where((inner >= start) & (inner < start + SPEC.every), p, 0.0), 1), SPEC)
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
    s = dot(rows.q, tl.trans(k_tile), PAD, SCORES)  # [BR, BC]
    s = times(s, factors.scores + tl.zeros_like(s), SCORES)
    if MASK:
        # [BR, BC]
        sees = visible(rows.places, columns, end, rows.keys, rows.shift, rows.window, CODE.tile.causal, CODE.tile.window)
        s = tl.where(sees, s, float("-inf"))
    largest = tl.max(s, 1)  # [BR]
    if CODE.lazy:
        m_next = tl.where(largest - m > factors.threshold, largest, m)
    else:
        m_next = tl.maximum(m, largest)
    base = tl.where(m_next == float("-inf"), 0.0, m_next)  # [BR]
    if CODE.local:
        own = tl.where(largest == float("-inf"), 0.0, largest)
    else:
        own = base
    p = decay(s, own[:, None] + tl.zeros_like(s), CODE.binary, EXPONENTIAL)  # [BR, BC]
    alpha = decay(m, base, CODE.binary, RESCALE)  # [BR]
    kept = times(row_sum, alpha, ROW_SUM)
    tile_sum = row_sums(p, ROW_SUM)  # [BR]
    if CODE.local:
        beta = decay(largest, base, CODE.binary, RESCALE)  # [BR]
        tile_sum = times(tile_sum, beta, ROW_SUM)
    row_sum_next = add(kept, tile_sum, ROW_SUM)
    if CODE.words:
        v = View(v.at.to(tl.pointer_type(tl.int32), bitcast=True), v.batch, v.head, v.row // 4, v.dim)
        v_tile = load(v, columns, tl.arange(0, PAD // 4), tl.minimum(end, rows.keys), DIM // 4, MASK or PAD != DIM)
    else:
        v_tile = load(v, columns, inner, tl.minimum(end, rows.keys), DIM, MASK or PAD != DIM)  # [BC, PAD]
    if CODE.scaled:
        p = times(p, factors.p + tl.zeros_like(p), PROBABILITIES)
    elif not CODE.words:
        p = cast(p, PROBABILITIES)
    if CODE.words:
        o_next = multiply_words(p, v_tile, o * alpha[:, None], CODE.tile.br, PAD)
    elif CODE.fused:
        o_next = multiply(p, v_tile, o * alpha[:, None], VALUES)
    else:
        product = dot(p, v_tile, BC, VALUES)  # [BR, PAD]
        if CODE.scaled:
            product = over(product, factors.p + tl.zeros_like(product), VALUES)
        if CODE.local:
            product = times(product, beta[:, None] + tl.zeros_like(product), ACCUMULATOR)
        if CODE.each:
            o_next = times(o, kept[:, None] + tl.zeros_like(o), ACCUMULATOR)
        else:
            o_next = times(o, alpha[:, None] + tl.zeros_like(o), ACCUMULATOR)
        o_next = add(o_next, product, ACCUMULATOR)
        if CODE.each:
            divisor = tl.where(row_sum_next == 0.0, 1.0, row_sum_next)
            o_next = over(o_next, divisor[:, None] + tl.zeros_like(o_next), ACCUMULATOR)
    if MASK:  # a row that sees no key of the tile keeps its state
        touched = tl.max(sees.to(tl.int32), 1) > 0  # [BR]
        m_next = tl.where(touched, m_next, m)
        row_sum_next = tl.where(touched, row_sum_next, row_sum)
        o_next = tl.where(touched[:, None], o_next, o)
    return State(m_next, row_sum_next, o_next)


@triton.jit
def empty(BR: tl.constexpr, PAD: tl.constexpr):
    """The state of rows before any key."""
    return State(tl.full([BR], float("-inf"), tl.float32), tl.zeros([BR], tl.float32), tl.zeros([BR, PAD], tl.float32))


@triton.jit
def join(total, state, MASK: tl.constexpr, CODE: tl.constexpr):
    """A split after those of `total`, as a tile is under `local`; a row that sees no key of it keeps its state."""
    RESCALE: tl.constexpr = CODE.policy.rescale
    ROW_SUM: tl.constexpr = CODE.policy.row_sum
    ACCUMULATOR: tl.constexpr = CODE.policy.accumulator
    m = tl.maximum(total.m, state.m)
    base = tl.where(m == float("-inf"), 0.0, m)
    alpha = decay(total.m, base, CODE.binary, RESCALE)
    beta = decay(state.m, base, CODE.binary, RESCALE)
    kept = times(total.row_sum, alpha, ROW_SUM)
    own = times(state.row_sum, beta, ROW_SUM)
    row_sum = add(kept, own, ROW_SUM)
    if CODE.each:
        alpha = kept
        beta = own
    left = times(total.o, alpha[:, None] + tl.zeros_like(total.o), ACCUMULATOR)
    right = times(state.o, beta[:, None] + tl.zeros_like(state.o), ACCUMULATOR)
    o = add(left, right, ACCUMULATOR)
    if CODE.each:
        divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
        o = over(o, divisor[:, None] + tl.zeros_like(o), ACCUMULATOR)
    if MASK:
        seen = state.m != float("-inf")
        row_sum = tl.where(seen, row_sum, total.row_sum)
        o = tl.where(seen[:, None], o, total.o)
    return State(m, row_sum, o)


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
def walk(start, whole0, whole1, stop, rows, k, v, state, factors, bc, CODE: tl.constexpr):
    """The tiles `[start, stop)`: masked ones, then the whole ones `[whole0, whole1)`, then masked ones; in reverse the other way
    round.
    """
    if CODE.tile.reverse:
        state = phase(whole1, stop, rows, k, v, state, factors, bc, True, CODE)
    else:
        state = phase(start, whole0, rows, k, v, state, factors, bc, True, CODE)
    state = phase(whole0, whole1, rows, k, v, state, factors, bc, False, CODE)
    if CODE.tile.reverse:
        state = phase(start, whole0, rows, k, v, state, factors, bc, True, CODE)
    else:
        state = phase(whole1, stop, rows, k, v, state, factors, bc, True, CODE)
    return state


@triton.jit
def walk_splits(first, last, start, whole0, whole1, stop, rows, k, v, state, factors, bc, MASK: tl.constexpr, CODE: tl.constexpr):
    """The splits `[first, last)`, each from an empty state, joined to `state`; without a mask all their tiles are whole."""
    for split in tl.range(first, last):
        begin = split * CODE.per
        own = empty(CODE.tile.br, CODE.tile.pad)
        if MASK:
            end = tl.minimum(begin + CODE.per, stop)
            begin = tl.maximum(begin, start)
            low = tl.minimum(tl.maximum(whole0, begin), end)
            high = tl.minimum(tl.maximum(whole1, begin), end)
            own = walk(begin, low, high, end, rows, k, v, own, factors, bc, CODE)
        else:
            own = phase(begin, begin + CODE.per, rows, k, v, own, factors, bc, False, CODE)
        state = join(state, own, MASK, CODE)
    return state


@triton.jit
def finish(state, factors, CODE: tl.constexpr):
    """The normalised `O [BR, PAD]`, and the natural LSE `[BR]`, minus infinity for a row that sees no key."""
    ROW_SUM: tl.constexpr = CODE.policy.row_sum
    ACCUMULATOR: tl.constexpr = CODE.policy.accumulator
    divisor = tl.where(state.row_sum == 0.0, 1.0, state.row_sum)
    o = state.o
    if not CODE.each:
        o = over(o, divisor[:, None] + tl.zeros_like(o), ACCUMULATOR)
    base = tl.where(state.m == float("-inf"), 0.0, state.m)
    if CODE.binary:
        base = over(base, factors.log + tl.zeros_like(base), ROW_SUM)
    lse = tl.where(state.row_sum == 0.0, float("-inf"), add(base, cast(tl.log(divisor), ROW_SUM), ROW_SUM))
    return o, lse


@triton.jit
def attention(q, k, v, out, lse, lengths, bounds, factors, sizes, CODE: tl.constexpr):
    """One block of rows of one head against one split of the keys.

    q, k and v are `View`s; out is `[splits, batch, heads, queries, dim]`, lse the same without dim, lengths `[batch]`. bounds
    `[splits + 1]` are the tiles at which the splits begin and end. With `parts` lse has m, and after those of all splits l.
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
    if CODE.tile.lengths:
        keys = tl.load(lengths + b)
    q_tile = load(head(q, b, h), places, inner, row1, DIM, True)  # [BR, PAD]
    rows = Rows(q_tile, places, keys, shift, sizes.window)
    k = head(k, b, h // sizes.group)
    v = head(v, b, h // sizes.group)
    state = empty(BR, PAD)
    bc = sizes.bc
    low, high, all_low, all_high = seen(row0, row1, keys, shift, sizes.window, CODE.tile.causal, CODE.tile.window)
    start, stop = tl.load(bounds + split), tl.load(bounds + split + 1)
    start = tl.maximum(start, low // bc)
    stop = tl.maximum(tl.minimum(stop, tl.cdiv(high, bc)), start)
    if CODE.tile.ragged:
        whole0 = stop
        whole1 = stop
    else:
        whole0 = tl.minimum(tl.maximum(tl.cdiv(all_low, bc), start), stop)
        whole1 = tl.minimum(tl.maximum(all_high // bc, whole0), stop)
    if CODE.per == 0:
        state = walk(start, whole0, whole1, stop, rows, k, v, state, factors, bc, CODE)
    else:  # in three loops, since each loop over tiles fills its pipeline anew, also if it has no tile
        last = tl.cdiv(stop, CODE.per)
        low = tl.minimum(tl.cdiv(whole0, CODE.per), last)
        high = tl.maximum(whole1 // CODE.per, low)
        if CODE.tile.window or CODE.tile.ragged:
            first = start // CODE.per
            state = walk_splits(first, low, start, whole0, whole1, stop, rows, k, v, state, factors, bc, True, CODE)
        state = walk_splits(low, high, start, whole0, whole1, stop, rows, k, v, state, factors, bc, False, CODE)
        state = walk_splits(high, last, start, whole0, whole1, stop, rows, k, v, state, factors, bc, True, CODE)
    if CODE.parts:
        o, value = state.o, state.m
    else:
        o, value = finish(state, factors, CODE)
    at = (split.to(tl.int64) * tl.num_programs(1) + pair) * sizes.queries + places  # [BR]
    is_row = places < row1
    if CODE.parts:
        each = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * sizes.queries
        tl.store(lse + each + at, state.row_sum, mask=is_row)
    tl.store(lse + at, value, mask=is_row)
    elements = out + at[:, None] * DIM + inner[None, :]  # [BR, PAD]
    tl.store(elements, o.to(out.dtype.element_ty), mask=is_row[:, None] & (inner < DIM)[None, :])


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


@triton.jit
def joined(parts, sums, out, lse, splits, rows, factors, BR: tl.constexpr, CODE: tl.constexpr):
    """One result of splits of a fixed size: parts are their `O [splits, rows, DIM]`, sums `m` and `l`, `[2, splits, rows]`."""
    DIM: tl.constexpr = CODE.tile.dim
    PAD: tl.constexpr = CODE.tile.pad
    row = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    inner = tl.arange(0, PAD)  # [PAD]
    is_row = row < rows
    is_element = is_row[:, None] & (inner < DIM)[None, :]
    offset = row.to(tl.int64)[:, None] * DIM + inner[None, :]  # [BR, PAD]
    total = empty(BR, PAD)
    for s in tl.range(0, splits, num_stages=8):
        m = tl.load(sums + s * rows + row, mask=is_row, other=float("-inf"))
        row_sum = tl.load(sums + (splits + s) * rows + row, mask=is_row, other=0.0)
        part = tl.load(parts + tl.cast(s, tl.int64) * rows * DIM + offset, mask=is_element, other=0.0)
        total = join(total, State(m, row_sum, part), True, CODE)
    o, value = finish(total, factors, CODE)
    tl.store(lse + row, value, mask=is_row)
    tl.store(out + offset, o.to(out.dtype.element_ty), mask=is_element)
