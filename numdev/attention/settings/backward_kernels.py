"""Kernels of the backward pass that have a rule of their own for what is not set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numdev.arithmetic.formats import Format
from numdev.attention.backward.recompute import Recompute
from numdev.attention.backward.triton import TritonBackward
from numdev.attention.kernels.hopper_backward_launch import Design
from numdev.attention.kernels.launch import Kernel
from numdev.attention.settings.kernels import sides
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiling import Order
from numdev.attention.triton import Products, Triton
from numdev.attention.vendor.flex import FlexBackward
from numdev.nearest import choice


def triton(  # a parameter for each setting that it has beside the tiles
    fmt: Format,
    softmax: OnlineSoftmax,
    recompute: Recompute,
    exp: str | None,
    recompute_exp: str | None,
    products: Products,
    kernel: Kernel,
    design: Design | None,
    **tiles: Any,
) -> TritonBackward:
    """Our forward kernels with the tile of their table, then our backward kernels; the exponential is exp2 unless one is set.

    `kernel` is of both passes.
    """
    if exp is None and softmax.exp == Exponential.EXP:
        softmax = replace(softmax, exp=Exponential.EXP2)
        if recompute_exp is None and recompute.exponential == Exponential.EXP:
            recompute = replace(recompute, exponential=Exponential.EXP2)
    order = tiles.pop("order")
    return TritonBackward(
        Triton(fmt, softmax=softmax, products=products, kernel=kernel),
        fmt,
        *sides(**tiles),
        order=None if order is None else choice("tiling.order", Order, order),
        recompute=recompute,
        tf32=products is Products.TF32,
        kernel=kernel,
        design=design,
    )


def flex(fmt: Format, **tiles: Any) -> FlexBackward:
    """FlexAttention, its forward kernel with the tile."""
    return FlexBackward(*sides(**tiles), fmt)
