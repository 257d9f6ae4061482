"""Every metric against NumPy, SciPy, exact sums and tables of values; NaN and Inf are counted, never averaged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy.stats import wasserstein_distance
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, FP64, Format
from numdev.attention.naive import NaiveBackward
from numdev.attention.operation import ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Distribution, Kind, Problem, Shape
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput
from numdev.measurement.deviation import COLUMNS, Deviations
from numdev.measurement.metrics import (
    DIRECTED,
    METRICS,
    NONFINITE,
    Deviation,
    Direction,
    Sample,
    compare,
    largest_singular,
    wasserstein,
)
from numdev.measurement.runner import Runner
from numdev.results.record import Record
from tests.cases import U64

INF, NAN = math.inf, math.nan

# Multiples of 2^-10 below 2^20: no square of them, nor that of a difference, nears either end of FP64.
NUMBERS = st.integers(-(2**30), 2**30).map(lambda k: k / 1024)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40)
ANY = st.one_of(NUMBERS, st.sampled_from([NAN, INF, -INF]))


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def split(pairs: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    return tensor([x for x, _ in pairs]), tensor([r for _, r in pairs])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [4, 1000, 1 << 17])
def test_of_several_largest_the_first_is_told(count: int) -> None:
    r = normal(count)
    x = r.clone()
    x[count // 2 :] += 0.5 * (-1.0) ** torch.arange(count - count // 2)
    x[count // 2], x[-1], r[count // 2], r[-1] = 1.0, -1.0, 0.0, 0.0
    assert Deviation.between(x, r, FP32).max_index == (count // 2,)


@given(PAIRS)
def test_a_comparison_changes_neither_side(pairs: list[tuple[float, float]]) -> None:
    x, r = map(Sample, split(pairs))
    before = [each.clone() for each in (x.values, r.values, x.ordered, r.ordered, r.ulp(BF16))]
    assert compare(x, r, BF16) == compare(x, r, BF16)
    assert all(map(torch.equal, before, (x.values, r.values, x.ordered, r.ordered, r.ulp(BF16))))


@given(st.lists(ANY, min_size=1, max_size=20), st.sampled_from([BF16, FP16, E4M3FN, FP32, FP64]))
def test_nothing_deviates_from_itself(values: list[float], fmt: Format) -> None:
    x = tensor([v for v in values if not math.isnan(v)] or [1.0])
    deviation = Deviation.between(x, x.clone(), fmt)
    free = {"max_value", "max_reference", "cosine_similarity", "agreement_bits", "equal_share", "both_inf_count", "compared"}
    assert {name: value for name, value in deviation.metrics().items() if name not in free and value != 0} == {}
    assert deviation.max_value == deviation.max_reference
    # x.x / ||x||^2: the product, the two norms and the division, n terms each.
    assert deviation.cosine_similarity == pytest.approx(1.0, rel=0, abs=(2 * len(values) + 4) * U64)
    assert deviation.agreement_bits == 53.0
    assert deviation.equal_share == 1.0
    assert deviation.is_finite


def kind(pair: tuple[float, float]) -> str:
    """Whose fault a place is; `compared` where it is nobody's."""
    x, r = pair
    if math.isnan(x) and math.isnan(r):
        return "both_nan_count"
    if math.isnan(x) or math.isnan(r):
        return "nan_count" if math.isnan(x) else "reference_nan_count"
    if x == r and math.isinf(x):
        return "both_inf_count"
    if math.isinf(x):
        return "inf_count"
    return "reference_inf_count" if math.isinf(r) else "compared"


@given(st.lists(st.tuples(ANY, ANY, st.booleans()), min_size=1, max_size=20))
def test_nan_and_inf_are_counted_and_left_out(triples: list[tuple[float, float, bool]]) -> None:
    """As is what the caller leaves out. The rest of the metrics are those of the other pairs alone, bit for bit."""
    pairs = [(x, r) for x, r, _ in triples]
    x, r = split(pairs)
    deviation = compare(Sample(x), Sample(r), FP32, torch.tensor([left for _, _, left in triples]))
    kinds, counts = Counter(map(kind, pairs)), {*NONFINITE, "both_inf_count"}
    assert {name: getattr(deviation, name) for name in counts} == {name: kinds[name] for name in counts}
    assert deviation.is_finite == (not kinds.keys() & set(NONFINITE))
    finite = [(x, r) for x, r, left in triples if math.isfinite(x) and math.isfinite(r) and not left]
    assert deviation.compared == len(finite)
    rest = {name: value for name, value in deviation.metrics().items() if name not in {*counts, "compared"}}
    if finite:
        alone = Deviation.between(*split(finite), FP32).metrics()
        assert rest == {name: alone[name] for name in rest}
        assert triples[deviation.max_index[0]] == (deviation.max_value, deviation.max_reference, False)
    elif bool((x == r).all()):
        assert deviation.max_difference == deviation.wasserstein == deviation.max_ulp == 0.0
        assert (deviation.cosine_similarity, deviation.agreement_bits) == (1.0, 53.0)
    else:
        assert all(math.isnan(value) for value in rest.values())
        assert deviation.max_index == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_narrow_tensor_is_compared_in_fp64_and_its_largest_error_is_told_with_its_place(dtype: torch.dtype) -> None:
    r = normal(5, 1, 7)
    x = r.to(dtype)
    x[0, 0, 0] = NAN
    deviation = Deviation.between(x, r, FP32)
    assert str(deviation) == str(Deviation.between(x.double(), r, FP32))
    assert (float(x[deviation.max_index]), float(r[deviation.max_index])) == (deviation.max_value, deviation.max_reference)
    assert deviation.max_difference == float((x.double() - r).abs().nan_to_num(-1).max()) > 0
    assert list(deviation.metrics()) == list(METRICS)
    assert deviation._repr_html_().count("<tr>") == len(METRICS) + 2


@pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((6,), (2, 3)), ((0,), (0,)), ((2, 0), (2, 0))])
def test_shapes_that_differ_or_hold_nothing_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    between: Callable[..., Deviation] = getattr(Deviation.between, "__wrapped__", Deviation.between)  # past the shape checker
    with pytest.raises(BadInput, match="^reference: ") as caught:
        between(torch.zeros(shapes[0]), torch.zeros(shapes[1]), FP32)
    assert caught.value.field == "reference"


SAMPLES = st.lists(st.floats(-1.0, 1.0, allow_nan=False), min_size=1, max_size=50)


@given(SAMPLES, SAMPLES)
def test_wasserstein_equals_scipy_for_any_counts(x: list[float], y: list[float]) -> None:
    """The specification's 1e-12, for values of size 1: both sum at most 100 terms of at most 2, 2 * 100 * 2 u = 4.4e-14."""
    assert abs(wasserstein(tensor(x), tensor(y)) - wasserstein_distance(x, y)) <= 1e-12
    assert wasserstein(tensor(x), tensor(x)) == 0.0
    assert wasserstein(tensor(x), tensor(y)) == wasserstein(tensor(y), tensor(x))


@pytest.mark.parametrize("bad", [[], [NAN], [1.0, NAN], [INF, 0.0], [-INF, 0.0]])
def test_wasserstein_refuses_nothing_and_nan(bad: list[float]) -> None:
    for x, y in ((bad, [1.0]), ([1.0, 2.0], bad)):
        with pytest.raises(BadInput, match="^sample: "):
            wasserstein(tensor(x), tensor(y))


# Every metric over the whole range of FP64, subnormal numbers and the largest among them, against exact rational arithmetic.
# A metric is right if it is the exact one within the bound of its sums, or if both lie beyond FP64 on the same side.
LEAST = Fraction(1, 2**1074)
TOP = Fraction(2) ** 1024
ALL = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True)
SIZES = st.integers(-1074, 1023).flatmap(lambda e: st.floats(0.5, 1.0).map(lambda m: math.ldexp(m, e)))
EDGES = st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 1e-308, 1e-200, 1e200, 1e308, -1e308, 1.7976931348623157e308])
WIDE = st.one_of(ALL, SIZES, SIZES.map(lambda x: -x), EDGES)
WIDE_PAIRS = st.lists(st.tuples(WIDE, WIDE), min_size=1, max_size=12)
FORMATS = st.sampled_from([BF16, FP16, E4M3FN, FP32, FP64])


def root(square: Fraction) -> Fraction:
    """The square root to 50 digits, exact otherwise."""
    with mpmath.workdps(50):
        result = mpmath.sqrt(mpmath.mpf(square.numerator) / mpmath.mpf(square.denominator))
        _, mantissa, exponent, _ = result._mpf_
    return Fraction(int(mantissa)) * Fraction(2) ** int(exponent)


def right(value: float, exact: Fraction, loose: Fraction) -> bool:
    """Within `loose` and one rounding to FP64, subnormal or infinite where the exact value is."""
    if math.isnan(value):
        return False
    if math.isinf(value):
        return abs(exact) + loose >= TOP * (1 - Fraction(1, 2**53)) and (value > 0) == (exact > 0)
    return abs(Fraction(value) - exact) <= loose + abs(exact) * Fraction(1, 2**52) + LEAST


@given(WIDE_PAIRS, FORMATS)
def test_every_metric_is_the_exact_one(pairs: list[tuple[float, float]], fmt: Format) -> None:
    """A sum of n terms in FP64 is off by n u times the sum of their sizes; a difference, each square and each root by u more.

    Differences are halved where one of them is beyond FP64, which may cost half the smallest number: `LEAST` each.
    """
    deviation, n = Deviation.between(*split(pairs), fmt), len(pairs)
    loose = Fraction((2 * n + 12) * U64)
    x, r = [Fraction(a) for a, _ in pairs], [Fraction(b) for _, b in pairs]
    d = [a - b for a, b in zip(x, r, strict=True)]
    sizes = [abs(value) for value in d]
    largest, l1 = max(sizes), sum(sizes, Fraction())
    mean, square, top = sum(d, Fraction()) / n, root(sum((v * v for v in d), Fraction())), max(map(abs, r))
    away = [v * ((b > 0) - (b < 0)) for v, b in zip(d, r, strict=True)]
    bias, scale = sum(away, Fraction()) / n, l1 / n
    assert right(deviation.max_difference, largest, loose * largest)
    assert right(deviation.mean, mean, loose * scale)
    assert right(deviation.mean_absolute, l1 / n, loose * scale)
    assert right(deviation.bias, bias, loose * scale)
    rmse = square / root(Fraction(n))
    assert right(deviation.rmse, rmse, loose * rmse)
    spread = root(sum(((v - mean) ** 2 for v in d), Fraction()) / n)
    # The mean is off by `loose * scale`, and each deviation from it by as much; a root of a sum of squares follows.
    assert right(deviation.std, spread, 2 * loose * (spread + scale + rmse))
    spread = root(sum(((v - bias) ** 2 for v in away), Fraction()) / n) / root(Fraction(n))
    assert right(deviation.bias_error, spread, 2 * loose * (spread + scale + rmse))
    norm, l1_r = root(sum((v * v for v in r), Fraction())), sum(map(abs, r), Fraction())
    for value, over, under in ((deviation.relative_frobenius, square, norm), (deviation.relative_l1, l1, l1_r)):
        assert quotient(value, over, under, loose)
    assert quotient(deviation.max_u, largest, top / 2**fmt.precision, loose)
    ulps = [size / ulp(fmt, b) for size, b in zip(sizes, r, strict=True)]
    assert right(deviation.max_ulp, max(ulps), loose * max(ulps) + LEAST / min(ulp(fmt, b) for b in r))
    bits = 53.0 if largest == 0 else 0.0 if top == 0 else min(53.0, max(0.0, float(mpmath.log(ratio(top, largest), 2))))
    assert deviation.agreement_bits == pytest.approx(bits, rel=1e-12, abs=1e-12)
    assert deviation.equal_share == 1 - sum(v != 0 for v in d) / n
    assert deviation.is_finite


def ratio(a: Fraction, b: Fraction) -> mpmath.mpf:
    result = a / b
    return mpmath.mpf(result.numerator) / mpmath.mpf(result.denominator)


def quotient(value: float, over: Fraction, under: Fraction, loose: Fraction) -> bool:
    if under == 0:
        return value == (math.inf if over > 0 else 0.0)
    return right(value, over / under, loose * over / under)


def ulp(fmt: Format, r: Fraction) -> Fraction:
    """The spacing at r, found by comparing with powers of two."""
    exponent = fmt.emin
    if r:
        exponent = abs(r.numerator).bit_length() - r.denominator.bit_length()
        exponent -= Fraction(2) ** exponent > abs(r)
        exponent = min(max(exponent, fmt.emin), fmt.emax)
    return Fraction(2) ** (exponent - fmt.mantissa_bits)


@given(WIDE_PAIRS)
def test_the_cosine_is_the_exact_one(pairs: list[tuple[float, float]]) -> None:
    """Products of scaled numbers may fall below FP64 where they are 2^-1022 of the largest: nothing beside n u."""
    deviation, n = Deviation.between(*split(pairs), FP32), len(pairs)
    x, r = [Fraction(a) for a, _ in pairs], [Fraction(b) for _, b in pairs]
    norms = [sum((v * v for v in side), Fraction()) for side in (x, r)]
    if 0 in norms:
        assert deviation.cosine_similarity == float(norms[0] == norms[1])
        return
    exact = sum((a * b for a, b in zip(x, r, strict=True)), Fraction()) / (root(norms[0]) * root(norms[1]))
    assert abs(Fraction(deviation.cosine_similarity) - exact) <= (4 * n + 12) * Fraction(U64)


@given(WIDE_PAIRS)
def test_the_percentiles_lie_between_their_neighbours(pairs: list[tuple[float, float]]) -> None:
    deviation = Deviation.between(*split(pairs), FP32)
    sizes = sorted(abs(Fraction(a) - Fraction(b)) for a, b in pairs)
    for name, percent in (("p50", 500), ("p90", 900), ("p99", 990), ("p99_9", 999)):
        place = Fraction(percent * (len(sizes) - 1), 1000)
        below = int(place)
        low, high = sizes[below], sizes[min(below + 1, len(sizes) - 1)]
        exact = low + (high - low) * (place - below)
        # The place is rounded, by at most 3 u n, and so moves between its neighbours; three roundings follow.
        assert right(getattr(deviation, name), exact, (6 + 3 * len(sizes)) * Fraction(U64) * high), name


@given(st.lists(WIDE, min_size=1, max_size=8), st.lists(WIDE, min_size=1, max_size=8))
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


U = 2.0**-53
PROBLEM = Problem(Distribution(Kind.NORMAL), Shape(heads=2, queries=24, keys=24, head_dim=8))


def direction(error: Tensor, reference: Tensor | None = None) -> Direction:
    reference = torch.zeros_like(error) if reference is None else reference
    return Direction.of(Sample(reference + error), Sample(reference))


def loosely(shape: tuple[int, ...]) -> float:
    """Of a share of the energy: each entry of the Gram matrix is off by at most `tokens u` of the energy, and an eigenvalue of a
    matrix of `dim` rows by `dim` times that (Weyl), and by as much from the eigensolver; a share is that over the energy."""
    return 4 * max(shape[-2:]) * min(shape[-2:]) * U + 1e-15


@given(arrays(np.float64, array_shapes(min_dims=2, max_dims=4, max_side=7), elements=st.integers(-9, 9)))
def test_rank_and_share_are_those_of_the_singular_values(error: np.ndarray[Any, Any]) -> None:
    result = direction(torch.from_numpy(error)).after(None)
    heads = [head for head in error.reshape(-1, *error.shape[-2:]) if head.any()]
    if not heads:
        assert all(math.isnan(value) for value in result.values())
        return
    values = [np.linalg.svd(head, compute_uv=False) for head in heads]
    shares = [float(s[0] ** 2 / (s**2).sum()) for s in values]
    assert result["top_share"] == pytest.approx(np.mean(shares), abs=loosely(error.shape))
    # a rank is 1 / share, at most 7 here: its error is at most 49 times that of the share
    assert result["stable_rank"] == pytest.approx(np.mean([1 / share for share in shares]), abs=49 * loosely(error.shape))


@pytest.mark.parametrize("shape", [(3, 40, 8), (3, 8, 40)])
def test_the_top_vector_is_that_of_the_singular_value_decomposition(shape: tuple[int, ...]) -> None:
    error = torch.from_numpy(np.random.default_rng(0).standard_normal(shape))
    error[..., 0, :] += 20.0  # well apart from the second singular value: a vector is off by u times energy over the gap
    result = direction(error)
    for head, vector in zip(error, result.vectors, strict=True):
        expected = np.linalg.svd(head.numpy())[2][0]
        assert abs(float(expected @ vector.numpy())) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("gap", [1e-3, 1e-7, 1e-9, 0.0])
def test_the_largest_of_many_singular_values_that_lie_close_together(gap: float) -> None:
    draws = np.random.default_rng(1).standard_normal((2, 40, 32))
    left, right = (np.linalg.qr(x)[0] for x in (draws[0], draws[1][:32]))
    singular = np.concatenate([[1.0], np.full(31, math.sqrt(1 - gap))])
    value, _ = largest_singular(torch.from_numpy(left * singular @ right.T)[None])
    assert float(value) == pytest.approx(1.0, abs=math.log(32) / 2**25)


def test_an_error_that_stays_keeps_its_direction() -> None:
    """Rows scaled anew at each seed: the direction among the columns stays, that of all elements does not."""
    draws, v = np.random.default_rng(3), np.array([3.0, 0.0, 4.0])
    first, second = (direction(torch.from_numpy(draws.standard_normal((2, 500, 1)) * v)) for _ in range(2))
    result = second.after(first)
    assert result["step_alignment"] == pytest.approx(1.0, abs=1e-12)
    assert abs(result["step_cosine"]) < 6 / math.sqrt(1000)
    same = first.after(first)
    assert same["step_cosine"] == pytest.approx(1.0, abs=1000 * U)
    opposite = direction(-torch.ones(1, 2, 2, dtype=torch.float64)).after(direction(torch.ones(1, 2, 2, dtype=torch.float64)))
    assert opposite["step_cosine"] == pytest.approx(-1.0, abs=8 * U)
    assert opposite["step_alignment"] == pytest.approx(1.0, abs=8 * U)  # a singular vector has no sign


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_that_is_not_finite_has_no_direction(bad: float) -> None:
    error = torch.ones(1, 3, 2, dtype=torch.float64)
    fine = direction(error)
    error[0, 1, 1] = bad
    result = Direction.of(Sample(error), Sample(torch.zeros_like(error)))
    assert all(math.isnan(value) for value in result.after(fine).values())
    after = fine.after(result)
    assert after["stable_rank"] == pytest.approx(1.0)
    assert math.isnan(after["step_cosine"])
    assert math.isnan(after["step_alignment"])


def measured(seeds: int = 3, bench: Runner | None = None) -> Record:
    forward = Tiled(Precision.kernel(BF16), Tiling(br=8, bc=8))
    variant = TiledBackward(forward, BackwardPrecision.kernel(BF16), Tiling(br=8, bc=8))
    bench = bench or Runner(Deviations(ATTENTION_BACKWARD), "cpu")
    return bench.measure(PROBLEM, variant, NaiveBackward.eager(BF16), seeds)


def test_gradients_have_rank_and_direction_and_delta_has_a_signed_bias() -> None:
    record = measured()
    assert set(DIRECTED) <= {column.name for column in record.primary}
    for row in record.rows:
        directed, later = row["output"] != "delta", row["seed"] > 0
        assert (row["stable_rank"] >= 1) == directed
        assert (0 < row["top_share"] <= 1) == directed
        assert math.isnan(row["step_cosine"]) == math.isnan(row["step_alignment"]) == (not (directed and later))
        assert math.isfinite(row["bias"])
        assert row["bias_error"] > 0
    assert {row["output"] for row in record.rows} == {"dq", "dk", "dv", "delta"}
    assert {row["subject"] for row in record.rows} == {"variant", "baseline"}


def test_an_operation_without_directed_outputs_records_nothing_more() -> None:
    plain = replace(ATTENTION_BACKWARD, outputs=tuple(replace(o, directed=False) for o in ATTENTION_BACKWARD.outputs))
    assert Deviations(plain).columns["deviation"] == COLUMNS
    assert not set(DIRECTED) & set(measured(1, Runner(Deviations(plain), "cpu")).rows[0])
