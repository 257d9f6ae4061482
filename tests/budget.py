"""How far a kernel may be from golden on the same inputs: a bound from the formats of its steps, not a flat tolerance."""

from __future__ import annotations

import math

from torch import Tensor

from numdev.arithmetic.rounding import Cast
from numdev.attention.precision import Precision
from numdev.attention.softmax import OnlineSoftmax
from tests.cases import reach

U32 = 2.0**-24
EXP32 = 4 * U32  # the hardware's exponential: 2 ulp of FP32 (CUDA C++ Programming Guide, ex2.approx), and its argument's rounding


def kernel_budget(
    precision: Precision, softmax: OnlineSoftmax, q: Tensor, k: Tensor, v: Tensor, scale: float, tiles: int, product: float = 0.0
) -> tuple[float, float]:
    """Absolute bounds on the errors of `out` and LSE, for policies whose S, m, l, alpha and O are FP32.

    A score is a sum of d exact products in FP32 in any order, scaled: `(d + 2) u A`, A being `reach` (Higham 2002, section
    3.1); tensor cores may truncate while they add, which doubles u. `product` is the relative error of one product (TF32
    rounds both operands). S - m rounds once more, by `2 u A`, and so does log2(e) folded into the scale. What is absolute in
    the exponent is relative in P: `e = (2 d + 8) u A + product A + EXP32`. Each tile's alpha carries the same and two
    roundings. P is rounded to its format, `u_P`; where it underflows there it is off by half the least subnormal, relative
    to a row sum of at least 1. Sums of N terms and of the tiles' O add `2 (N + 2 tiles) u`. Numerator and denominator both:
    twice the common part. The output rounds by `u_F`, and every part is relative to `max |v|`.
    """
    dim, keys = q.shape[-1], k.shape[-2]
    a = reach(q.double().cpu(), k.double().cpu(), scale)
    exponent = (2 * dim + 8) * U32 * a + product * a + EXP32
    lazy = 2.0**softmax.rescale_threshold  # P may exceed 1 by as much, and l with it
    entry = exponent * (1 + tiles) + 2 * tiles * U32
    sums = 2 * (keys + 2 * tiles) * U32
    assert isinstance(precision.probabilities, Cast)
    p = precision.probabilities.to
    cast = 0.0 if p.mantissa_bits >= 23 else p.u + keys * p.min_subnormal / (2 * softmax.p_scale) + 2 * product
    relative = 2 * (entry + sums) * math.exp(min(entry, 1.0)) + cast * (1 + entry)
    largest = float(v.double().abs().max())
    out = precision.output.to
    absolute = largest * (relative * 1.01 + out.u * (1 + relative)) + out.min_subnormal
    return absolute, entry + sums + 2 * U32 * (a + math.log(keys) + math.log(lazy)) + exponent
