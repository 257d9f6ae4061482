"""The steps of the backward pass on one tile in registers, each rounded as its policy says."""

from __future__ import annotations

import triton
import triton.language as tl

from numdev.attention.kernels.casts import add, cast, decay, times
from numdev.attention.kernels.forward import dot, multiply


@triton.jit
def recompute(left, right, base, sees, factors, MASK: tl.constexpr, CODE: tl.constexpr):
    """`P [M, N]`, 0 for pairs that are not visible.

    left `[M, PAD]` is q and right `[N, PAD]` k, or the other way round; base, the LSE, is `[M, 1]` or `[1, N]`.
    """
    # Bound to names because triton 3.6 accepts a number from a tuple as a constant in a call, but no string and no tuple.
    SCORES: tl.constexpr = CODE.policy.scores
    EXPONENTIAL: tl.constexpr = CODE.policy.exponential
    INPUTS: tl.constexpr = CODE.products.inputs
    s = dot(left, tl.trans(right), CODE.tile.pad, CODE.every.scores, INPUTS, SCORES)
    s = times(s, factors.scores + tl.zeros_like(s), SCORES)
    if MASK:
        s = tl.where(sees, s, float("-inf"))
    return decay(s, base + tl.zeros_like(s), CODE.binary, EXPONENTIAL)


@triton.jit
def gradient_of_p(left, right, CODE: tl.constexpr):
    """`dP [M, N]`: left is do and right v, or the other way round."""
    DP: tl.constexpr = CODE.policy.dp
    INPUTS: tl.constexpr = CODE.products.inputs
    return dot(left, tl.trans(right), CODE.tile.pad, CODE.every.dp, INPUTS, DP)


@triton.jit
def weigh(p, dp, delta, sees, MASK: tl.constexpr, CODE: tl.constexpr):
    """`dS = P (dP - delta)`, 0 for pairs that are not visible, even if delta is NaN."""
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
