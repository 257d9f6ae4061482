"""The elementwise work on a tile, compiled by numba, both passes: bits of `numdev.arithmetic` and `numdev.attention.recurrence`.

All of it is one module, because numba keeps compiled code on disk under the time and size of the file that defines it: in
`__pycache__` beside it, in the user's cache folder, or in `NUMBA_CACHE_DIR`. First casts and operations that round once, in FP32:
the bits of a number are a 32-bit integer, and magnitudes have the order of their bits. A loop runs over a whole array or slice,
because only then does the compiler know that no index is negative, and uses vector instructions. Then the passes over a tile,
before and between which torch multiplies, and computes exponentials and sums of rows.

Shapes: S, P and dP `[matrices, rows, columns]`, O, dQ and what is added to them `[matrices, rows, values]`, dK and dV `[columns,
values]`, planes `[what, matrices, rows]`.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.core import event

LOG = logging.getLogger("numdev")

# A cast, and whether the operation before it needs care (`numdev.arithmetic.elementary`): a row of int32.
KIND, SHIFT, LOW, HIGH, TOP, ABOVE, CAREFUL, FIELDS = range(8)
NOTHING, ON_BITS, BY_ADDER = range(3)
# Operations, by the names of `Policy.operations`, and the casts that follow no operation.
SCALE_S, SHIFT_S, WEIGH_SUM, ADD_SUMS, RESCALE_O, WEIGH_O, ACCUMULATE, NORMALISE = range(8)
ROUND_S, ROUND_E, ROUND_P, ROUND_V = range(8, 12)
# Those of the backward pass alone.
SHIFT_DP, WEIGH_DIFFERENCE, ADD_DQ, ADD_DK, ADD_DV, ROUND_DP, ROUND_DS, ROUND_DQ, ROUND_DK, ROUND_DV, OPERATIONS = range(12, 23)
# Settings: FP64 numbers and truth values.
FACTOR, LIMIT, EACH, KEEPS, COUNT, SATURATES, SETTINGS = range(7)
# Planes of one number per row, and events; then those of the backward pass.
M, L, ALPHA, SUM, KEPT, SEEN, LARGEST, TIES, PLANES = range(9)
RESCALED, ONES, STAGNATED, SATURATED, NONZERO, VISIBLE, EVENTS = range(7)
LSE, DELTA = range(2)
ABOVE_ONE, NONZERO_P, NONZERO_DS, VISIBLE_BACKWARD, BACKWARD_EVENTS = range(5)
# Where a tile of the backward pass begins: its head, its row, its key.
HEAD, ROW, KEY = range(3)

compiled = njit(nogil=True, error_model="numpy")


def entry(function: Callable[..., Any]) -> Any:
    """A pass that Python calls, kept on disk where numba finds a folder for it."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        return compiled(function)


class Announce(event.Listener):  # type: ignore[misc]
    """Say once, before it happens, that a pass is compiled: the first point seems to hang otherwise."""

    def __init__(self) -> None:
        self.done = not multiprocessing.current_process().name.endswith(("MainProcess", "-1"))  # of several workers the first

    def on_start(self, event: event.Event) -> None:
        if not self.done and event.data["dispatcher"].py_func.__module__ == __name__:
            self.done = True
            again = "later commands find it compiled where NUMBA_CACHE_DIR, or the cache folder of the user, can be written"
            LOG.warning("compiling the arithmetic of tiles for this processor, which takes about half a minute; %s", again)

    def on_end(self, event: event.Event) -> None:
        """Nothing: the figures follow."""


event.register("numba:compile", Announce())

I32, F32 = np.int32, np.float32
SIGN, MAGNITUDE, INFINITY, LARGEST_BITS = I32(-2147483648), I32(0x7FFFFFFF), I32(0x7F800000), I32(0x7F7FFFFF)
NEVER = F32(-np.inf)
CHUNK = 2048  # numbers worked on at once: they stay in the L1 cache


@compiled
def end(rounded, bits, op):
    """The bits of a result from its rounded magnitude and the bits of what was rounded to nearest."""
    magnitude = I32(bits & MAGNITUDE)
    rounded = op[ABOVE] if rounded > op[TOP] else rounded
    rounded = magnitude if magnitude > INFINITY else rounded
    return I32(rounded | I32(bits & SIGN)).view(F32)


@compiled
def on_bits(x, op):
    """`cast(x)` to nearest even in a format with the exponents of FP32: half a unit is added, less one bit, and the rest cut."""
    unit = I32(1 << op[SHIFT])
    half, kept = I32((unit >> 1) - 1), I32(-unit)
    for i in range(x.size):
        bits = F32(x[i]).view(I32)
        magnitude = I32(bits & MAGNITUDE)
        carry = I32(half + (I32(1) if magnitude & unit != 0 else I32(0)))
        x[i] = end(I32(I32(magnitude + carry) & kept), bits, op)


@compiled
def by_adder(x, op):
    """`cast(x)` for fewer exponents, by adding and subtracting `1.5 * 2^(E + 23 - m)` (`numdev.arithmetic.bits.round_magic`)."""
    low, high, magic = op[LOW], op[HIGH], I32((op[SHIFT] << 23) | 0x400000)
    for i in range(x.size):
        bits = F32(x[i]).view(I32)
        magnitude = I32(bits & MAGNITUDE)
        constant = I32(min(max(I32(magnitude & INFINITY), low), high) + magic).view(F32)
        x[i] = end(F32(F32(magnitude.view(F32) + constant) - constant).view(I32), bits, op)


@compiled
def cast(x, op):
    """The cast of a flat array, in place."""
    if op[KIND] == ON_BITS:
        on_bits(x, op)
    elif op[KIND] == BY_ADDER:
        by_adder(x, op)


@compiled
def settled(s, e, finite):
    """`s`, or where it is even its neighbour on the side of the rest `e` that it lacks: rounding to odd.

    Of finite operands it is the largest number where `s` is infinite.
    """
    bits = F32(s).view(I32)
    magnitude, sign = I32(bits & MAGNITUDE), I32(bits & SIGN)
    moved = I32(bits + (I32(1) if (s > 0) == (e > 0) else I32(-1)))
    moved = (I32(1) if e > 0 else I32(SIGN | I32(1))) if magnitude == 0 else moved
    moves = (e != 0) & (abs(e) < np.inf) & (magnitude < INFINITY) & (I32(bits & I32(1)) == 0)
    result = moved if moves else bits
    result = I32(LARGEST_BITS | sign) if finite & (magnitude == INFINITY) else result
    return I32(result).view(F32)


@compiled
def careful_product(x, y):
    """`x y`, settled: of two FP32 numbers it is exact in FP64."""
    wide = np.float64(x) * np.float64(y)
    s = F32(wide)
    return settled(s, wide - np.float64(s), np.isfinite(x) & np.isfinite(y))


@compiled
def times(x, y, op):
    """`x <- cast(x y)`, rows with one `y` each."""
    for r in range(x.shape[0]):
        row, factor = x[r], y[r]
        if op[CAREFUL]:
            for i in range(row.size):
                row[i] = careful_product(row[i], factor)
        else:
            for i in range(row.size):
                row[i] *= factor
    cast(x.reshape(-1), op)


@compiled
def weigh(x, y, op):
    """`x <- cast(x y)`, number by number."""
    if op[CAREFUL]:
        for i in range(x.size):
            x[i] = careful_product(x[i], y[i])
    else:
        for i in range(x.size):
            x[i] *= y[i]
    cast(x, op)


@compiled
def over(x, y, op):
    """`x <- cast(x / y)`, rows with one `y` each."""
    for r in range(x.shape[0]):
        row, divisor = x[r], y[r]
        if op[CAREFUL]:
            for i in range(row.size):
                wide = np.float64(row[i]) / np.float64(divisor)
                s = F32(wide)
                row[i] = settled(s, wide - np.float64(s), np.isfinite(row[i]) & np.isfinite(divisor) & (divisor != 0))
        else:
            for i in range(row.size):
                row[i] /= divisor
    cast(x.reshape(-1), op)


@compiled
def careful_sum(x, y):
    """`x + y`, settled (TwoSum)."""
    s = F32(x + y)
    part = F32(s - x)
    rest = F32(F32(x - F32(s - part)) + F32(y - part))
    return settled(s, np.float64(rest), np.isfinite(x) & np.isfinite(y))


@compiled
def minus(x, y, op):
    """`x <- cast(x - y)`, rows with one `y` each."""
    for r in range(x.shape[0]):
        row, term = x[r], F32(-y[r])
        if op[CAREFUL]:
            for i in range(row.size):
                row[i] = careful_sum(row[i], term)
        else:
            for i in range(row.size):
                row[i] += term
    cast(x.reshape(-1), op)


@compiled
def plus(x, y, op):
    """`x <- cast(x + y)`, number by number."""
    if op[CAREFUL]:
        for i in range(x.size):
            x[i] = careful_sum(x[i], y[i])
    else:
        for i in range(x.size):
            x[i] += y[i]
    cast(x, op)


@compiled
def largest_of(x, largest):
    """The largest number of each row; NaN where there is one."""
    for r in range(x.shape[0]):
        row, best = x[r], SIGN
        for i in range(row.size):
            bits = F32(row[i]).view(I32)
            ordered = I32(bits ^ I32((bits >> 31) & MAGNITUDE))
            best = max(best, MAGNITUDE if I32(bits & MAGNITUDE) > INFINITY else ordered)
        largest[r] = I32(best ^ I32((best >> 31) & MAGNITUDE)).view(F32)


@compiled
def put(x, y):
    """`x <- y`, as far as both go. Assigned slices would have numba compile how it words their errors, which takes seconds."""
    for i in range(min(x.size, y.size)):
        x[i] = y[i]


@compiled
def count(x, number):
    """How many are equal to a number."""
    equal = I32(0)
    for i in range(x.size):
        equal = I32(equal + (I32(1) if x[i] == number else I32(0)))
    return equal


@compiled
def count_above(x, limit):
    number = I32(0)
    for i in range(x.size):
        number = I32(number + (I32(1) if x[i] > limit else I32(0)))
    return number


@compiled
def note_ties(row, largest, planes, g, i):
    """How often the largest score so far occurs; the count starts over when it rises (`Counters.scores`)."""
    before = planes[LARGEST, g, i]
    if np.isnan(before) or np.isnan(largest):
        planes[LARGEST, g, i] = np.nan
        return
    if largest > before:
        planes[LARGEST, g, i], planes[TIES, g, i] = largest, 0
    if largest >= before and largest != NEVER:
        planes[TIES, g, i] += count(row, largest)


@compiled
def mask_rows(x, ranges, tile, hidden, seen):
    """The number `hidden` for what a row does not see, and how many keys it `seen`; `ranges` are those of these rows."""
    columns = x.shape[1]
    for r in range(x.shape[0]):
        low, high = max(ranges[0, r] - tile, 0), min(ranges[1, r] - tile, columns)
        seen[r] = max(high - low, 0)
        if low > 0:
            x[r, : min(low, columns)] = hidden
        if high < columns:
            x[r, max(high, 0) :] = hidden


@compiled
def move_maxima(x, largest, planes, g, i, settings):
    """The new maxima, and in `largest` what each row's exponentials are taken from, 0 for no number."""
    for r in range(x.shape[0]):
        top, old = largest[r], planes[M, g, i + r]
        m = old if old > top or np.isnan(old) else top
        if settings[COUNT] and not m < planes[LARGEST, g, i + r] and not (m > top and m == planes[LARGEST, g, i + r]):
            note_ties(x[r], m, planes, g, i + r)
        planes[ALPHA, g, i + r], planes[M, g, i + r] = old, m
        largest[r] = F32(0) if m == NEVER else m


@entry
def begin(s, planes, ranges, place, ops, settings):
    """`S <- cast(S - m)` after scaling, masking and the new maximum; in the plane of alpha the maximum before."""
    matrices, height, columns = s.shape
    here, tile = place[0], place[1]
    step = max(1, CHUNK // columns)
    largest, factor = np.empty(step, np.float32), np.full(1, settings[FACTOR], np.float32)
    before = np.empty(0 if settings[KEEPS] else step * columns, np.float32)
    for g in range(matrices):
        for start in range(0, height, step):
            rows = s[g, start : min(start + step, height)]
            flat, first, last = rows.reshape(-1), here + start, here + start + rows.shape[0]
            cast(flat, ops[ROUND_S])
            if settings[FACTOR] != 1.0:
                times(rows.reshape(1, -1), factor, ops[SCALE_S])
            mask_rows(rows, ranges[:, g, first:last], tile, NEVER, planes[SEEN, g, first:last])
            largest_of(rows, largest)
            move_maxima(rows, largest, planes, g, first, settings)
            put(before, flat)
            minus(rows, largest, ops[SHIFT_S])
            for i in range(before[: flat.size].size):
                flat[i] = NEVER if before[i] == NEVER else flat[i]


@entry
def round_exponentials(p, events, ops, settings):
    """`P`, from exponentials that are not rounded yet."""
    flat = p.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        cast(part, ops[ROUND_E])
        if settings[COUNT]:
            events[ONES] += count(part, F32(1))
            if settings[SATURATES]:
                events[SATURATED] += count_above(part, F32(settings[LIMIT]))


@entry
def finish(p, planes, events, place, ops, settings):
    """`P~`, and from the sums of the rows of the tile in their plane the running ones."""
    matrices, height, columns = p.shape
    here, end = place[0], place[0] + height
    step = max(1, CHUNK // columns)
    for g in range(matrices):
        for start in range(0, height, step):
            flat = p[g, start : min(start + step, height)].reshape(-1)
            cast(flat, ops[ROUND_P])
            if settings[COUNT]:
                events[NONZERO] += flat.size - count(flat, F32(0))
        total, alpha = planes[SUM, g, here:end], planes[ALPHA, g, here:end]
        kept, seen, summed = planes[KEPT, g, here:end], planes[SEEN, g, here:end], planes[L, g, here:end]
        put(kept, summed)
        times(kept.reshape(-1, 1), alpha, ops[WEIGH_SUM])
        added = total.copy()
        plus(total, kept, ops[ADD_SUMS])
        for r in range(height):
            events[RESCALED] += 1 if alpha[r] != 1 and summed[r] > 0 else 0
            events[STAGNATED] += 1 if total[r] == kept[r] and added[r] > 0 and kept[r] > 0 else 0
            events[VISIBLE] += int(seen[r])
            summed[r] = total[r] if seen[r] > 0 else summed[r]


@compiled
def add_rows(o, new, planes, g, i, ops, settings):
    """`add` of the rows from `i` on, all of which see a key."""
    end = i + new.shape[0]
    alpha, total = planes[ALPHA, g, i:end], planes[SUM, g, i:end]
    cast(new.reshape(-1), ops[ROUND_V])
    if settings[EACH]:
        times(o, planes[KEPT, g, i:end], ops[WEIGH_O])
    elif count(alpha, F32(1)) < alpha.size:
        times(o, alpha, ops[RESCALE_O])
    plus(o.reshape(-1), new.reshape(-1), ops[ACCUMULATE])
    if settings[EACH]:
        divisors = total.copy()
        for r in range(divisors.size):
            divisors[r] = F32(1) if total[r] == 0 else total[r]
        over(o, divisors, ops[NORMALISE])


@entry
def add(o, product, planes, place, ops, settings):
    """`O <- alpha O + P V`, or `O <- (alpha l O + P V) / l'`, of the rows that see a key of the tile."""
    matrices, height, columns = product.shape
    here, step = place[0], max(1, CHUNK // columns)
    for g in range(matrices):
        seen, start = planes[SEEN, g, here : here + height], 0
        while start < height:
            stop = start
            while stop < min(start + step, height) and seen[stop] > 0:
                stop += 1
            if stop > start:
                add_rows(o[g, here + start : here + stop], product[g, start:stop], planes, g, here + start, ops, settings)
            start = max(stop, start + 1)


@compiled
def scores(rows, lse, ranges, tile, ops, settings):
    """`S` of some rows, scaled; minus infinity where a row does not see a key, or any, and in `lse` 0 for no number."""
    cast(rows.reshape(-1), ops[ROUND_S])
    if settings[FACTOR] != 1.0:
        times(rows.reshape(1, -1), np.full(1, settings[FACTOR], np.float32), ops[SCALE_S])
    mask_rows(rows, ranges, tile, NEVER, np.empty(rows.shape[0], np.int64))
    for r in range(rows.shape[0]):
        if lse[r] == NEVER:
            rows[r] = NEVER
            lse[r] = F32(0)


@entry
def recompute(s, planes, ranges, place, ops, settings):
    """`S <- cast(S - LSE)` after scaling and masking."""
    heads, height, columns = s.shape
    step = max(1, CHUNK // columns)
    before = np.empty(0 if settings[KEEPS] else step * columns, np.float32)
    for g in range(heads):
        for start in range(0, height, step):
            rows = s[g, start : min(start + step, height)]
            flat, first = rows.reshape(-1), place[ROW] + start
            last = first + rows.shape[0]
            lse = planes[LSE, place[HEAD] + g, first:last].copy()
            scores(rows, lse, ranges[:, first:last], place[KEY], ops, settings)
            put(before, flat)
            minus(rows, lse, ops[SHIFT_S])
            for i in range(before[: flat.size].size):
                flat[i] = NEVER if before[i] == NEVER else flat[i]


@entry
def differ(p, dp, planes, ranges, events, place, ops, settings):
    """`P` as it enters `P^T dO`, and `dP <- dS = P (dP - delta)` as it enters its products, from exponentials not rounded yet."""
    heads, height, columns = p.shape
    step = max(1, CHUNK // columns)
    seen = np.empty(step, np.int64)
    for g in range(heads):
        for start in range(0, height, step):
            stop = min(start + step, height)
            rows, ds = p[g, start:stop], dp[g, start:stop]
            flat, flat_ds = rows.reshape(-1), ds.reshape(-1)
            first, last = place[ROW] + start, place[ROW] + stop
            cast(flat, ops[ROUND_E])
            mask_rows(rows, ranges[:, first:last], place[KEY], F32(0), seen)
            cast(flat_ds, ops[ROUND_DP])
            minus(ds, planes[DELTA, place[HEAD] + g, first:last], ops[SHIFT_DP])
            weigh(flat_ds, flat, ops[WEIGH_DIFFERENCE])
            cast(flat_ds, ops[ROUND_DS])
            mask_rows(ds, ranges[:, first:last], place[KEY], F32(0), seen)
            if settings[COUNT]:
                events[ABOVE_ONE] += count_above(flat, F32(1))
            cast(flat, ops[ROUND_P])
            if settings[COUNT]:
                events[NONZERO_P] += flat.size - count(flat, F32(0))
                events[NONZERO_DS] += flat.size - count(flat_ds, F32(0))
                events[VISIBLE_BACKWARD] += seen[: stop - start].sum()


@entry
def add_dq(total, new, place, ops):
    """`dQ <- dQ + dS K` of the rows of a tile."""
    heads, height, dim = new.shape
    step = max(1, CHUNK // dim)
    for g in range(heads):
        own = total[place[HEAD] + g, place[ROW] : place[ROW] + height]
        for start in range(0, height, step):
            share = new[g, start : min(start + step, height)].reshape(-1)
            cast(share, ops[ROUND_DQ])
            plus(own[start : start + step].reshape(-1), share, ops[ADD_DQ])


@entry
def add_in_turn(total, shares, turns, rounded, added):
    """`dK <- dK + dS^T Q`, or `dV <- dV + P^T dO`, of a tile of keys, over heads and tiles of queries in the order of `turns`."""
    step = max(1, CHUNK // total.shape[1])
    for start in range(0, total.shape[0], step):
        rows = total[start : start + step].reshape(-1)
        for turn in turns:
            share = shares[turn, start : start + step].reshape(-1)
            cast(share, rounded)
            plus(rows, share, added)
