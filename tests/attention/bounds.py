"""A bound on the error of every run of tiled attention, whoever computes it: a running error analysis (Higham 2002, section 3.3).

Beside the exact value `x` of each number of the recurrence stands `e`, so that the number that a run has in its place is within
`e` of `x`. The run may be by tensor operations or by the kernel. What is required of it:

- an elementary operation rounds once, to the format of its step: `|fl(z) - z| <= u |z| + t`, with `t` for underflow;
- a sum of n products is added up in FP32 in any order. A tensor core truncates the terms of a sum to the last place of the
  largest (Fasi et al. 2021, section 4), so that a term costs up to `2u` of the sum of the magnitudes;
- an exponential is within 4 ulp of FP32; and since `exp(x)` may be `exp2(x log2 e)`, whose argument rounds twice, `2 |x| u` more.

A row sees what it sees in either run, and maxima do not round: `|max a - max b| <= max |a - b|`. So two runs differ by at most
`2 e`. It holds for the recurrence of FlashAttention-2 in one range of keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import FP32
from numdev.arithmetic.rounding import Cast, Subnormals
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.tiling import Tiling

U32 = FP32.u
SLACK = 1 + 2.0**-20  # for the FP64 in which the bound itself is computed

EXP2_ERRORS = {1: 2.9822e-02, 2: 1.7249e-03, 3: 7.4782e-05, 4: 2.5935e-06, 5: 7.4937e-08}
"""Largest relative error of each polynomial of `EXP2_MINIMAX` on [0, 1), by its degree."""


@dataclass(frozen=True)
class Near:
    """Numbers of the exact recurrence, and how far those of a run are from them at most."""

    x: Tensor
    e: Tensor

    @classmethod
    def exact(cls, x: Tensor) -> Self:
        return cls(x.double(), torch.zeros_like(x, dtype=torch.float64))

    def rounded(self, cast: Cast, times: int = 1) -> Near:
        """After so many roundings; nothing is known of a number that may overflow."""
        u, tiny = unit(cast), underflow(cast)
        most = self.x.abs() + self.e
        e = self.e + math.expm1(times * math.log1p(u)) * most + times * (1 + u) ** times * tiny
        beyond = most * (1 + u) ** times + times * tiny > cast.to.max
        return Near(self.x, e.masked_fill(beyond, torch.inf))

    def plus(self, other: Near) -> Near:
        return Near(self.x + other.x, self.e + other.e)

    def times(self, other: Near) -> Near:
        cross = self.x.abs() * other.e + other.x.abs() * self.e + self.e * other.e
        return Near(self.x * other.x, cross.nan_to_num(nan=torch.inf))  # 0 times an infinite bound

    def over(self, other: Near) -> Near:
        """`|a'/b' - a/b| <= (|a' - a| + |a/b| |b' - b|) / |b'|`; nothing is known where b' may be 0."""
        quotient, left = self.x / other.x, other.x.abs() - other.e
        e = (self.e + quotient.abs() * other.e) / left
        return Near(quotient, torch.where(left > 0, e, torch.inf).nan_to_num(nan=torch.inf))

    def exponential(self, *, binary: bool) -> Near:
        """`exp x`, in FP32 and not rounded further; 0 for minus infinity."""
        base = math.log(2) if binary else 1.0
        value = torch.exp(base * self.x)
        own = 8 * U32 + 2 * U32 * torch.where(self.x.isinf(), 0.0, base * (self.x.abs() + self.e))
        e = value * (torch.exp(base * self.e) * (1 + own) - 1) + FP32.min_normal
        return Near(value, torch.where(self.x == -torch.inf, 0.0, e.nan_to_num(nan=torch.inf)))


def unit(cast: Cast) -> float:
    """The largest relative error of a rounding: u to nearest, twice that in a direction."""
    return cast.to.u if cast.rounding.is_nearest else 2 * cast.to.u


def underflow(cast: Cast) -> float:
    """The largest absolute error of a result that has no relative one; GPUs may flush subnormal results of FP32."""
    flushed = cast.subnormals is Subnormals.FLUSHED
    return max(FP32.min_normal, cast.to.min_normal if flushed else cast.to.min_subnormal)


def dot(a: Near, b: Near, by: Dot, more: Tensor | None = None) -> Near:
    """`a b`. `more` are magnitudes that the same FP32 accumulation holds from before."""
    magnitudes = (a.x.abs() + a.e) @ (b.x.abs() + b.e) + (0.0 if more is None else more)
    e = a.e @ (b.x.abs() + b.e) + a.x.abs() @ b.e
    return _summed(Near(a.x @ b.x, e.nan_to_num(nan=torch.inf)), by, a.x.shape[-1], magnitudes)


def row_sum(p: Near, by: Dot) -> Near:
    magnitudes = (p.x.abs() + p.e).sum(-1, keepdim=True)
    return _summed(Near(p.x.sum(-1, keepdim=True), p.e.sum(-1, keepdim=True)), by, p.x.shape[-1], magnitudes)


def _summed(exact: Near, by: Dot, n: int, magnitudes: Tensor) -> Near:
    """A sum of n terms after FP32's errors and the roundings within it; a running sum is no larger than all magnitudes."""
    times, own = 1 if by.every is None else math.ceil(n / by.every), math.expm1((n + 1) * math.log1p(2 * U32))
    worst = Near(magnitudes * (1 + own), torch.zeros_like(magnitudes)).rounded(by.accumulate, times)
    return Near(exact.x, exact.e + own * magnitudes + worst.e)


def bound(
    policy: Precision, tiling: Tiling, softmax: OnlineSoftmax, inputs: tuple[Tensor, ...], mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """`out` of exact attention on rounded inputs, and the largest error of a run under the policy, both in FP64.

    Every head of q has its own k and v, every row sees a key, and the scale is positive.
    """
    q, k, v = inputs
    queries, keys, binary = q.shape[-2], k.shape[-2], softmax.exp.binary
    factor = scale * softmax.log_scale
    state: tuple[Near, Near, Near] | None = None
    for first, last in tiling.key_tiles(keys)[0]:
        k_tile, v_tile = (x[..., first:last, :].double() for x in (k, v))
        s = dot(Near.exact(q), Near.exact(k_tile.mT), policy.scores)
        s = Near(s.x * factor, factor * (s.e + U32 * (s.x.abs() + s.e)))  # the factor is rounded to FP32
        s = s.rounded(policy.scores.accumulate)
        if (seen := mask.visible(queries, keys, (0, queries), (first, last), q.device)) is not None:
            s = Near(s.x.masked_fill(~seen, -torch.inf), s.e.masked_fill(~seen, 0.0))
        state = _meet(policy, s, Near.exact(v_tile), state, binary=binary)
    assert state is not None
    _, total, o = state
    out = o.over(total).rounded(policy.accumulator).rounded(policy.output)
    return out.x, out.e * SLACK


def _meet(policy: Precision, s: Near, v: Near, state: tuple[Near, Near, Near] | None, *, binary: bool) -> tuple[Near, Near, Near]:
    """One tile: `m, l, O -> m', l', O'`. A row that has seen nothing yet has m = -inf."""
    largest = s.x.amax(-1, keepdim=True)
    off = s.e.amax(-1, keepdim=True)
    m = Near(largest, off) if state is None else Near(torch.maximum(state[0].x, largest), torch.maximum(state[0].e, off))
    p = _decay(s, m, policy.exponential, binary=binary)
    tile_sum = row_sum(p, policy.row_sum)
    assert isinstance(policy.probabilities, Cast)
    rounded = p.rounded(policy.probabilities)
    rounded = Near(rounded.x, rounded.e.masked_fill(s.x == -torch.inf, 0.0))
    if state is None:
        product = dot(rounded, v, policy.values).rounded(policy.accumulator)
        return m, tile_sum.rounded(policy.row_sum.accumulate), product
    alpha = _decay(state[0], m, policy.rescale, binary=binary)
    kept = alpha.times(state[1]).rounded(policy.row_sum.accumulate)
    total = kept.plus(tile_sum).rounded(policy.row_sum.accumulate)
    o = alpha.times(state[2]).rounded(policy.accumulator)
    product = dot(rounded, v, policy.values, o.x.abs() + o.e)
    return m, total, o.plus(product).rounded(policy.accumulator)


def _decay(x: Near, m: Near, cast: Cast, *, binary: bool) -> Near:
    """`exp(x - m)`, the difference and the exponential rounded; 0 where x is no number."""
    base = m.x.masked_fill(m.x == -torch.inf, 0.0)
    difference = Near(x.x - base, x.e + m.e)
    never = (x.x == -torch.inf).expand_as(difference.x)
    difference = Near(difference.x.masked_fill(never, 0.0), difference.e.masked_fill(never, 0.0)).rounded(cast)
    found = difference.exponential(binary=binary).rounded(cast)
    return Near(found.x.masked_fill(never, 0.0), found.e.masked_fill(never, 0.0))
