"""Kernels of the backward pass that have a rule of their own for what is not set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numdev.arithmetic.formats import Format
from numdev.attention.backward.recompute import Recompute
from numdev.attention.backward.triton import TritonBackward
from numdev.attention.settings.kernels import sides
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiling import Order
from numdev.attention.triton import Products, Triton
from numdev.nearest import choice


def triton(  # a parameter for each setting that it has beside the tiles
    fmt: Format, softmax: OnlineSoftmax, recompute: Recompute, exp: str | None, products: Products, **tiles: Any
) -> TritonBackward:
    """Our forward kernels with the tile of their table, then our backward kernels; the exponential is exp2 unless one is set."""
    if exp is None:
        softmax, recompute = replace(softmax, exp=Exponential.EXP2), replace(recompute, exponential=Exponential.EXP2)
    order = tiles.pop("order")
    return TritonBackward(
        Triton(fmt, softmax=softmax, products=products),
        fmt,
        *sides(**tiles),
        order=Order.FORWARD if order is None else choice("tiling.order", Order, order),
        recompute=recompute,
        tf32=products is Products.TF32,
    )
