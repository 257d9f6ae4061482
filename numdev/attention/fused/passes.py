"""The passes over one KV tile, compiled by numba: what `Rows` does to S, P and O by tensor operations.

Between `begin` and `finish` torch computes exponentials that have no table; before `begin` and `add` it multiplies.
Shapes: S and P `[matrices, rows, columns]`, O and P V `[matrices, rows, values]`, planes `[what, matrices, rows]`.
"""

from __future__ import annotations

import numpy as np

from numdev.attention.fused import layout as at
from numdev.attention.fused.rounding import F32, I32, NEVER, cast, compiled, largest_of, look_up, minus, over, plus, sum_of, times

CHUNK = 2048  # numbers worked on at once: they stay in the L1 cache


@compiled
def put(x, y):
    """`x <- y`, as far as both go. Assigned slices would have numba compile how it words their errors, which takes seconds."""
    for i in range(min(x.size, y.size)):
        x[i] = y[i]


@compiled
def count(x, number):
    """How many are equal to a number."""
    found = I32(0)
    for i in range(x.size):
        found = I32(found + (I32(1) if x[i] == number else I32(0)))
    return found


@compiled
def count_above(x, scale, limit):
    found = I32(0)
    for i in range(x.size):
        found = I32(found + (I32(1) if x[i] * scale > limit else I32(0)))
    return found


@compiled
def shifted(largest, row, ops, settings):
    """The maximum of a row, and what it becomes where it is tied (`OnlineSoftmax.largest`)."""
    if not (np.isfinite(largest) and count(row, largest) > 1):
        return largest
    if largest <= 0:
        return F32(0)
    single = np.full(1, largest, np.float32)
    times(single.reshape(1, 1), np.full(1, settings[at.TIE_SHIFT], np.float32), ops[at.SHIFT_TIES])
    return single[0]


@compiled
def note_ties(row, largest, planes, g, i):
    """How often the largest score so far occurs; the count starts over when it rises (`Counters.scores`)."""
    before = planes[at.LARGEST, g, i]
    if np.isnan(before) or np.isnan(largest):
        planes[at.LARGEST, g, i] = np.nan
        return
    if largest > before:
        planes[at.LARGEST, g, i], planes[at.TIES, g, i] = largest, 0
    if largest >= before and largest != NEVER:
        planes[at.TIES, g, i] += count(row, largest)


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
def move_maxima(x, largest, planes, g, i, ops, settings):
    """The new maxima, and in `largest` what each row's exponentials are taken from, 0 for no number."""
    for r in range(x.shape[0]):
        raw, old = largest[r], planes[at.M, g, i + r]
        top = shifted(raw, x[r], ops, settings) if settings[at.TIE_SHIFT] > 0 else raw
        if settings[at.THRESHOLD] > 0:
            m = top if top - old > F32(settings[at.THRESHOLD]) else old
        else:
            m = old if old > top or np.isnan(old) else top
        if settings[at.COUNT]:
            seen = raw if settings[at.LAGS] else m
            if not seen < planes[at.LARGEST, g, i + r] and not (seen > raw and seen == planes[at.LARGEST, g, i + r]):
                note_ties(x[r], seen, planes, g, i + r)
        planes[at.OLD, g, i + r], planes[at.M, g, i + r], planes[at.RISES, g, i + r] = old, m, top
        base = top if settings[at.LOCAL] else m
        largest[r] = F32(0) if base == NEVER else base


@compiled
def fall(x, m, op):
    """`x <- cast(x - m)`, minus infinity where x is no number."""
    old = x.copy()
    for i in range(x.size):
        x[i] = F32(0) if old[i] == NEVER else old[i]
    base = m.copy()
    for i in range(x.size):
        base[i] = F32(0) if old[i] == NEVER else m[i]
    minus(x.reshape(-1, 1), base, op)
    for i in range(x.size):
        x[i] = NEVER if old[i] == NEVER else x[i]


@compiled
def begin(s, planes, ranges, place, ops, settings, table):
    """`S <- cast(S - m)` after scaling, masking and the new maximum, and its exponential where there is a table of it."""
    matrices, height, columns = s.shape
    here, tile = place[0], place[1]
    step = max(1, CHUNK // columns)
    largest, factor = np.empty(step, np.float32), np.full(1, settings[at.FACTOR], np.float32)
    before = np.empty(0 if settings[at.KEEPS] else step * columns, np.float32)
    for g in range(matrices):
        for start in range(0, height, step):
            rows = s[g, start : min(start + step, height)]
            flat, first, last = rows.reshape(-1), here + start, here + start + rows.shape[0]
            cast(flat, ops[at.ROUND_S])
            if settings[at.FACTOR] != 1.0:
                times(rows.reshape(1, -1), factor, ops[at.SCALE_S])
            mask_rows(rows, ranges[:, g, first:last], tile, NEVER, planes[at.SEEN, g, first:last])
            largest_of(rows, largest)
            move_maxima(rows, largest, planes, g, first, ops, settings)
            put(before, flat)
            minus(rows, largest, ops[at.SHIFT_S])
            for i in range(before[: flat.size].size):
                flat[i] = NEVER if before[i] == NEVER else flat[i]
            if table.size:
                look_up(flat, table, int(settings[at.E_SHIFT]), int(settings[at.E_BASE]))
        end = here + height
        put(planes[at.FALLS, g, here:end], planes[at.OLD, g, here:end])
        fall(planes[at.FALLS, g, here:end], planes[at.M, g, here:end], ops[at.FALL])
        if settings[at.LOCAL]:
            fall(planes[at.RISES, g, here:end], planes[at.M, g, here:end], ops[at.FALL])


@compiled
def sum_rows(p, sums):
    """The sum of each row in the order of torch's."""
    lanes = np.empty(32, np.float32)
    for r in range(p.shape[0]):
        sums[r] = sum_of(p[r], lanes)


@compiled
def row_sums(p, sums, events, ops, settings, lanes):
    """`sum P` of every row, rounded after every so many numbers (`numdev.arithmetic.dot.Dot.sum`)."""
    every = int(settings[at.EVERY]) if settings[at.EVERY] > 0 else p.shape[1]
    for r in range(p.shape[0]):
        sums[r] = sum_of(p[r, :every], lanes)
    cast(sums, ops[at.ROUND_L])
    for start in range(every, p.shape[1], every):
        old = sums.copy()
        for r in range(p.shape[0]):
            sums[r] = sum_of(p[r, start : start + every], lanes)
        added = sums.copy()
        plus(sums, old, ops[at.ADD_PIECE])
        for r in range(p.shape[0]):
            events[at.STAGNATED] += 1 if sums[r] == old[r] and added[r] > 0 and old[r] > 0 else 0


@compiled
def finish_rows(p, sums, events, ops, settings, lanes):
    """Some rows of P: their `sums`, their cast, and what is counted of them."""
    flat = p.reshape(-1)
    cast(flat, ops[at.ROUND_E])
    if settings[at.COUNT]:
        events[at.ONES] += count(flat, F32(1))
        if settings[at.SATURATES]:
            events[at.SATURATED] += count_above(flat, F32(settings[at.P_SCALE]), F32(settings[at.LIMIT]))
    if not settings[at.SUM_ROUNDED]:
        row_sums(p, sums, events, ops, settings, lanes)
    if settings[at.P_SCALE] == 1.0:
        cast(flat, ops[at.SCALE_P])
    else:
        times(p.reshape(1, -1), np.full(1, settings[at.P_SCALE], np.float32), ops[at.SCALE_P])
    if settings[at.SUM_ROUNDED]:
        row_sums(p, sums, events, ops, settings, lanes)
    if settings[at.COUNT]:
        events[at.NONZERO] += flat.size - count(flat, F32(0))


@compiled
def decay(x, ops, settings, table):
    """alpha or beta of every row, from the exponential's argument, or from the exponential where there is no table of it."""
    if table.size:
        look_up(x, table, int(settings[at.A_SHIFT]), int(settings[at.A_BASE]))
    else:
        cast(x, ops[at.ROUND_A])


@compiled
def finish(p, planes, events, place, ops, settings, table):
    """`P~` and the row sums, from exponentials that are not rounded yet."""
    matrices, height, columns = p.shape
    here, end = place[0], place[0] + height
    lanes = np.empty(32, np.float32)
    step = max(1, CHUNK // columns)
    for g in range(matrices):
        total, alpha, beta = planes[at.SUM, g, here:end], planes[at.FALLS, g, here:end], planes[at.RISES, g, here:end]
        kept, seen, summed = planes[at.KEPT, g, here:end], planes[at.SEEN, g, here:end], planes[at.L, g, here:end]
        for start in range(0, height, step):
            stop = min(start + step, height)
            finish_rows(p[g, start:stop], total[start:stop], events, ops, settings, lanes)
        decay(alpha, ops, settings, table)
        if settings[at.SUM_ROUNDED] and settings[at.P_SCALE] != 1.0:
            over(total.reshape(1, -1), np.full(1, settings[at.P_SCALE], np.float32), ops[at.UNSCALE_SUM])
        if settings[at.LOCAL]:
            decay(beta, ops, settings, table)
            times(total.reshape(-1, 1), beta, ops[at.WEIGH_SUM])
        put(kept, summed)
        times(kept.reshape(-1, 1), alpha, ops[at.WEIGH_SUM])
        added = total.copy()
        plus(total, kept, ops[at.ADD_SUMS])
        for r in range(height):
            events[at.RESCALED] += 1 if alpha[r] != 1 and summed[r] > 0 else 0
            events[at.STAGNATED] += 1 if total[r] == kept[r] and added[r] > 0 and kept[r] > 0 else 0
            events[at.VISIBLE] += int(seen[r])
            summed[r] = total[r] if seen[r] > 0 else summed[r]


@compiled
def add_rows(o, new, planes, g, i, ops, settings):
    """`add` of the rows from `i` on, all of which see a key."""
    end = i + new.shape[0]
    alpha, total = planes[at.FALLS, g, i:end], planes[at.SUM, g, i:end]
    cast(new.reshape(-1), ops[at.ROUND_V])
    if settings[at.P_SCALE] != 1.0:
        over(new.reshape(1, -1), np.full(1, settings[at.P_SCALE], np.float32), ops[at.UNSCALE_V])
    if settings[at.LOCAL]:
        times(new, planes[at.RISES, g, i:end], ops[at.WEIGH_V])
    if settings[at.EACH]:
        times(o, planes[at.KEPT, g, i:end], ops[at.WEIGH_O])
    elif count(alpha, F32(1)) < alpha.size:
        times(o, alpha, ops[at.RESCALE_O])
    plus(o.reshape(-1), new.reshape(-1), ops[at.ACCUMULATE_WEIGHED if settings[at.LOCAL] else at.ACCUMULATE])
    if settings[at.EACH]:
        divisors = total.copy()
        for r in range(divisors.size):
            divisors[r] = F32(1) if total[r] == 0 else total[r]
        over(o, divisors, ops[at.NORMALISE])


@compiled
def add(o, product, planes, place, ops, settings):
    """`O <- alpha O + P V`, or `O <- (alpha l O + P V) / l'`, of the rows that see a key of the tile."""
    matrices, height, columns = product.shape
    here, step = place[0], max(1, CHUNK // columns)
    for g in range(matrices):
        seen, start = planes[at.SEEN, g, here : here + height], 0
        while start < height:
            stop = start
            while stop < min(start + step, height) and seen[stop] > 0:
                stop += 1
            if stop > start:
                add_rows(o[g, here + start : here + stop], product[g, start:stop], planes, g, here + start, ops, settings)
            start = max(stop, start + 1)
