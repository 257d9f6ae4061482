"""How far the gradients of a kernel may be from golden on the same inputs: elementwise bounds from the formats of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.arithmetic.rounding import Cast
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision
from tests.budget import EXP32, U32
from tests.cases import reach


@dataclass(frozen=True)
class Left:
    """How far a forward pass's own O and LSE are from golden ones, absolutely, beyond the roundings of these; tiles of each pass.

    `query_tiles` and `key_tiles` are how often the running sums of dK and dV, and of dQ, are rounded to their format.
    """

    out: float = 0.0
    lse: float = 0.0
    query_tiles: int = 1
    key_tiles: int = 1


OF_GOLDEN = Left()


@dataclass(frozen=True)
class Bounds:
    """Absolute bounds on each element of the gradients."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor


def backward_budget(
    precision: BackwardPrecision,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Mask,
    scale: float,
    product: float = 0.0,
    left: Left = OF_GOLDEN,
) -> Bounds:
    """For policies that are FP32 but for inputs, P, dS, running sums and outputs, from O and LSE of golden, rounded to the output
    and to FP32, or from others that are as far from them as `left` says.

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
    - A running sum that is kept in a narrower format rounds by its u at each tile, and by a subnormal.
    - An O that is off by `left.out` moves delta by at most `max_i sum_t |do_it|` times that; an LSE is in the exponent.

    Magnitudes are those of golden P, element by element.
    """
    q, k, v, do = (x.double().cpu() for x in inputs)
    group, dim, keys = q.shape[1] // k.shape[1], q.shape[-1], k.shape[-2]
    k, v = (mask.without_padding(x).repeat_interleave(group, 1) for x in (k, v))
    p = probabilities(q, k, v, mask, scale)
    a, largest = reach(q, k, scale), float((do.abs() @ v.abs().mT).max())
    assert isinstance(precision.inputs, Cast)
    low = precision.ds.to
    rounds, subnormal = (0.0, 0.0) if low.mantissa_bits >= 23 else (low.u, low.min_subnormal)
    e = 1.01 * (left.lse + (2 * dim + 4) * U32 * a + product * a + 4 * U32 * (2 * a + math.log(keys)) + EXP32)
    of_delta = (rounds + 2 * (dim + 2) * U32) * largest + left.out * float(do.abs().sum(-1).max())
    g = ((2 * dim + 2) * U32 + product + 2 * U32) * largest + of_delta
    ds = p * (1 + e) * (g + 2 * largest * (e + 2 * U32 + rounds)) + subnormal * (p > 0)
    entering = p * (e + rounds) + subnormal * (p > 0)
    return assembled(precision, Errors(p, ds, entering, largest, of_delta), (q, k, do, group), scale, left, product)


@dataclass(frozen=True)
class Errors:
    """Golden P, bounds on the errors of dS and of P as they enter their products, the largest dP, and the error of delta."""

    p: Tensor
    ds: Tensor
    entering: Tensor
    largest: float
    delta: float


def assembled(
    precision: BackwardPrecision,
    errors: Errors,
    inputs: tuple[Tensor, Tensor, Tensor, int],
    scale: float,
    left: Left = OF_GOLDEN,
    product: float = 0.0,
) -> Bounds:
    """The bounds on the gradients before their output; `inputs` are q, k of every head, do, and the heads of a group."""
    q, k, do, group = inputs
    size, terms = 2 * errors.p * errors.largest, group * q.shape[-2]

    def summed(error: Tensor, magnitude: Tensor, other: Tensor, terms: int, kept: Cast, tiles: int) -> Tensor:
        u, least = (0.0, 0.0) if kept.to.mantissa_bits >= 23 else (tiles * kept.to.u, tiles * kept.to.min_subnormal)
        return (error * (1 + u) + magnitude * (2 * (terms + 4) * U32 + product + u)) @ other.abs() + least

    dq = scale * summed(errors.ds, size, k, k.shape[-2], precision.dq_sum, left.key_tiles)
    dk = scale * _grouped(summed(errors.ds.mT, size.mT, q, terms, precision.dk_sum, left.query_tiles), group)
    dv = _grouped(summed(errors.entering.mT, errors.p.mT, do, terms, precision.dv_sum, left.query_tiles), group)
    return Bounds(dq, dk, dv, errors.delta * torch.ones(q.shape[:3], dtype=torch.float64))


def of_output(bound: Tensor, golden: Tensor, precision: BackwardPrecision) -> Tensor:
    """The bound after the rounding of the output, and of the scale before it."""
    to = precision.output.to
    return 1.01 * bound + (to.u + 2 * U32) * (golden.abs() + bound) + to.min_subnormal


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.unflatten(1, (-1, group)).sum(2)


def probabilities(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    lse = Exact()(q, k, v, mask, scale).lse
    assert lse is not None
    p = (scale * q @ k.mT - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    visible = mask.visible(q.shape[-2], k.shape[-2], (0, q.shape[-2]), (0, k.shape[-2]), q.device)
    return p if visible is None else p.masked_fill(~visible, 0.0)
