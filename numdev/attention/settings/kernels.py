"""Kernels that have a rule of their own for what is not set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numdev.arithmetic.formats import Format
from numdev.attention.precision import Precision
from numdev.attention.settings.tiling import tiling
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiling import Order
from numdev.attention.triton import Kernel, Products, Triton
from numdev.attention.vendor.flex import Flex
from numdev.errors import NotHonoured
from numdev.nearest import choice

_UNSAID = {"order": None, "splits": None, "stride": 2, "seed": 0}


def triton(  # a parameter for each setting that it has beside the tiles
    preset: str, fmt: Format, softmax: OnlineSoftmax, exp: str | None, products: Products, kernel: Kernel, **tiles: Any
) -> Triton:
    """Our kernels; the exponential is exp2 unless one is set.

    Raises:
        NotHonoured: for a policy whose output is in another format than theirs.
    """
    if exp is None and softmax.exp == Exponential.EXP:
        softmax = replace(softmax, exp=Exponential.EXP2)
    order, splits = tiles.pop("order"), tiles.pop("splits")
    made = Triton(
        fmt,
        *sides(**tiles),
        None if order is None else choice("tiling.order", Order, order),
        splits,
        softmax,
        products,
        kernel,
    )
    if "_" in preset and Precision.parse(preset).format != made.format:
        raise NotHonoured("precision.preset", preset, f"attention=triton returns {made.format}; name a format alone")
    return made


def flex(fmt: Format, **tiles: Any) -> Flex:
    """FlexAttention."""
    return Flex(*sides(**tiles), fmt)


def sides(**tiles: Any) -> tuple[int | None, int | None]:
    """Br and Bc where they are set; None leaves them to the kernel's own table."""
    if tiles["sram"] is None and tiles["shape"] == "as_is":
        return tiles["br"], tiles["bc"]
    made = tiling(**(_UNSAID | tiles))
    return made.br, made.bc
