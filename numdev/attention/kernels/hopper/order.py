"""In which order the one-kernel backward visits the queries, and in which order it sums dQ; both follow from the shape alone.

A program owns a *tile* of 128 keys and visits *units* of 128 queries, from the last to the first in which a query sees a key of
the tile; at each it visits every query head that shares the keys before it goes on. To each unit of each head it adds its share
of dQ after the shares of the tiles before its own, so that every sum has one order.

There is no deadlock, whatever else runs on the device. Programs start in the order of their number, those of one KV head in the
order of their tiles (`place`), and all make their additions in the order of (unit, head). So each waits only for programs that
started before it, and of all that run the one that started first waits for none.

Why heads are visited inside units: head after head, programs with short walks under a causal limit would wait at each next head
for those with long ones.

The functions below take numbers when Python calls them and tensors in the kernel, which compiles the same lines.
"""

from __future__ import annotations

TILE = 128  # keys of a tile, and queries of a unit


def place(number, tiles, together):  # type: ignore[no-untyped-def]
    """Tile and head of a program by its number: `together` heads start together, the longest walk of each first."""
    part = number // (tiles * together)
    rest = number - part * tiles * together
    return rest // together, part * together + rest % together


def unit_at(step, units):  # type: ignore[no-untyped-def]
    """The unit of queries that every tile of keys visits at a step of its walk."""
    return units - 1 - step


def first_unit(tile, shift, causal):  # type: ignore[no-untyped-def]
    """The first unit in which a query sees a key of the tile; query i sees keys up to `i + shift`, with a shift of at least 0."""
    first = tile * 0
    if causal:
        first = max(tile * 128 - shift, 0) // 128
    return first


def first_whole(tile, shift, units, causal):  # type: ignore[no-untyped-def]
    """The first unit in which every query sees every key of the tile."""
    whole = tile * 0
    if causal:
        whole = min((max(tile * 128 + 127 - shift, 0) + 127) // 128, units)
    return whole
