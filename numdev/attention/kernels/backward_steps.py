"""The steps of the backward pass on one tile in registers, each rounded as its policy says."""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.attention.kernels.casts import add, cast, decay, times
from numdev.attention.kernels.forward import dot, multiply


@triton.jit
def recompute(left, right, left_v, right_v, base, sees, factors, MASK: tl.constexpr, CODE: tl.constexpr):
    """`P` and `dP`, `[M, N]`; P of pairs that do not see each other is 0.

    left and left_v, `[M, PAD]`, are q and do, and right and right_v, `[N, PAD]`, k and v; or the other way round. base is
    `[M, 1]` or `[1, N]`.
    """
    # Bound to names: triton 3.6 takes a number of a tuple for a constant in a call, but no text and no tuple.
    SCORES: tl.constexpr = CODE.policy.scores
    EXPONENTIAL: tl.constexpr = CODE.policy.exponential
    DP: tl.constexpr = CODE.policy.dp
    INPUTS: tl.constexpr = CODE.products.inputs
    PAD: tl.constexpr = CODE.tile.pad
    s = dot(left, tl.trans(right), PAD, CODE.every.scores, INPUTS, SCORES)
    dp = dot(left_v, tl.trans(right_v), PAD, CODE.every.dp, INPUTS, DP)
    s = times(s, factors.scores + tl.zeros_like(s), SCORES)
    if MASK:
        s = tl.where(sees, s, float("-inf"))
    p = decay(s, base + tl.zeros_like(s), CODE.binary, EXPONENTIAL)
    return p, dp


@triton.jit
def weigh(p, dp, delta, sees, MASK: tl.constexpr, CODE: tl.constexpr):
    """`dS = P (dP - delta)`, 0 for pairs that do not see each other, also where delta is no number."""
    DIFFERENCE: tl.constexpr = CODE.policy.difference
    DS: tl.constexpr = CODE.policy.ds
    ds = add(dp, -delta + tl.zeros_like(dp), DIFFERENCE)
    ds = times(p, ds, DIFFERENCE)
    if MASK:
        ds = tl.where(sees, ds, 0.0)
    return cast(ds, DS)


@triton.jit
def accumulate(
    a, b, total, INNER: tl.constexpr, EVERY: tl.constexpr, PRODUCT: tl.constexpr, STEP: tl.constexpr, SUM: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """`total + a b`: the product of a tile in the format of its step, then the running sum over tiles."""
    if FUSED:
        return multiply(a, b, total, PRODUCT)
    return add(total, dot(a, b, INNER, EVERY, PRODUCT, STEP), SUM)
