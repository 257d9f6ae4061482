"""How far below the maximum of its row a score can lie whose entry of P is 1, or is not 0, and whether any lies further."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from numdev.arithmetic.rounding import Cast
from numdev.attention.precision import Precision
from numdev.attention.softmax import Maximum, OnlineSoftmax

_FURTHEST = 1 << 14  # exp(-x) and 2^-x are 0 in FP64 long before


@lru_cache(maxsize=64)
def reach_of_one(precision: Precision, softmax: OnlineSoftmax) -> float | None:
    """How far below the maximum a score can lie whose P is 1, or further; None where rounding does not say.

    Casts that are not random are monotone, and so are exponentials down to where P falls below 1. Bisection finds this distance
    in FP64; twice the distance covers an exponential in another carrier and the rounding of `m` less the distance.
    """
    lags, patterned = maximum_lags(softmax), softmax.exp.share not in (0, 1)
    if precision.is_random or lags or patterned or softmax.maximum is Maximum.LOCAL:
        return None
    cast, near, far = precision.exponential, 0.0, 64.0

    def reaches_one(distance: float) -> bool:
        return float(cast(softmax.exp(cast(torch.tensor([[-distance]], dtype=torch.float64))))) >= 1.0

    if reaches_one(far):
        return None
    return 2 * _bisected(reaches_one, near, far)[1]


@lru_cache(maxsize=64)
def reach_of_zero(precision: Precision, softmax: OnlineSoftmax) -> float:
    """How far below the maximum a score can lie whose P, as it enters the second product, is not 0; or less far.

    Found as `reach_of_one` is, in the carrier; half the distance covers an exponential that is a polynomial for other columns. 0
    where rounding does not say: where it is random, or depends on other numbers of a tensor.
    """
    exponential, probabilities = precision.exponential, precision.probabilities
    if precision.is_random or not isinstance(probabilities, Cast):
        return 0.0

    def is_kept(distance: float) -> bool:
        p = exponential(softmax.exp(exponential(torch.tensor([[-distance]], dtype=precision.carrier))))
        return float(probabilities(p * softmax.p_scale)) > 0.0  # not NaN, which a distance beyond the format becomes

    return _bisected(is_kept, 0.0, float(_FURTHEST))[0] / 2 if is_kept(0.0) else 0.0


def keeps_every(precision: Precision, softmax: OnlineSoftmax, q: Tensor, k: Tensor, factor: float) -> bool:
    """Whether no entry of P that a row sees can be 0, since no score lies so far below the maximum of its row.

    A score is at most `max |q_i| max |k_j|` before it is scaled (Cauchy and Schwarz). A rounding, by any mode, makes it larger by
    a factor of at most `1 + 2 u` and by at most the smallest subnormal number; there is one after every `every` products and one
    after the scaling. Two scores lie at most twice as far apart as the largest lies from 0. False where that does not decide it,
    as for numbers that are not finite.
    """
    dot, head_dim = precision.scores, q.shape[-1]
    to = dot.accumulate.to
    if softmax.tie_shift is not None or to.listing is not None:
        return False
    roundings = 3 if dot.every is None else math.ceil(head_dim / dot.every) + 2
    largest = float(torch.linalg.vector_norm(q.detach(), dim=-1).amax() * torch.linalg.vector_norm(k.detach(), dim=-1).amax())
    grown = (1 + 2 * to.u) ** roundings
    product = largest * grown + roundings * to.min_subnormal
    score = product * abs(factor) * grown + to.min_subnormal
    return max(product, score) < to.max / 2 and 2 * score < reach_of_zero(precision, softmax)


def _bisected(holds: Callable[[float], bool], near: float, far: float) -> tuple[float, float]:
    """The ends of the shortest interval in which a predicate that holds at `near` begins to fail."""
    for _ in range(100):
        middle = (near + far) / 2
        near, far = (middle, far) if holds(middle) else (near, middle)
    return near, far


def maximum_lags(softmax: OnlineSoftmax) -> bool:
    """Whether the maximum that exponentials are taken from can be another number than the largest score."""
    return softmax.rescale_threshold > 0 or softmax.tie_shift is not None
