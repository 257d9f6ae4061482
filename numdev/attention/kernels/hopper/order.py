"""In which order the one-kernel backward visits the queries, and in which order it sums dQ; both follow from the shape alone.

A program owns a *tile* of 128 keys and visits *units* of 128 queries. At each unit it adds its share of dQ after the shares of
lower *rank* are in memory, so that every sum has one order. Two rules keep waiting short:

- **causal**: every program walks from the last unit back to its diagonal, and the rank is the number of the tile. The programs
  with the longest walks start first, and each waits only for one that started before it.
- **otherwise**: tiles form groups of at most `RESIDENT` tiles, and of no more tiles than there are units. Tile l of its group
  starts at unit l and wraps round, so that no two tiles of a group are at the same unit; the rank is the order of arrival, group
  after group. A program may wait for later programs of its group, so all of these must be running: each needs a multiprocessor.

There is no deadlock. Order all additions of a head by (group, step, tile): the ranks add up each unit in this order, and each
program makes its additions in this order, so the first addition that is still missing can always be made. Programs start in the
order of their number, and a group needs no more programs than the device holds; so it runs once all groups before it have ended.

The functions below take numbers when Python calls them and tensors in the kernel, which compiles the same lines.
"""

from __future__ import annotations

TILE = 128  # keys of a tile, and queries of a unit
RESIDENT = 128  # programs that may wait for each other: the largest power of two below the multiprocessors of an H100 or H200


def group_of(units: int) -> int:
    """How many tiles of keys form a group with shifted walks; as many programs must be running at the same time."""
    return max(1, min(units, RESIDENT))


def place(number, tiles, together):  # type: ignore[no-untyped-def]
    """Tile and head of a program by its number: `together` heads start together, the longest walk of each first."""
    part = number // (tiles * together)
    rest = number - part * tiles * together
    return rest // together, part * together + rest % together


def unit_at(step, tile, units, group, causal):  # type: ignore[no-untyped-def]
    """The unit of queries that a tile of keys visits at a step of its walk."""
    if causal:
        unit = units - 1 - step
    else:
        unit = (tile % group + step) % units
    return unit


def rank_at(unit, tile, tiles, group, causal):  # type: ignore[no-untyped-def]
    """How many additions to a unit come before that of a tile; `tiles` hold keys of this batch entry.

    Without a causal limit, tile l of its group reaches unit u at step `(u - l) mod units`: after tiles l + 1 to u, or if u < l,
    after tiles l + 1 to the last and 0 to u.
    """
    rank = tile
    if not causal:
        local = tile % group
        first = tile - local
        size = min(tiles - first, group)
        if unit >= local:
            rank = first + min(unit, size - 1) - local
        else:
            rank = first + size - 1 - local + min(unit + 1, size)
    return rank


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
