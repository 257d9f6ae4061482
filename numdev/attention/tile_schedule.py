"""The order in which a backward pass combines tiles of queries and keys, and so the order of every sum of the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from numdev.attention.kernels.hopper.order import unit_at
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
    """The walk of kernels in which each program owns a tile of keys and visits one unit of queries per step.

    Under a causal limit every program walks from the last unit to the first. Otherwise tile l of a group starts at unit l and
    wraps round, so that no two tiles of a group are at the same unit. Within a unit the tiles of queries are visited forward, and
    units begin with the first query that sees a key. Programs add their shares of dQ to one sum in the order of their arrival,
    group after group. `numdev.attention.kernels.hopper.order` defines the same walk for the kernels.
    """

    together: int | None  # tiles of a group; None if all walk from the last unit to the first
    tile: int = 128  # keys that a program owns
    unit: int = 128  # queries that it visits in a step

    def check(self, tiling: Tiling) -> None:
        """Raise BadInput unless tile and unit are multiples of the tiles, and the order of keys is the default."""
        for name, side, whole in (("br", tiling.br, self.unit), ("bc", tiling.bc, self.tile)):
            if whole % side:
                raise BadInput(f"tiling.{name}", side, f"it must divide {whole}")
        if tiling.order is not Order.FORWARD:
            raise BadInput("tiling.order", tiling.order.value, "dQ is added in the order of arrival; leave it at forward")

    def meetings(self, tiling: Tiling, sizes: Sizes) -> list[Meeting]:
        """All meetings, in an order that gives the sums over queries and those over keys their order."""
        tiles, units = tiling.key_tiles(sizes.keys)[0], self._units(tiling.br, sizes)
        # Group after group, and in each step by step: both sums are added in this order, see `hopper.order`.
        owners = math.ceil(sizes.keys / self.tile)
        size = owners if self.together is None else self.together
        meetings = []
        for head in range(sizes.group):
            for begin in range(0, owners, size):
                own = [tile for tile in tiles if begin <= tile[0] // self.tile < begin + size]
                for step in range(len(units)):
                    meetings += [Meeting((head, head + 1), t, units[self._unit(step, t, len(units))]) for t in own]
        return meetings

    def _unit(self, step: int, tile: Range, units: int) -> int:
        """The unit that the owner of a tile of keys visits at a step."""
        owner, is_back = tile[0] // self.tile, self.together is None
        unit: int = unit_at(step, owner, units, self.together, is_back)  # type: ignore[no-untyped-call]
        return unit

    def _units(self, br: int, sizes: Sizes) -> list[tuple[Range, ...]]:
        """The tiles of queries of each unit."""
        starts = range(sizes.first, sizes.queries, self.unit)
        return [_cut(start, min(start + self.unit, sizes.queries), br) for start in starts]


def in_order(tiling: Tiling, query_order: Order, sizes: Sizes) -> list[Meeting]:
    """Each tile of keys, in the tiling's order, meets all tiles of queries in `query_order`."""
    queries = tuple(replace(tiling.swapped(), order=query_order).key_tiles(sizes.queries)[0])
    return [Meeting((0, sizes.group), tile, queries) for tile in tiling.key_tiles(sizes.keys)[0]]


def _cut(start: int, stop: int, size: int) -> tuple[Range, ...]:
    return tuple((at, min(at + size, stop)) for at in range(start, stop, size))
