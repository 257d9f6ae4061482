"""The passes of the backward pass over one tile, compiled by numba: what `numdev.attention.recurrence` does to S, P, dP,
dQ, dK and dV by tensor operations.

Between `recompute` and `differ` torch computes exponentials that have no table; before each pass it multiplies. Shapes: S, P and
dP `[heads, rows, columns]`, dQ and its shares `[heads, rows, dim]`, dK and dV `[columns, dim]`, planes `[what, heads, rows]`.
"""

from __future__ import annotations

import numpy as np

from numdev.attention.fused import backward_layout as at
from numdev.attention.fused.passes import CHUNK, count, count_above, mask_rows, put
from numdev.attention.fused.rounding import F32, NEVER, cast, compiled, look_up, minus, plus, times, weigh


@compiled
def scores(rows, lse, ranges, tile, ops, settings):
    """`S` of some rows, scaled; minus infinity where a row does not see a key, or any, and in `lse` 0 for no number."""
    cast(rows.reshape(-1), ops[at.ROUND_S])
    if settings[at.FACTOR] != 1.0:
        times(rows.reshape(1, -1), np.full(1, settings[at.FACTOR], np.float32), ops[at.SCALE_S])
    mask_rows(rows, ranges, tile, NEVER, np.empty(rows.shape[0], np.int64))
    for r in range(rows.shape[0]):
        if lse[r] == NEVER:
            rows[r] = NEVER
            lse[r] = F32(0)


@compiled
def recompute(s, planes, ranges, place, ops, settings, table):
    """`S <- cast(S - LSE)` after scaling and masking, and its exponential where there is a table of it."""
    heads, height, columns = s.shape
    step = max(1, CHUNK // columns)
    before = np.empty(0 if settings[at.KEEPS] else step * columns, np.float32)
    for g in range(heads):
        for start in range(0, height, step):
            rows = s[g, start : min(start + step, height)]
            flat, first = rows.reshape(-1), place[at.ROW] + start
            last = first + rows.shape[0]
            lse = planes[at.LSE, place[at.HEAD] + g, first:last].copy()
            scores(rows, lse, ranges[:, first:last], place[at.KEY], ops, settings)
            put(before, flat)
            minus(rows, lse, ops[at.SHIFT_S])
            for i in range(before[: flat.size].size):
                flat[i] = NEVER if before[i] == NEVER else flat[i]
            if table.size:
                look_up(flat, table, int(settings[at.E_SHIFT]), int(settings[at.E_BASE]))


@compiled
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
            first, last = place[at.ROW] + start, place[at.ROW] + stop
            cast(flat, ops[at.ROUND_E])
            mask_rows(rows, ranges[:, first:last], place[at.KEY], F32(0), seen)
            cast(flat_ds, ops[at.ROUND_DP])
            minus(ds, planes[at.DELTA, place[at.HEAD] + g, first:last], ops[at.SHIFT_DP])
            weigh(flat_ds, flat, ops[at.WEIGH_DIFFERENCE])
            cast(flat_ds, ops[at.ROUND_DS])
            mask_rows(ds, ranges[:, first:last], place[at.KEY], F32(0), seen)
            if settings[at.COUNT]:
                events[at.ABOVE_ONE] += count_above(flat, F32(1), F32(1))
            cast(flat, ops[at.ROUND_P])
            if settings[at.COUNT]:
                events[at.NONZERO_P] += flat.size - count(flat, F32(0))
                events[at.NONZERO_DS] += flat.size - count(flat_ds, F32(0))
                events[at.VISIBLE] += seen[: stop - start].sum()


@compiled
def add(total, new, place, ops):
    """`dQ <- dQ + dS K` of the rows of a tile."""
    heads, height, dim = new.shape
    step = max(1, CHUNK // dim)
    for g in range(heads):
        own = total[place[at.HEAD] + g, place[at.ROW] : place[at.ROW] + height]
        for start in range(0, height, step):
            share = new[g, start : min(start + step, height)].reshape(-1)
            cast(share, ops[at.ROUND_DQ])
            plus(own[start : start + step].reshape(-1), share, ops[at.ADD_DQ])


@compiled
def add_in_turn(total, shares, turns, rounded, added):
    """`dK <- dK + dS^T Q`, or `dV <- dV + P^T dO`, of a tile of keys, over heads and tiles of queries in the order of `turns`."""
    step = max(1, CHUNK // total.shape[1])
    for start in range(0, total.shape[0], step):
        rows = total[start : start + step].reshape(-1)
        for turn in turns:
            share = shares[turn, start : start + step].reshape(-1)
            cast(share, rounded)
            plus(rows, share, added)
