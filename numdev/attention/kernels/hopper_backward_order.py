"""In which order the one-kernel backward walks the queries, and in which order it adds up dQ; both follow from the shape alone.

A program owns a *tile* of 128 keys and walks *units* of 128 queries. At each unit it adds its share of dQ when those of lower
*rank* are in memory, so every sum has one order. Two rules keep the programs from waiting for each other:

- **causal**: every program walks from the last unit back to its diagonal, and the rank is the number of the tile. The programs
  with the longest walks start first, and each waits only for one that started before it.
- **otherwise**: tiles form groups of at most `RESIDENT`, and no more than there are units. Tile l of its group starts at unit l
  and wraps round, so that no two of a group are at the same unit; the rank is the order of arrival, group after group. Here a
  program waits also for later ones of its group, which all must be running: a device needs a multiprocessor for each.

No program waits in a circle. Order all additions of a head by (group, step, tile): the rank rule adds up each unit in this order,
each program makes its additions in this order, so the least one that is not yet made can be made. Programs start in the order of
their number and a group needs no more than the device holds; so when all groups before it have ended, it runs.

The functions of the kernel below take numbers here and tensors in the kernel: it compiles these very lines.
"""

from __future__ import annotations

TILE = 128  # keys of a tile, and queries of a unit
RESIDENT = 128  # programs that may wait for each other: the largest power of two below the multiprocessors of an H100 or H200


def group_of(units: int) -> int:
    """How many tiles of keys walk in a shifted order together; as many programs must be running at the same time."""
    return max(1, min(units, RESIDENT))


def place(number, tiles, together):  # type: ignore[no-untyped-def]
    """Tile and head of a program by its number: `together` heads start side by side, and of each the longest walk first."""
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
    """How many additions to a unit come before that of a tile, of `tiles` that hold keys of this batch entry.

    Without a causal limit, tile l of its group reaches unit u at step `(u - l) mod units`: after l + 1 to u, or where u is below
    l, after those from l + 1 on and those up to u.
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
    """The first unit of which any query sees a key of the tile; query i sees keys up to `i + shift`, a shift of 0 or more."""
    first = tile * 0
    if causal:
        first = max(tile * 128 - shift, 0) // 128
    return first


def first_whole(tile, shift, units, causal):  # type: ignore[no-untyped-def]
    """The first unit of which every query sees every key of the tile."""
    whole = tile * 0
    if causal:
        whole = min((max(tile * 128 + 127 - shift, 0) + 127) // 128, units)
    return whole
