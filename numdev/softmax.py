"""The online softmax recurrence and its variants: when to normalise, which exponential, when to rescale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.errors import BadInput


class Normalise(Enum):
    """When the accumulator is divided by the row sum."""

    EACH = "each"  # after every tile: FlashAttention-1, Algorithm 1, line 12
    END = "end"  # once: FlashAttention-2, section 3.1


class Maximum(Enum):
    """Which maximum the exponentials of a tile are taken from."""

    RUNNING = "running"  # P = exp(S - m'), the maximum so far: FlashAttention-2, Algorithm 1, line 9
    LOCAL = "local"  # P = exp(S - rowmax S), then times exp(rowmax S - m'): FlashAttention-1, Algorithm 1, lines 10 to 12


class Exponential(Enum):
    """How `exp(S - m)` is computed. All but `EXP` work on scores that carry a folded factor log2(e)."""

    EXP = "exp"
    EXP2 = "exp2"
    POLYNOMIAL_1 = "exp2_poly1"
    POLYNOMIAL_2 = "exp2_poly2"
    POLYNOMIAL_3 = "exp2_poly3"
    POLYNOMIAL_4 = "exp2_poly4"
    POLYNOMIAL_5 = "exp2_poly5"

    @property
    def is_binary(self) -> bool:
        """Whether scores and maxima are in units of log 2."""
        return self is not Exponential.EXP

    @property
    def degree(self) -> int | None:
        """Of the polynomial, where there is one."""
        return int(self.value[-1]) if self.value.startswith("exp2_poly") else None

    def __call__(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """e^x, or 2^x, in the carrier of `x`, in place where it can be."""
        degree = self.degree
        return self.exact(x) if degree is None else exp2_polynomial(x, EXP2_MINIMAX[degree].coefficients)

    def exact(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The same to the carrier's accuracy, never by a polynomial of low degree."""
        return exp2(x) if self.is_binary else x.exp_()


class ScaleOn(Enum):
    """Where the softmax scale (and log2(e), if folded) is applied."""

    SCORES = "scores"
    QUERIES = "queries"  # once to q, which is rounded to the format of the inputs again


@dataclass(frozen=True)
class Minimax:
    """A polynomial for 2^f on [0, 1), lowest power first, and its largest relative error there."""

    coefficients: tuple[float, ...]
    relative_error: float


EXP2_MINIMAX = {
    # Derived by experiments/exp2_minimax.py (Remez exchange on the relative error).
    1: Minimax((0.9701787941914296, 0.9701787941914296), 2.9822e-02),
    2: Minimax((1.001724763214745, 0.6576362757360772, 0.3371894346196878), 1.7249e-03),
    3: Minimax((0.9999252185627103, 0.6958335404948242, 0.2260671554272482, 0.07802452264063797), 7.4782e-05),
    4: Minimax(
        (1.0000025933706944, 0.6930038344699749, 0.24144275689150807, 0.05201146061030688, 0.013534167916127089),
        2.5935e-06,
    ),
    5: Minimax(
        (
            0.9999999250635262,
            0.693153073200169,
            0.24015361704437535,
            0.05582631805329582,
            0.008989340090494529,
            0.0018775766751915242,
        ),
        7.4937e-08,
    ),
}


def exp2(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`2^x = 2^n e^((x - n) log 2)` in the carrier, with `n` the whole number nearest to `x`.

    The relative error is below 1.5 ulp of the carrier, and 0 for whole `x`. torch's own exp2 computes the last elements
    of a CPU tensor by other code than the rest, so its result would depend on an element's place; its exp does not.
    """
    whole = x.round()
    fraction = torch.where(x.isinf(), 0.0, x - whole)  # exact: |x - n| <= 1/2
    return fraction.mul_(math.log(2)).exp_().mul_(torch.exp2(whole))


def exp2_polynomial(x: Float[Tensor, "*shape"], coefficients: tuple[float, ...]) -> Float[Tensor, "*shape"]:
    """`2^x = 2^floor(x) p(x - floor(x))` by Horner's rule in the carrier (FlashAttention-4, section 3).

    `2^floor(x)` underflows to zero below the carrier's range; `-inf` gives 0 and NaN stays NaN.
    """
    whole = x.floor()
    fraction = torch.where(x.isneginf(), 0.0, x - whole)
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(fraction).add_(coefficient)
    return value * torch.exp2(whole)


@dataclass(frozen=True)
class OnlineSoftmax:
    """The recurrence `m, l, O -> m', l', O'` over KV tiles.

    Attributes:
        normalise: see `Normalise`.
        maximum: see `Maximum`. FlashAttention-1 is `EACH` with `LOCAL`, FlashAttention-2 `END` with `RUNNING`.
        exp: see `Exponential`.
        scale_on: see `ScaleOn`.
        rescale_threshold: keep the old maximum, and so skip the rescale, unless the new one exceeds it by more than this,
            in units of log 2 (FlashAttention-4 takes 8). 0 always follows the maximum.
        p_scale: P is multiplied by this before its cast and the product divided by it: 256 uses more of E4M3's
            range (FA3), 127 is for INT8. Powers of two are exact.
        tie_shift: `beta`: where several scores of a row tie for a positive maximum, shift by `beta m` instead of `m`, and by
            0 instead of a negative tied maximum (Qiu & Yao 2025, arXiv 2510.04212, section 4). None leaves ties alone. The
            product is rounded to the format of the scores.
    """

    normalise: Normalise = Normalise.END
    maximum: Maximum = Maximum.RUNNING
    exp: Exponential = Exponential.EXP
    scale_on: ScaleOn = ScaleOn.SCORES
    rescale_threshold: float = 0.0
    p_scale: float = 1.0
    tie_shift: float | None = None

    def __post_init__(self) -> None:
        if not (self.rescale_threshold >= 0 and math.isfinite(self.rescale_threshold)):
            raise BadInput("softmax.rescale_threshold", self.rescale_threshold, "give a finite number of at least 0")
        if not (self.p_scale > 0 and math.isfinite(self.p_scale)):
            raise BadInput("softmax.p_scale", self.p_scale, "give a positive finite factor, such as 256")
        if self.tie_shift is not None and not 1 < self.tie_shift < math.inf:
            raise BadInput("softmax.tie_shift", self.tie_shift, "give a finite factor above 1 (Qiu & Yao take 2 to 8), or null")

    @property
    def log_scale(self) -> float:
        """What the softmax scale is multiplied by: log2(e) where it is folded in for a binary exponential."""
        return math.log2(math.e) if self.exp.is_binary else 1.0

    @property
    def threshold(self) -> float:
        """`rescale_threshold` in the units of the scores."""
        return self.rescale_threshold if self.exp.is_binary else self.rescale_threshold * math.log(2)

    def largest(self, scores: Float[Tensor, "*rows keys"], times_beta: Callable[[Tensor], Tensor]) -> Float[Tensor, "*rows 1"]:
        """`rowmax S` of one tile, shifted by `times_beta` where it is tied and the tie shift is on."""
        largest = scores.amax(-1, keepdim=True)
        if self.tie_shift is None:
            return largest
        tied = (scores == largest).sum(-1, keepdim=True) > 1
        shifted = torch.where(largest > 0, times_beta(largest.clone()), largest.clamp(min=0))
        return torch.where(tied & largest.isfinite(), shifted, largest)

    def running(self, m: Float[Tensor, "*rows 1"], largest: Float[Tensor, "*rows 1"]) -> Float[Tensor, "*rows 1"]:
        """`m' = max(m, rowmax S)`, with the lazy threshold where it is on."""
        if self.threshold == 0:
            return torch.maximum(m, largest)
        return torch.where(largest - m > self.threshold, largest, m)  # -inf - -inf is NaN: such a row keeps -inf
