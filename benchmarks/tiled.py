"""`Tiled` against the obvious double loop over tiles of Q and of K and V, with bit-equal results."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import Result, paired
from numdev import Mask, Precision, Tiled, Tiling
from numdev.arithmetic.products import product

_COUNTED = 11  # runs where a tenth is to be told apart


def double_loop(q: Tensor, k: Tensor, v: Tensor, scale: float, tiling: Tiling, step: Precision) -> Tensor:
    """FlashAttention-2's recurrence, tile by tile; heads are batched, as anyone would, and products are those of `Tiled`."""
    out, transposed = torch.empty_like(q), k.mT.contiguous()
    for i in range(0, q.shape[2], tiling.br):
        rows = q[:, :, i : i + tiling.br]
        m = rows.new_full((*rows.shape[:3], 1), float("-inf"))
        row_sum, o = torch.zeros_like(m), torch.zeros_like(rows)
        for j in range(0, k.shape[2], tiling.bc):
            keys, values = transposed[..., j : j + tiling.bc], v[:, :, j : j + tiling.bc]
            s = step.scores.accumulate(step.scores.accumulate(product(rows, keys)) * scale)
            new_m = torch.maximum(m, s.amax(-1, keepdim=True))
            p = step.exponential(torch.exp(step.exponential(s - new_m)))
            alpha = step.rescale(torch.exp(step.rescale(m - new_m)))
            cast = step.row_sum.accumulate
            row_sum = cast(cast(alpha * row_sum) + cast(p.sum(-1, keepdim=True)))
            summed = step.values.accumulate(product(step.probabilities(p), values))
            o = step.accumulator(step.accumulator(alpha * o) + summed)
            m = new_m
        out[:, :, i : i + tiling.br] = step.output(step.accumulator(o / row_sum))
    return out


def results() -> list[Result]:
    """4 heads, N = 2048, d = 64, every step in BF16; `Tiled` counts its events."""
    step = Precision.parse("bf16")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 4, 2048, 64, generator=generator) for _ in range(3))
    q, k, v = step.round_inputs(q, k, v)
    found = []
    for side, target, runs in ((64, 5.0, 5), (16, 25.0, 3)):
        tiling = Tiling(side, side)
        tiled, quiet = Tiled(step, tiling), Tiled(step, tiling, count=False)
        if not torch.equal(tiled(q, k, v, Mask(), 0.125).out, double_loop(q, k, v, 0.125, tiling, step)):
            raise AssertionError(f"Tiled and the double loop differ at Br = Bc = {side}")
        name = f"Tiled against the double loop, Br = Bc = {side}, bit-equal"
        ours, theirs = partial(tiled, q, k, v, Mask(), 0.125), partial(double_loop, q, k, v, 0.125, tiling, step)
        found.append(paired(name, ours, theirs, at_least=target, runs=runs))
        without = partial(quiet, q, k, v, Mask(), 0.125)
        found.append(paired(f"counting by tensor operations, Br = Bc = {side}", ours, without, at_most=1.1, runs=_COUNTED))
    return found
