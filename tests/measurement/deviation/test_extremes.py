"""Every metric over the whole range of FP64, subnormal numbers and the largest among them, against exact rational arithmetic.

A metric is right if it is the exact one within the bound of its sums, or if both lie beyond FP64 on the same side. Roots are by
mpmath with as many digits as FP64's range needs.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, FP32, FP64, Format
from numdev.measurement.deviation.metrics import Deviation
from numdev.measurement.deviation.sample import Scaled, exponent_of, shifted, wasserstein
from tests.cases import U64

LEAST = Fraction(1, 2**1074)
TOP = Fraction(2) ** 1024
ALL = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True)
SIZES = st.integers(-1074, 1023).flatmap(lambda e: st.floats(0.5, 1.0).map(lambda m: math.ldexp(m, e)))
EDGES = st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 1e-308, 1e-200, 1e200, 1e308, -1e308, 1.7976931348623157e308])
NUMBERS = st.one_of(ALL, SIZES, SIZES.map(lambda x: -x), EDGES)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12)
FORMATS = st.sampled_from([BF16, FP16, FP32, FP64])


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def split(pairs: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    return tensor([x for x, _ in pairs]), tensor([r for _, r in pairs])


def root(square: Fraction) -> Fraction:
    """The square root to 50 digits, exact otherwise."""
    with mpmath.workdps(50):
        found = mpmath.sqrt(mpmath.mpf(square.numerator) / mpmath.mpf(square.denominator))
        _, mantissa, exponent, _ = found._mpf_
    return Fraction(int(mantissa)) * Fraction(2) ** int(exponent)


def right(found: float, exact: Fraction, loose: Fraction) -> bool:
    """Within `loose` and one rounding to FP64, subnormal or infinite where the exact value is."""
    if math.isnan(found):
        return False
    if math.isinf(found):
        return abs(exact) + loose >= TOP * (1 - Fraction(1, 2**53)) and (found > 0) == (exact > 0)
    return abs(Fraction(found) - exact) <= loose + abs(exact) * Fraction(1, 2**52) + LEAST


@given(PAIRS, FORMATS)
def test_every_metric_is_the_exact_one(pairs: list[tuple[float, float]], fmt: Format) -> None:
    """A sum of n terms in FP64 is off by n u times the sum of their sizes; a difference, each square and each root by u more.

    Differences are halved where one of them is beyond FP64, which may cost half the smallest number: `LEAST` each.
    """
    found, n = Deviation.between(*split(pairs), fmt), len(pairs)
    loose = Fraction((2 * n + 12) * U64)
    x, r = [Fraction(a) for a, _ in pairs], [Fraction(b) for _, b in pairs]
    d = [a - b for a, b in zip(x, r, strict=True)]
    sizes = [abs(value) for value in d]
    largest, l1 = max(sizes), sum(sizes, Fraction())
    mean, square, top = sum(d, Fraction()) / n, root(sum((v * v for v in d), Fraction())), max(map(abs, r))
    away = [v * ((b > 0) - (b < 0)) for v, b in zip(d, r, strict=True)]
    bias, scale = sum(away, Fraction()) / n, l1 / n
    assert right(found.max_difference, largest, loose * largest)
    assert right(found.mean, mean, loose * scale)
    assert right(found.mean_absolute, l1 / n, loose * scale)
    assert right(found.bias, bias, loose * scale)
    rmse = square / root(Fraction(n))
    assert right(found.rmse, rmse, loose * rmse)
    spread = root(sum(((v - mean) ** 2 for v in d), Fraction()) / n)
    # The mean is off by `loose * scale`, and each deviation from it by as much; a root of a sum of squares follows.
    assert right(found.std, spread, 2 * loose * (spread + scale + rmse))
    spread = root(sum(((v - bias) ** 2 for v in away), Fraction()) / n) / root(Fraction(n))
    assert right(found.bias_error, spread, 2 * loose * (spread + scale + rmse))
    norm, l1_r = root(sum((v * v for v in r), Fraction())), sum(map(abs, r), Fraction())
    for value, over, under in ((found.relative_frobenius, square, norm), (found.relative_l1, l1, l1_r)):
        assert quotient(value, over, under, loose)
    assert quotient(found.max_u, largest, top / 2**fmt.precision, loose)
    ulps = [size / ulp(fmt, b) for size, b in zip(sizes, r, strict=True)]
    assert right(found.max_ulp, max(ulps), loose * max(ulps) + LEAST / min(ulp(fmt, b) for b in r))
    bits = 53.0 if largest == 0 else 0.0 if top == 0 else min(53.0, max(0.0, float(mpmath.log(ratio(top, largest), 2))))
    assert found.agreement_bits == pytest.approx(bits, rel=1e-12, abs=1e-12)
    assert found.equal_share == 1 - sum(v != 0 for v in d) / n
    assert found.is_finite


def ratio(a: Fraction, b: Fraction) -> mpmath.mpf:
    found = a / b
    return mpmath.mpf(found.numerator) / mpmath.mpf(found.denominator)


def quotient(found: float, over: Fraction, under: Fraction, loose: Fraction) -> bool:
    if under == 0:
        return found == (math.inf if over > 0 else 0.0)
    return right(found, over / under, loose * over / under)


def ulp(fmt: Format, r: Fraction) -> Fraction:
    """The spacing at r, found by comparing with powers of two."""
    exponent = fmt.emin
    if r:
        exponent = abs(r.numerator).bit_length() - r.denominator.bit_length()
        exponent -= Fraction(2) ** exponent > abs(r)
        exponent = min(max(exponent, fmt.emin), fmt.emax)
    return Fraction(2) ** (exponent - fmt.mantissa_bits)


@given(PAIRS)
def test_the_cosine_is_the_exact_one(pairs: list[tuple[float, float]]) -> None:
    """Products of scaled numbers may fall below FP64 where they are 2^-1022 of the largest: nothing beside n u."""
    found, n = Deviation.between(*split(pairs), FP32), len(pairs)
    x, r = [Fraction(a) for a, _ in pairs], [Fraction(b) for _, b in pairs]
    norms = [sum((v * v for v in side), Fraction()) for side in (x, r)]
    if 0 in norms:
        assert found.cosine_similarity == float(norms[0] == norms[1])
        return
    exact = sum((a * b for a, b in zip(x, r, strict=True)), Fraction()) / (root(norms[0]) * root(norms[1]))
    assert abs(Fraction(found.cosine_similarity) - exact) <= (4 * n + 12) * Fraction(U64)


@given(PAIRS)
def test_the_percentiles_lie_between_their_neighbours(pairs: list[tuple[float, float]]) -> None:
    found = Deviation.between(*split(pairs), FP32)
    sizes = sorted(abs(Fraction(a) - Fraction(b)) for a, b in pairs)
    for name, percent in (("p50", 500), ("p90", 900), ("p99", 990), ("p99_9", 999)):
        place = Fraction(percent * (len(sizes) - 1), 1000)
        below = int(place)
        low, high = sizes[below], sizes[min(below + 1, len(sizes) - 1)]
        exact = low + (high - low) * (place - below)
        # The place is rounded, by at most 3 u n, and so moves between its neighbours; three roundings follow.
        assert right(getattr(found, name), exact, (6 + 3 * len(sizes)) * Fraction(U64) * high), name


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.lists(NUMBERS, min_size=1, max_size=8))
def test_wasserstein_is_the_area_between_two_distribution_functions(x: list[float], y: list[float]) -> None:
    """Each of at most n + m terms is a product of a difference of shares and a difference of values, both rounded."""
    ends = sorted({Fraction(v) for v in x + y})
    area = Fraction()
    for low, high in pairwise(ends):
        share = Fraction(sum(v <= low for v in map(Fraction, x)), len(x)) - Fraction(
            sum(v <= low for v in map(Fraction, y)), len(y)
        )
        area += abs(share) * (high - low)
    # A difference of shares is off by 2 u absolutely, of which the range of the values makes an area.
    loose = Fraction((2 * (len(x) + len(y)) + 12) * U64) * (area + ends[-1] - ends[0]) + (len(x) + len(y)) * LEAST
    assert right(wasserstein(tensor(x), tensor(y)), area, loose)


@pytest.mark.parametrize(
    ("x", "r"), [([1e200, 2e200], [1e200, 1e200]), ([1e-200], [2e-200]), ([5e-324, 0.0], [0.0, 5e-324]), ([1e308], [-1e308])]
)
def test_no_metric_is_nan(x: list[float], r: list[float]) -> None:
    found = Deviation.between(tensor(x), tensor(r), FP32)
    assert not [name for name, value in found.metrics().items() if math.isnan(value)]


def test_agreement_where_the_ratio_underflows() -> None:
    found = Deviation.between(tensor([1e300 + 0.0, 5e-324]), tensor([1e300, 0.0]), FP32)
    assert (found.agreement_bits, found.relative_frobenius, found.max_u) == (53.0, 0.0, 0.0)


@given(NUMBERS, st.integers(-2200, 2200))
def test_a_scaled_number_is_rounded_once(number: float, exponent: int) -> None:
    exact = Fraction(number) * Fraction(2) ** exponent
    assert right(float(Scaled(number, exponent)), exact, Fraction(0))


@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_shifting_brings_the_largest_near_one(values: list[float]) -> None:
    largest = max(map(abs, values))
    exponent = exponent_of(largest)
    moved = shifted(tensor(values), -exponent)
    if exponent == 0:
        assert largest == 0 or 2.0**-401 <= largest <= 2.0**400
        assert torch.equal(moved, tensor(values))
    else:
        assert 0.5 <= float(moved.abs().max()) < 1.0
    for before, after in zip(values, moved.tolist(), strict=True):
        assert right(after, Fraction(before) / Fraction(2) ** exponent, LEAST)
