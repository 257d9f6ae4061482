"""Which tiles of K and V, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numdev.errors import BadInput
from numdev.nearest import NotAChoice, choice
from numdev.settings import Overruled, setting

if TYPE_CHECKING:
    from numdev.attention.tiling import Tiling

SHAPES = ("as_is", "swapped", "square", "square_bc")


@dataclass
class TilingSettings:
    """`Tiling`, and how its sides are found."""

    _target_: str = "numdev.attention.settings.tiling.tiling"
    br: int | None = setting(
        None,
        "Br, queries in one tile; null is 64, unless sram says",
        "rows",
        overruled=Overruled(("tiling.shape",), "square_bc"),
        word="tile rows Br",
    )
    bc: int | None = setting(None, "Bc, keys in one tile; null is 64, unless sram says", "rows", word="tile columns Bc")
    sram: int | None = setting(
        None, "M; gives Bc = ceil(M/4d) and Br = min(Bc, d), as the paper does", "entries", column="", word="on-chip memory M"
    )
    shape: str = setting("as_is", f"what becomes of the two sides: {', '.join(SHAPES)}", column="", word="tile shape")
    order: str | None = setting(
        None,
        "in which order a row of queries meets the tiles of keys: forward, reverse, outside_in, strided or random; null is "
        "forward, and a kernel's own",
        word="order of the tiles",
    )
    stride: int = setting(2, "from one tile to the next in the order `strided`", "tiles")
    seed: int = setting(0, "what the order `random` is drawn with")
    splits: int | None = setting(
        None,
        "contiguous ranges of keys, each with a result of its own, combined by their log-sum-exp, at most one for each "
        "tile; null is 1, and a kernel's own rule",
        "count",
        word="splits of the keys",
    )
    head_dim: int = "${problem.head_dim}"  # type: ignore[assignment]  # which `sram` is divided by


def tiling(**settings: Any) -> Tiling:
    """The tiles; `sram` gives their sides as the paper does, then `shape` exchanges or squares them."""
    from numdev.attention.tiling import Order, Tiling

    sides = {name: settings[name] for name in ("br", "bc") if settings[name] is not None}
    sram, shape = settings["sram"], settings["shape"]
    if sram is not None:
        for name, value in sides.items():
            raise BadInput(f"tiling.{name}", value, f"tiling.sram={sram} gives the sides; take null for one of the two")
        derived = Tiling.from_sram(sram, settings["head_dim"])
        sides = {"br": derived.br, "bc": derived.bc}
    given = Tiling(
        **sides,
        order=Order.FORWARD if settings["order"] is None else choice("tiling.order", Order, settings["order"]),
        splits=1 if settings["splits"] is None else settings["splits"],
        stride=settings["stride"],
        seed=settings["seed"],
    )
    if shape not in SHAPES:
        raise NotAChoice("tiling.shape", shape, SHAPES)
    if shape == "square_bc":
        return Tiling(given.bc, given.bc, given.order, given.splits, given.stride, given.seed)
    return given if shape == "as_is" else given.swapped() if shape == "swapped" else given.square()
