"""Kernels from settings: what is not set is left to a rule of their own."""

from __future__ import annotations

from dataclasses import replace

from numdev.arithmetic.formats import Format
from numdev.attention.kernels.launch import Kernel
from numdev.attention.precision import Precision
from numdev.attention.softmax import Exponential, OnlineSoftmax, Recompute
from numdev.attention.tiling import Order
from numdev.attention.triton import Products, Triton, TritonBackward
from numdev.attention.vendor.flex import Flex, FlexBackward
from numdev.errors import NotHonoured

Sides = tuple[int | None, int | None]  # Br and Bc, None for those of the kernel's own table
Exponentials = tuple[OnlineSoftmax, Recompute]


def exponentials(
    softmax: OnlineSoftmax, exp: Exponential | None, recompute: Recompute | None = None, recompute_exp: Exponential | None = None
) -> Exponentials:
    """Both with the exponential exp2, unless one is set: `exp` and `recompute_exp`."""
    recompute = Recompute() if recompute is None else recompute
    if exp is None and softmax.exp == Exponential.EXP:
        softmax = replace(softmax, exp=Exponential.EXP2)
        if recompute_exp is None and recompute.exponential == Exponential.EXP:
            recompute = replace(recompute, exponential=Exponential.EXP2)
    return softmax, recompute


def triton(
    preset: str,
    fmt: Format,
    exponentials: Exponentials,
    products: Products,
    kernel: Kernel,
    tile: Sides,
    order: Order | None,
    splits: int | None,
) -> Triton:
    """Our forward kernels.

    Raises:
        NotHonoured: for a policy whose output is in another format than theirs.
    """
    made = Triton(fmt, *tile, order, splits, exponentials[0], products, kernel)
    if "_" in preset and Precision.parse(preset).format != made.format:
        raise NotHonoured("precision.preset", preset, f"attention=triton returns {made.format}; name a format alone")
    return made


def triton_backward(
    fmt: Format,
    exponentials: Exponentials,
    products: Products,
    kernel: Kernel,
    tile: Sides,
    order: Order | None,
) -> TritonBackward:
    """Our forward kernels with the tile of their table, then our backward kernels. `kernel` is of both passes."""
    softmax, recompute = exponentials
    forward = Triton(fmt, softmax=softmax, products=products, kernel=kernel)
    return TritonBackward(forward, fmt, *tile, order, recompute, products is Products.TF32, kernel)


def flex(fmt: Format, tile: Sides) -> Flex:
    """FlexAttention."""
    return Flex(*tile, fmt)


def flex_backward(fmt: Format, tile: Sides) -> FlexBackward:
    """FlexAttention, its forward kernel with the tile."""
    return FlexBackward(*tile, fmt)
