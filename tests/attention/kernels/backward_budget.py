"""How far the gradients of a kernel may be from golden on the same inputs: elementwise bounds from the formats of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.arithmetic.rounding import Cast
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from tests.budget import EXP32, U32
from tests.cases import reach


@dataclass(frozen=True)
class Bounds:
    """Absolute bounds on each element of the gradients."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor


def backward_budget(
    precision: BackwardPrecision, inputs: tuple[Tensor, Tensor, Tensor, Tensor], mask: Mask, scale: float, product: float = 0.0
) -> Bounds:
    """For policies that are FP32 but for inputs, P, dS and outputs, from O and LSE of golden, rounded to the output and to FP32.

    With u of FP32, A the `reach` of the scores, `D = max_ij sum_t |do_it| |v_jt|`, and sums of tensor cores that may truncate,
    which doubles u (Higham 2002, section 3.1); `product` is the relative error of one product (TF32):

    - A score is off by `(2 d + 4) u A + product A`; LSE, at most `A + log N`, is rounded when it is saved, when log2(e) is
      multiplied in, and with the difference: `4 u (2 A + log N)`. What is absolute in the exponent is relative in P: e, with
      EXP32.
    - dP is off by `((2 d + 2) u + product) D`. `|o_t| <= sum_j P_j |v_jt|`, so that delta is at most D too, and off by
      `(u_F + 2 (d + 2) u) D`: O was rounded to F. Their difference, at most 2 D, rounds by `2 u D`: g in all.
    - dS is off by `P (g + 2 D (e + 2 u + u_F))`, and by half the least subnormal of F where it underflows.
    - P enters with `P (e + u_F)`, and half a subnormal.
    - A sum of n products, tile by tile, adds `2 (n + 4) u + product` of the sum of magnitudes; the scale and the output round by
      `2 u` and `u_F`, with a subnormal each.

    Magnitudes are those of golden P, element by element.
    """
    q, k, v, do = (x.double().cpu() for x in inputs)
    group, dim, keys = q.shape[1] // k.shape[1], q.shape[-1], k.shape[-2]
    k, v = (mask.without_padding(x).repeat_interleave(group, 1) for x in (k, v))
    p = _probabilities(q, k, v, mask, scale)
    a, largest = reach(q, k, scale), float((do.abs() @ v.abs().mT).max())
    assert isinstance(precision.inputs, Cast)
    low = precision.ds.to
    rounds, subnormal = (0.0, 0.0) if low.mantissa_bits >= 23 else (low.u, low.min_subnormal)
    e = 1.01 * ((2 * dim + 4) * U32 * a + product * a + 4 * U32 * (2 * a + math.log(keys)) + EXP32)
    of_delta = (rounds + 2 * (dim + 2) * U32) * largest
    g = ((2 * dim + 2) * U32 + product + 2 * U32) * largest + of_delta
    ds = p * (1 + e) * (g + 2 * largest * (e + 2 * U32 + rounds)) + subnormal * (p > 0)
    size = 2 * p * largest

    def summed(error: Tensor, magnitude: Tensor, other: Tensor, terms: int) -> Tensor:
        return (error + magnitude * (2 * (terms + 4) * U32 + product)) @ other.abs()

    terms = group * q.shape[-2]
    dq = scale * summed(ds, size, k, keys)
    dk = scale * _grouped(summed(ds.mT, size.mT, q, terms), group)
    dv = _grouped(summed((p * (e + rounds) + subnormal * (p > 0)).mT, p.mT, do, terms), group)
    return Bounds(dq, dk, dv, of_delta * torch.ones(q.shape[:3], dtype=torch.float64))


def of_output(bound: Tensor, golden: Tensor, precision: BackwardPrecision) -> Tensor:
    """The bound after the rounding of the output, and of the scale before it."""
    to = precision.output.to
    return 1.01 * bound + (to.u + 2 * U32) * (golden.abs() + bound) + to.min_subnormal


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.unflatten(1, (-1, group)).sum(2)


def _probabilities(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    lse = Exact()(q, k, v, mask, scale).lse
    assert lse is not None
    p = (scale * q @ k.mT - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    visible = mask.visible(q.shape[-2], k.shape[-2], (0, q.shape[-2]), (0, k.shape[-2]), q.device)
    return p if visible is None else p.masked_fill(~visible, 0.0)
