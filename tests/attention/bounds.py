"""How far a run may be from golden on the same inputs: by the formats of its steps, and for FP64 gradients; no flat tolerance.

`cases` has those of FP64 forward passes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev import Cast, Mask, OnlineSoftmax, Precision
from numdev.attention.base import Gradients, Output, softmax_scale
from numdev.attention.exact import Exact, ExactBackward
from tests.cases import U64, Inputs, lse_error, lse_of, output_error, reach, tiled_error, weight_error

U32 = 2.0**-24
EXP32 = 4 * U32  # the hardware's exponential: 2 ulp of FP32 (CUDA C++ Programming Guide, ex2.approx), and its argument's rounding


DEFAULT = OnlineSoftmax()


def output_near_golden(
    output: Output,
    inputs: tuple[Tensor, ...],
    mask: Mask,
    precision: Precision,
    softmax: OnlineSoftmax = DEFAULT,
    scale: float | None = None,
    tiles: int = 8,
    *,
    product: float = 0.0,
    more: float = 0.0,
) -> None:
    """Every element is written and near golden, for policies whose S, m, l, alpha and O are FP32; rows that see nothing are 0.

    A score is a sum of d exact products in FP32 in any order, scaled: `(d + 2) u A`, A being `reach` (Higham 2002, section
    3.1); tensor cores may truncate while they add, which doubles u. `product` is the relative error of one product (TF32
    rounds both operands). S - m rounds once more, by `2 u A`, and so does log2(e) folded into the scale. What is absolute in
    the exponent is relative in P: `e = (2 d + 8) u A + product A + EXP32`. Each tile's alpha carries the same and two
    roundings. P is rounded to its format, `u_P`; where it underflows there it is off by half the least subnormal, relative
    to a row sum of at least 1. Sums of N terms and of the tiles' O add `2 (N + 2 tiles) u`. Numerator and denominator both:
    twice the common part. The output rounds by `u_F`, and every part is relative to `max |v|`; `more` is what else errs in O.
    """
    q, k, v = inputs[:3]
    dim, keys, factor = q.shape[-1], k.shape[-2], softmax_scale(q, scale)
    a = reach(q.double().cpu(), k.double().cpu(), factor)
    exponent = (2 * dim + 8) * U32 * a + product * a + EXP32
    lazy = 2.0**softmax.rescale_threshold  # P may exceed 1 by as much, and l with it
    entry = exponent * (1 + tiles) + 2 * tiles * U32
    sums = 2 * (keys + 2 * tiles) * U32
    assert isinstance(precision.probabilities, Cast)
    p, to = precision.probabilities.to, precision.output.to
    cast = 0.0 if p.mantissa_bits >= 23 else p.u + keys * p.min_subnormal / (2 * softmax.p_scale) + 2 * product
    relative = 2 * (entry + sums) * math.exp(min(entry, 1.0)) + cast * (1 + entry)
    bound = float(v.double().abs().max()) * (relative * 1.01 + to.u * (1 + relative)) + to.min_subnormal + more
    golden, out = Exact()(q, k, v, mask, scale), output.out
    assert (out.shape, out.dtype) == (golden.out.shape, to.dtype)
    assert float((out.double() - golden.out).abs().max()) <= bound  # false where an element is NaN
    empty = lse_of(golden).isneginf()
    assert bool((out[empty] == 0).all()), "rows that see nothing"
    if output.lse is not None:
        bound = entry + sums + 2 * U32 * (a + math.log(keys) + math.log(lazy)) + exponent
        assert torch.equal(output.lse.isneginf(), empty)
        assert bool(((output.lse.double() - lse_of(golden))[~empty].abs() <= bound).all())


def fp64_bounds(inputs: Inputs, scale: float, tiles: int = 1, query_tiles: int = 1) -> dict[str, float]:
    """Errors of streamed or tiled FP64 gradients at most, to first order: `c N u` of the largest that they could be.

    Let `A` be `reach`, `N` keys, `R` rows of all heads of a group, `T` KV tiles, and `W = max_i sum_t |dO_it| max |V|`, which no
    `|dP_ij|`, no `|delta_i|` and no sum `sum_t |dO_it O_it|` exceeds, O being a mean of V. Errors in units of u:

    P, relative: S is off by `(d + 2) A`, a folded log2(e) by `2 A` more; LSE by its own error, its product with log2(e) by
    `A + log N`; `S - LSE` rounds by at most `2 A + log N`; exp2 is below 1.5 ulp, 3 u. All is absolute in the exponent.
    dP: a sum of d products, `d W`.
    delta: `rowsum(dO * O)` is off by the error of O, relative to `max |V|`, times `sum |dO|`, and by `d + 1` roundings;
    `rowsum(dP * P)` by that of P and of dP, the product's, and `N + T` roundings of sums. Both together bound either.
    dS: `P_ij` times that of P on `|dP - delta| <= 2 W`, those of dP and delta, and two roundings of at most `2 W`.
    dQ: `scale max |K|` times the sum of that over a row, where `sum_j P_ij = 1`, and `N + T + 2` roundings of sums of
    `|dS| <= 2 W P`. dK: `scale max |Q|` times the sum over a column, where `sum_i P_ij <= R`, and `R + H T_q + 2` roundings.
    dV: `max |dO|` times R times the error of P, and as many roundings.
    """
    q, k, v, do = inputs
    (heads, queries, dim), keys = q.shape[1:], k.shape[2]
    a, group = reach(q, k, scale), heads // k.shape[1]
    column, w = group * queries, float(do.abs().sum(-1).max() * v.abs().max())
    lse = max(lse_error(dim, keys, a), tiled_error(dim, keys, a, tiles, 1))
    out = max(output_error(dim, keys, a), tiled_error(dim, keys, a, tiles, 1))
    p = (dim + 4) * a + lse + 3 * a + 2 * math.log(keys) + 3
    delta = w * (out + p + 2 * dim + keys + tiles + 3)
    ds = 2 * w * p + dim * w + delta + 4 * w
    per_row, per_column = keys + tiles + 2, column + group * query_tiles + 2
    dq = scale * float(k.abs().max()) * (ds + 2 * w * per_row)
    dk = scale * float(q.abs().max()) * column * (ds + 2 * w * per_column)
    dv = float(do.abs().max()) * column * (p + per_column)
    return {"dq": dq, "dk": dk, "dv": dv, "delta": delta}


def element_bounds(inputs: Inputs, p: Tensor, scale: float) -> dict[str, Tensor]:
    """Error of each element of the golden gradients at most, to first order, in units of u; `p` is the exact P.

    For a row i let b be the key of its largest score, `R = 1 - P_ib` the sum of the other weights, `W = sum_t |dO_it| max |V|`,
    and `pi u` the relative error of a computed weight (`weight_error`). Errors in units of u:

    e_ij = dP_ij - dP_ib: two sums of d products and a difference, `2 (d + 1) W`; e_ib is exactly 0. No |e| exceeds 2 W.
    mean = sum_j P_ij e_ij, which has no term of b: at most `2 W R`, and off by `2 W R (pi + d + 2 + N)`: weights, e, N roundings.
    dS_ij with j /= b: `P_ij` times `2 W` times `pi`, `d + 1`, R times the mean's, and 2 roundings; there `P_ij <= 1/2`, so
    `P_ij <= 2 P_ij (1 - P_ij)`. `dS_ib = -P_ib mean`: P_ib times `2 W R` times `pi`, the mean's, and 2 more; `R = 1 - P_ib`.
    Both are at most `4 W P_ij (1 - P_ij) C` with `C = 2 pi + N + 2 d + 5`, and |dS_ij| at most `4 W P_ij (1 - P_ij)`.
    dQ, dK: sums of N or M such dS, with as many roundings, and the scale, 1; dV: a sum of M of P dO.
    What underflows is off by at most 2^-1022 each time, also if it is flushed to zero.
    """
    q, k, v, do = inputs
    (heads, queries, dim), keys, kv_heads = q.shape[1:], k.shape[2], k.shape[1]
    group = heads // kv_heads
    pi, rows = weight_error(dim, keys, reach(q, k, scale)), group * queries
    c, w = 2 * pi + keys + 2 * dim + 5, do.abs().sum(-1, keepdim=True) * v.abs().max()
    best = p.argmax(-1, keepdim=True)
    others = (1 - p).scatter(-1, best, p.scatter(-1, best, 0.0).sum(-1, keepdim=True))  # 1 - P, of which nothing cancels
    ds = 4 * scale * w * p * others
    tiny = 2.0**-1022 / U64 * (keys + rows) * (1 + scale) * math.prod(1 + float(x.abs().max()) for x in (q, k, w, do))

    def by_key(weights: Tensor, right: Tensor) -> Tensor:
        return (weights.mT @ right.abs()).unflatten(1, (kv_heads, group)).sum(2)

    return {
        "dq": (c + keys + 2) * (ds @ k.abs().repeat_interleave(group, 1) + tiny),
        "dk": (c + rows + 2) * (by_key(ds, q) + tiny),
        "dv": (pi + rows + 1) * (by_key(p, do) + tiny),
    }


def near_golden(got: Gradients, inputs: Inputs, mask: Mask, error: float, scale: float | None = None) -> None:
    """Every element of every gradient is written, and each gradient near golden in its norm.

    A gradient of random inputs is a sum of terms of random signs, so that its norm is that of its terms, and rounding each of
    them to F adds at most u of it. A kernel that is FP32 inside has three such roundings on the longest way: O in delta, P or dS,
    and the output; one that stores every step eight: S, P, dP, delta, dS, a tile's sum, a group's and the output. A tile that is
    left out, one of n, is `n^(-1/2)` of the norm. With one key dS is 0, and what is left are the roundings of dP and delta.
    """
    q, k, v, do = inputs
    for name, exact in ExactBackward()(*inputs, mask, scale).tensors().items():
        mine, size = got.tensors().get(name), exact.norm()
        if name in ("dq", "dk") and k.shape[2] == 1:
            size = softmax_scale(q, scale) * do.norm() * v.norm() * (k if name == "dq" else q).norm()
        if mine is not None:
            assert mine.shape == exact.shape
            assert float((mine.double() - exact).norm()) <= error * size, name
    hidden = ~mask.seeing_rows(q.shape[0], q.shape[2], k.shape[2])
    for x in (got.dq, *(() if got.delta is None else (got.delta,))):
        assert bool((x.cpu().transpose(1, 2)[hidden] == 0).all()), "rows that see nothing"
