"""The order in which a backward pass combines tiles of queries and keys, and so the order of every sum of the gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput

Range = tuple[int, int]


@dataclass(frozen=True)
class Meeting:
    """A tile of keys, and the tiles of queries that it is combined with before the next meeting begins."""

    heads: Range  # those of the group that shares the KV head, one after the other
    keys: Range  # the tile of keys, whose share is added to dQ of the queries
    # The tiles of queries, whose shares are added to dK and dV of the keys in this order; together they are one range
    queries: tuple[Range, ...]


@dataclass(frozen=True)
class Sizes:
    """Query heads per KV head, the first query that sees a key at all, queries, and keys."""

    group: int
    first: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Turns:
    """The walks of kernels in which each tile of keys visits units of queries from the last to the first.

    At each unit it visits every head that shares its keys, and within a head the tiles of queries forward; units begin with the
    first query that sees a key. Shares of dQ are added in the order of the keys.
    `numdev.attention.kernels.hopper.order` defines the same walk for the kernels.
    """

    unit: int  # queries that a walk visits in a step

    def check(self, tiling: Tiling) -> None:
        """Raise BadInput unless a unit is a multiple of Br, and the order of keys is the default."""
        if self.unit % tiling.br:
            raise BadInput("tiling.br", tiling.br, f"it must divide {self.unit}")
        if tiling.order is not Order.FORWARD:
            raise BadInput("tiling.order", tiling.order.value, "dQ is added in the order of the keys; leave it at forward")

    def meetings(self, tiling: Tiling, sizes: Sizes) -> list[Meeting]:
        """All meetings, in an order that gives the sums over queries and those over keys their order."""
        keys, heads = tiling.key_tiles(sizes.keys)[0], range(sizes.group)
        starts = range(sizes.first, sizes.queries, self.unit)
        units = [_cut(start, min(start + self.unit, sizes.queries), tiling.br) for start in reversed(starts)]
        return [Meeting((head, head + 1), tile, unit) for unit in units for head in heads for tile in keys]


def in_order(tiling: Tiling, query_order: Order, sizes: Sizes) -> list[Meeting]:
    """Each tile of keys, in the tiling's order, meets all tiles of queries in `query_order`."""
    queries = tuple(replace(tiling.swapped(), order=query_order).key_tiles(sizes.queries)[0])
    return [Meeting((0, sizes.group), tile, queries) for tile in tiling.key_tiles(sizes.keys)[0]]


def _cut(start: int, stop: int, size: int) -> tuple[Range, ...]:
    return tuple((at, min(at + size, stop)) for at in range(start, stop, size))
