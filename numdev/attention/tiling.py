"""Which tiles of K and V a row of queries meets, and in which order."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from enum import Enum

from numdev.errors import BadInput, NotHonoured


class Order(Enum):
    """The order in which the KV tiles of one split are visited."""

    FORWARD = "forward"
    REVERSE = "reverse"
    OUTSIDE_IN = "outside_in"  # first, last, second, last but one, ...
    STRIDED = "strided"  # every `stride`-th tile, then the same from the next one
    RANDOM = "random"  # one permutation drawn from `seed`


@dataclass(frozen=True)
class Tiling:
    """Tiles of `br` rows of Q by `bc` rows of K and V.

    Attributes:
        br: `Br`; rows are independent, so it changes no bit of an emulated result, only the shape of the work.
        bc: `Bc`; the last tile is shorter where it does not divide the number of keys.
        order: see `Order`.
        splits: split-KV (Flash-Decoding): contiguous ranges of tiles, each normalised, then combined by their LSE.
        stride: of `Order.STRIDED`.
        seed: of `Order.RANDOM`.
    """

    br: int = 64
    bc: int = 64
    order: Order = Order.FORWARD
    splits: int = 1
    stride: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("br", "bc", "splits", "stride"):
            if getattr(self, field) < 1:
                raise BadInput(f"tiling.{field}", getattr(self, field), "give a whole number of at least 1")

    @property
    def idle(self) -> dict[str, str]:
        """Settings that this order does not read, and the one that does."""
        readers = {"stride": Order.STRIDED, "seed": Order.RANDOM}
        return {f"tiling.{name}": f"tiling.order={order.value}" for name, order in readers.items() if self.order is not order}

    def ineffective(self, keys: int) -> list[NotHonoured]:
        """The splits, where there are more of them than tiles of keys, so that some stay empty."""
        tiles = math.ceil(keys / self.bc)
        why = f"{keys} keys are {tiles} tiles of {self.bc}, and a split has at least one; give at most {tiles}"
        return [NotHonoured("tiling.splits", self.splits, why)] if self.splits > tiles else []

    @staticmethod
    def from_sram(elements: int, head_dim: int) -> Tiling:
        """The paper's tile (section II.B): `Bc = ceil(M / 4d)`, `Br = min(ceil(M / 4d), d)`, with `M` in elements."""
        if elements < 1 or head_dim < 1:
            raise BadInput("tiling.sram", elements, "give the size of the SRAM in elements, and a head_dim, of at least 1")
        bc = math.ceil(elements / (4 * head_dim))
        return Tiling(br=min(bc, head_dim), bc=bc)

    def swapped(self) -> Tiling:
        """`Br` and `Bc` exchanged (Figure 6a)."""
        return replace(self, br=self.bc, bc=self.br)

    def square(self) -> Tiling:
        """The square tile of the same area, to the nearest whole side (Figure 6b)."""
        side = max(1, round(math.sqrt(self.area)))
        return replace(self, br=side, bc=side)

    @property
    def area(self) -> int:
        """`Br * Bc`, the abscissa of Figure 6."""
        return self.br * self.bc

    def key_tiles(self, keys: int) -> list[list[tuple[int, int]]]:
        """For each split, the half-open ranges of keys in the order of their visit; a split may be empty."""
        return [
            [(t * self.bc, min((t + 1) * self.bc, keys)) for t in self._ordered(list(range(first, last)))]
            for first, last in itertools.pairwise(self.split_bounds(keys))
        ]

    def split_bounds(self, keys: int) -> list[int]:
        """Split s has the tiles from bound s to bound s + 1."""
        count = math.ceil(keys / self.bc)
        return [round(i * count / self.splits) for i in range(self.splits + 1)]

    def rescales(self, keys: int) -> int:
        """`R = ceil(N / Bc) - 1`, the number of times that a row's accumulator can be rescaled without splits."""
        return math.ceil(keys / self.bc) - 1

    def _ordered(self, tiles: list[int]) -> list[int]:
        if self.order is Order.REVERSE:
            return tiles[::-1]
        if self.order is Order.OUTSIDE_IN:
            return [tiles[i // 2] if i % 2 == 0 else tiles[-1 - i // 2] for i in range(len(tiles))]
        if self.order is Order.STRIDED:
            return [tile for first in range(self.stride) for tile in tiles[first :: self.stride]]
        if self.order is Order.RANDOM:
            random.Random(self.seed).shuffle(tiles)
        return tiles
