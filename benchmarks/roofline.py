"""How far tiled attention is from its limit: its matrix products, and one pass over each tile of scores.

The products are those of the algorithm, by the same calls of BLAS, of all rows at once; a pass reads and writes a tile of scores
that stays in the cache. Neither casts nor counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import Result, median_seconds
from numdev import Mask, Precision, Tiled, Tiling
from numdev.arithmetic.products import product
from numdev.attention.base import Saved, saved_by
from numdev.attention.precision import BackwardPrecision
from numdev.attention.tiled import TiledBackward

_SCALE, _DIM, _RUNS = 0.125, 64, 3
Limit = Callable[[], None]


def products(q: Tensor, k: Tensor, v: Tensor, bc: int) -> None:
    """`Q K^T` and `P V` of every tile; P is what the first one gave."""
    for first in range(0, k.shape[2], bc):
        keys = slice(first, first + bc)
        product(product(q, k[:, :, keys].mT), v[:, :, keys])


def gradient_products(q: Tensor, k: Tensor, v: Tensor, do: Tensor, tiling: Tiling) -> None:
    """The five products of every tile of the backward pass; dK and dV by tiles of queries."""
    queries, gradients = (x.unflatten(2, (-1, tiling.br)) for x in (q, do))
    for first in range(0, k.shape[2], tiling.bc):
        keys = slice(first, first + tiling.bc)
        p, dp = product(q, k[:, :, keys].mT), product(do, v[:, :, keys].mT)
        product(dp, k[:, :, keys])
        for tile, right in ((dp, queries), (p, gradients)):
            product(tile.unflatten(2, (-1, tiling.br)).mT, right)


def passes(scores: int, tile: int, times: int) -> None:
    """So many passes over so many scores, a tile after the other."""
    s = torch.ones(tile)
    for _ in range(times * scores // tile):
        s.mul_(1.0)


def compared(title: str, limit: Limit, one_pass: Limit, tiled: Callable[[], object]) -> list[Result]:
    """The limit, and tiled attention beside it."""
    multiplying, passing = (median_seconds(action, _RUNS) for action in (limit, one_pass))
    both = multiplying + passing
    found = [Result(f"{title}: products alone", multiplying, both, multiplying / both, "a share of the limit", True)]
    taken = median_seconds(tiled, _RUNS)
    return [*found, Result(f"{title}: tensor operations", taken, both, taken / both, "times the limit", True)]


def forward(heads: int, length: int, side: int) -> list[Result]:
    step, tiling = Precision.parse("bf16"), Tiling(side, side)
    generator = torch.Generator().manual_seed(0)
    inputs = step.round_inputs(*(torch.rand(1, heads, length, _DIM, generator=generator) for _ in range(3)))
    tiled = Tiled(step, tiling, count=False)
    title = f"forward, {heads} heads, N = {length}, Br = Bc = {side}"
    one_pass = partial(passes, heads * length * length, 1024 * side, 1)
    return compared(title, partial(products, *inputs, side), one_pass, partial(tiled, *inputs, Mask(), _SCALE))


def backward(heads: int, length: int, side: int) -> list[Result]:
    step, tiling = BackwardPrecision.parse("bf16"), Tiling(side, side)
    generator = torch.Generator().manual_seed(0)
    inputs = step.round_inputs(*(torch.rand(1, heads, length, _DIM, generator=generator) for _ in range(4)))
    variant = TiledBackward(Tiled(Precision.parse("bf16")), step, tiling, count=False)
    saved: Saved = saved_by(variant.forward, variant.reads, inputs[:3], Mask(), _SCALE)
    title = f"backward, {heads} heads, N = {length}, Br = Bc = {side}"
    two_passes = partial(passes, heads * length * length, 1024 * side, 2)
    run = partial(variant.backward, *inputs, saved, Mask(), _SCALE)
    return compared(title, partial(gradient_products, *inputs, tiling), two_passes, run)


def results() -> list[Result]:
    """Every step in BF16, nothing counted, d = 64."""
    found = []
    for side in (64, 16):
        found += forward(4, 2048, side) + forward(16, 8192, side) + backward(4, 2048, side)
    return found
