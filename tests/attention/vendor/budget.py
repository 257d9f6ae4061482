"""How far the gradients of autograd, which stores P, may be from golden on the same inputs."""

from __future__ import annotations

import math

from torch import Tensor

from numdev.arithmetic.rounding import Cast
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision
from tests.attention.kernels.backward_budget import Bounds, Errors, assembled, probabilities
from tests.budget import EXP32, U32
from tests.cases import reach


def stored_budget(
    precision: BackwardPrecision, inputs: tuple[Tensor, Tensor, Tensor, Tensor], mask: Mask, scale: float
) -> Bounds:
    """For `P = softmax(S)` stored in the format of `probabilities`, S and dP rounded to those of their products.

    With u of FP32, U that of S, A the `reach`, `D = max_ij sum_t |do_it| |v_jt|`, and the sums of a library in any order:

    - S is off by `(2 d + 6) u A`, both operands being multiplied by a root of the scale in one of the libraries, and by `2 U A`:
      it is rounded as a product and again when it is scaled. `S - m` rounds by `2 u A`. All is absolute in the exponent: t, with
      EXP32. P is a quotient of such exponentials and their sum: off by `exp(2 t) - 1 + 2 (N + 4) u` of it, then stored: e.
    - dP is off by `(2 d u + U_dP) D`, and `delta = rowsum(dP * P)` by that, by `e D` and by `2 (N + 4) u D`. Their difference, at
      most 2 D, rounds by `2 u D`: g in all.
    - dS is off by `P (1 + e) (g + 2 D (e + 2 u + u_dS))`; scaled or not before it is stored, which rounds once more.
    - Each product rounds to the format of its result, and is scaled after it: what `dq_sum` and the others say.
    - A stored number below the least normal one is off by the least subnormal, wherever one is stored.
    """
    q, k, v, do = (x.double().cpu() for x in inputs)
    group, dim, keys = q.shape[1] // k.shape[1], q.shape[-1], k.shape[-2]
    k, v = (mask.without_padding(x).repeat_interleave(group, 1) for x in (k, v))
    p = probabilities(q, k, v, mask, scale)
    a, largest = reach(q, k, scale), float((do.abs() @ v.abs().mT).max())
    low, least = _rounding(precision.probabilities)
    t = ((2 * dim + 8) * U32 + 2 * _rounding(precision.scores.accumulate)[0]) * a + EXP32
    e = (math.expm1(2 * t) + 2 * (keys + 4) * U32) * (1 + low) + low
    dp = (2 * dim * U32 + _rounding(precision.dp.accumulate)[0]) * largest
    delta = dp * (1 + e) + (e + 2 * (keys + 4) * U32 + keys * least) * largest
    g = dp + delta + 2 * U32 * 2 * largest
    ds = p * (1 + e) * (g + 2 * largest * (e + 2 * U32 + 2 * low)) + 2 * least * (1 + 2 * largest)
    return assembled(precision, Errors(p, ds, p * e + least, largest, delta), (q, k, do, group), scale)


def _rounding(cast: Cast) -> tuple[float, float]:
    """Unit roundoff beyond that of FP32, and the least subnormal."""
    return (0.0, 0.0) if cast.to.mantissa_bits >= 23 else (cast.to.u, cast.to.min_subnormal)
