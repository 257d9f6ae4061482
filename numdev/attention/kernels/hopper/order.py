"""Which blocks of keys the forward kernel visits, and which queries the one-kernel backward, in which order it sums dQ.

All follow from the shape alone. Under a limit, query i sees keys up to `i + shift`, and in a window the last `span` of them.

A walk belongs to a *tile* of 128 keys and visits *units* of 128 queries, from the last to the first in which a query sees a key
of the tile; at each it visits every query head that shares the keys before it goes on. To each unit of each head it adds its
share of dQ after the shares of the tiles before its own, so that every sum has one order.

There is no deadlock, whatever else runs on the device. A program that runs takes a tile, the next of all in the order of their
numbers, those of one KV head in the order of their tiles (`place`); it takes another when it has loaded all of the last one, and
ends the walks in the order in which it took them. The two warps that make its additions each make theirs in the order of (unit,
head). So each waits only for tiles that were taken before, by programs that run, and of all tiles that are not done the first
one waits for none.

Why heads are visited inside units: head after head, tiles with short walks under a causal limit would wait at each next head
for those with long ones.

The functions below take numbers when Python calls them and tensors in the kernel, which compiles the same lines.
"""

from __future__ import annotations

TILE = 128  # keys of a tile, and queries of a unit


def place(number, tiles, together):  # type: ignore[no-untyped-def]
    """Tile and head by the number of a tile: `together` heads start together, the longest walk of each first."""
    part = number // (tiles * together)
    rest = number - part * tiles * together
    return rest // together, part * together + rest % together


def unit_at(step, end):  # type: ignore[no-untyped-def]
    """The unit of queries that a tile of keys visits at a step of its walk, which ends before unit `end`."""
    return end - 1 - step


def walk(tile, shift, span, units, limited, windowed):  # type: ignore[no-untyped-def]
    """Units in which a query sees a key of the tile, from the first to before `end`; and those in which every query sees all.

    The shift is at least 0.
    """
    first = tile * 0
    end = units
    whole = first
    whole_end = units
    if limited:
        first = max(tile * 128 - shift, 0) // 128
        whole = min((max(tile * 128 + 127 - shift, 0) + 127) // 128, units)
    if windowed:
        end = min(max(tile * 128 + 254 + span - shift, 0) // 128, units)
        whole_end = min(max(tile * 128 + span - shift, 0) // 128, units)
    return first, end, whole, whole_end


def first_tile(unit, shift, span, windowed):  # type: ignore[no-untyped-def]
    """The first tile of which a query of the unit sees a key."""
    first = unit * 0
    if windowed:
        first = max(unit * 128 + shift - span + 1, 0) // 128
    return first


def own(top, n, end, shift, span, bc, limited, windowed):  # type: ignore[no-untyped-def]
    """Of the `end` blocks of a tile: how many the 64 rows from `top` on do not see, and from which to which they see all.

    The rows of a tile span `64 groups` keys of the diagonal, so a group's last key is at most `64 (groups - 1)` before the
    tile's, and `skip <= (64 (groups - 1) + bc - 1) // bc`: 1, since the kernel asserts `64 (groups - 1) <= bc`. It passes over no
    tile whole.
    """
    skip = 0
    whole = 1
    if limited:
        last = top + shift
        skip = n - min(n, max((last + 63) // bc + 1, n - end + 1))
        whole = min(max(n - max(min((last + 1) // bc, n), 0), skip + 1), end)
    edge = end
    if windowed:
        edge = min(max(n - (max(top + 64 + shift - span, 0) + bc - 1) // bc, whole), end)
    return skip, whole, edge
