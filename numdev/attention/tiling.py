"""Which tiles of K and V a row of queries meets, in which order, and the tiles with which a kernel ran."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from enum import Enum

from numdev.errors import BadInput, NotHonoured
from numdev.settings import held, setting

_SIDE = 64  # of a tile, unless set


class Order(Enum):
    """The order in which the KV tiles of one split are visited."""

    FORWARD = "forward"
    REVERSE = "reverse"
    OUTSIDE_IN = "outside_in"  # first, last, second, last but one, ...
    STRIDED = "strided"  # every `stride`-th tile, then the same from the next one
    RANDOM = "random"  # one permutation drawn from `seed`


class TileShape(Enum):
    """How the two sides are exchanged or squared."""

    AS_IS = "as_is"
    SWAPPED = "swapped"
    SQUARE = "square"
    SQUARE_BC = "square_bc"  # Br becomes Bc


@dataclass(frozen=True)
class Tiling:
    """Tiles of `br` rows of Q by `bc` rows of K and V.

    Rows are independent, so `br` changes no bit of an emulated result, only the shape of the work. The last tile is shorter where
    `bc` does not divide the number of keys. Splits (split-KV, Flash-Decoding) are each normalised, then combined by their LSE.

    With `split_size` each split has as many keys, whatever their number, but for the last, and the splits are joined one after
    the other, each as a tile is under `Maximum.LOCAL`: so one program may do them all, or each have one, with the same bits.
    """

    br: int = setting(
        None,
        "Br, queries in one tile; null is 64, unless sram says",
        "rows",
        overruled={"shape": "square_bc"},
        word="tile rows Br",
    )
    bc: int = setting(None, "Bc, keys in one tile; null is 64, unless sram says", "rows", word="tile columns Bc")
    order: Order = setting(
        None,
        "in which order a row of queries meets the tiles of keys: forward, reverse, outside_in, strided or random; null is "
        "forward, and a kernel's own",
        word="order of the tiles",
    )
    splits: int = setting(
        None,
        "contiguous ranges of keys, each with a result of its own, combined by their log-sum-exp, at most one for each "
        "tile; null is 1, and a kernel's own rule",
        "count",
        word="splits of the keys",
    )
    stride: int = setting(2, "from one tile to the next in the order `strided`", "tiles")
    seed: int = setting(0, "what the order `random` is drawn with")
    split_size: int | None = setting(
        None,
        "keys of each split, a multiple of Bc, in place of a number of splits; the splits are joined in order, so that a row has "
        "the same bits in one program for all of them and in one for each; null is a number of splits",
        "keys",
        word="keys of a split",
    )
    _: KW_ONLY
    sram: InitVar[int | None] = setting(
        None, "M; gives Bc = ceil(M/4d) and Br = min(Bc, d), as the paper does", "entries", column="", word="on-chip memory M"
    )
    shape: InitVar[TileShape] = setting(
        TileShape.AS_IS,
        f"what becomes of the two sides: {', '.join(each.value for each in TileShape)}",
        column="",
        word="tile shape",
    )
    head_dim: InitVar[int | None] = held(None, "problem.head_dim")  # which `sram` is divided by

    def __post_init__(self, sram: int | None, shape: TileShape, head_dim: int | None) -> None:
        br, bc = sides(self.br, self.bc, sram, shape, head_dim)
        usual = {"br": _SIDE, "bc": _SIDE, "order": Order.FORWARD, "splits": 1}
        for name, value in {"br": br, "bc": bc, "order": self.order, "splits": self.splits}.items():
            object.__setattr__(self, name, usual[name] if value is None else value)
        for name in ("br", "bc", "splits", "stride"):
            if getattr(self, name) < 1:
                raise BadInput(f"tiling.{name}", getattr(self, name), "give a whole number of at least 1")
        if self.split_size is not None and (self.split_size < 1 or self.split_size % self.bc):
            raise BadInput("tiling.split_size", self.split_size, f"give a multiple of tiling.bc={self.bc}, or null")
        if self.split_size is not None and self.splits != 1:
            raise BadInput(
                "tiling.splits", self.splits, f"tiling.split_size={self.split_size} decides it; give null for one of them"
            )

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
        if self.split_size is not None:
            return [*range(0, count, self.split_size // self.bc), count]
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


@dataclass(frozen=True)
class KernelLaunch:
    """The compiled kernel that really ran, with what is known of its launch; `str` is what results show as `kernel`.

    Without a name tensor operations ran, or the kernel is not known. `splits` are ranges of keys whose results it combined,
    unless they have a fixed size, of which a program may do several. `rescale_threshold` is that of `OnlineSoftmax`.
    """

    name: str = ""
    br: int | None = None
    bc: int | None = None
    warps: int | None = None
    stages: int | None = None
    splits: int = 1
    split_size: int | None = None
    rescale_threshold: float = 0.0

    def __str__(self) -> str:
        names = "br", "bc", "warps", "stages", "split_size"
        settings = {name: getattr(self, name) for name in names}
        known = [f"{name}={value}" for name, value in settings.items() if value is not None]
        known += [f"rescale_threshold={self.rescale_threshold:g}"] if self.rescale_threshold else []
        return " ".join([self.name, *known, *([] if self.splits == 1 else [f"splits={self.splits} combined=lse"])])


def sides(
    br: int | None, bc: int | None, sram: int | None, shape: TileShape, head_dim: int | None
) -> tuple[int | None, int | None]:
    """Br and Bc of the settings; None where none says it. `sram` gives them as the paper does, then `shape` changes them."""
    if sram is not None:
        for name, value in (("br", br), ("bc", bc)):
            if value is not None:
                raise BadInput(f"tiling.{name}", value, f"tiling.sram={sram} gives the sides; take null for one of the two")
        if head_dim is None:
            raise BadInput("tiling.sram", sram, "head_dim follows from the task here; give tiling.br and tiling.bc")
        tile = Tiling.from_sram(sram, head_dim)
        br, bc = tile.br, tile.bc
    if shape is TileShape.AS_IS:
        return br, bc
    tile = Tiling(_SIDE if br is None else br, _SIDE if bc is None else bc)
    if shape is TileShape.SQUARE_BC:
        return tile.bc, tile.bc
    tile = tile.swapped() if shape is TileShape.SWAPPED else tile.square()
    return tile.br, tile.bc
