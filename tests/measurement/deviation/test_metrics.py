"""Every metric against NumPy, SciPy, exact sums and tables of values; NaN and Inf are counted, never averaged."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cosine
from scipy.stats import wasserstein_distance
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, FP64, Format
from numdev.errors import BadInput
from numdev.measurement.deviation import metrics
from numdev.measurement.deviation import sample as sampling
from numdev.measurement.deviation import wasserstein as distance
from numdev.measurement.deviation.metrics import METRICS, NONFINITE, Deviation, compare
from numdev.measurement.deviation.sample import Sample
from numdev.measurement.deviation.wasserstein import wasserstein
from tests.cases import U64

INF, NAN = math.inf, math.nan

# Multiples of 2^-10 below 2^20: no square of them, nor that of a difference, nears either end of FP64.
NUMBERS = st.integers(-(2**30), 2**30).map(lambda k: k / 1024)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40)
ANY = st.one_of(NUMBERS, st.sampled_from([NAN, INF, -INF]))
ABSOLUTE = ("max_difference", "mean_absolute", "std", "rmse", "wasserstein", "p50", "p90", "p99", "p99_9", "bias_error")
RELATIVE = ("relative_frobenius", "relative_l1", "cosine_similarity", "max_u", "agreement_bits")


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


@given(PAIRS)
def test_sums_equal_exact_ones(pairs: list[tuple[float, float]]) -> None:
    """Each difference, multiple of 2^-10 below 2^21, is exact. A sum of n terms is off by at most n u sum |terms|."""
    x, r = split(pairs)
    found, n = Deviation.between(x, r, FP32), len(pairs)
    exact = [Fraction(a) - Fraction(b) for a, b in pairs]
    loose = (n + 2) * U64
    mean, absolute = float(sum(exact) / n), float(sum(map(abs, exact)) / n)
    square = float(sum(d * d for d in exact) / n)
    away = float(sum(d * ((b > 0) - (b < 0)) for d, (_, b) in zip(exact, pairs, strict=True)) / n)
    assert found.max_difference == float(max(map(abs, exact)))
    assert found.mean == pytest.approx(mean, rel=0, abs=loose * absolute)
    assert found.bias == pytest.approx(away, rel=0, abs=loose * absolute)
    assert found.mean_absolute == pytest.approx(absolute, rel=loose)
    assert found.rmse == pytest.approx(math.sqrt(square), rel=loose)  # a root halves the relative error, and adds u
    # The mean is off by `loose |D|`, which moves each deviation from it; below, the sum of squares and a root.
    assert found.std == pytest.approx(np.std([float(d) for d in exact]), rel=2 * loose, abs=2 * loose * absolute)


@given(PAIRS)
def test_relative_metrics_equal_scipy(pairs: list[tuple[float, float]]) -> None:
    """Norms of n terms are off by n u relatively, on either side; a cosine in (-1, 1) by as much absolutely."""
    x, r = split(pairs)
    found, loose = Deviation.between(x, r, BF16), (4 * len(pairs) + 8) * U64
    d, over = x.numpy() - r.numpy(), r.numpy()
    for value, top, base in (
        (found.relative_frobenius, np.linalg.norm(d), np.linalg.norm(over)),
        (found.relative_l1, np.abs(d).sum(), np.abs(over).sum()),
        (found.max_u, np.abs(d).max(), np.abs(over).max() * 2.0**-8),
    ):
        if base > 0:
            assert value == pytest.approx(top / base, rel=loose)
        else:
            assert value == (INF if top > 0 else 0.0)
    if np.any(x.numpy()) and np.any(over):
        assert found.cosine_similarity == pytest.approx(1.0 - cosine(x.numpy(), over), rel=0, abs=loose)
    else:
        assert found.cosine_similarity == float(not np.any(x.numpy()) and not np.any(over))


@given(PAIRS)
def test_percentiles_equal_numpy(pairs: list[tuple[float, float]]) -> None:
    """`low + (high - low) t`: three roundings, each of at most u times the larger end; NumPy's are as many."""
    x, r = split(pairs)
    found, d = Deviation.between(x, r, FP32), np.abs(x.numpy() - r.numpy())
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("p99_9", 99.9)):
        # The place itself, percent / 100 (n - 1), is rounded: 3 u n of a step between neighbours.
        loose = (6 + 3 * len(pairs)) * U64 * d.max()
        assert getattr(found, name) == pytest.approx(np.percentile(d, percent), rel=0, abs=loose)


@given(PAIRS)
def test_swapping_negates_the_mean_and_keeps_every_absolute_metric(pairs: list[tuple[float, float]]) -> None:
    x, r = split(pairs)
    one, other = Deviation.between(x, r, FP32), Deviation.between(r, x, FP32)
    assert one.mean == -other.mean
    for name in (*ABSOLUTE[:-1], "cosine_similarity"):
        assert getattr(one, name) == getattr(other, name), name


@given(PAIRS, st.integers(-40, 40))
def test_a_power_of_two_scales_absolute_metrics_and_keeps_relative_ones(pairs: list[tuple[float, float]], k: int) -> None:
    x, r = split(pairs)
    one, scaled = Deviation.between(x, r, FP32), Deviation.between(x * 2.0**k, r * 2.0**k, FP32)
    for name in (*ABSOLUTE, "mean", "bias", "max_value", "max_reference"):
        assert getattr(scaled, name) == getattr(one, name) * 2.0**k, name
    for name in RELATIVE:
        assert getattr(scaled, name) == getattr(one, name), name


@given(st.lists(ANY, min_size=1, max_size=20), st.sampled_from([BF16, FP16, E4M3FN, FP32, FP64]))
def test_nothing_deviates_from_itself(values: list[float], fmt: Format) -> None:
    x = tensor([v for v in values if not math.isnan(v)] or [1.0])
    found = Deviation.between(x, x.clone(), fmt)
    free = {"max_value", "max_reference", "cosine_similarity", "agreement_bits", "equal_share", "both_inf_count", "compared"}
    assert {name: value for name, value in found.metrics().items() if name not in free and value != 0} == {}
    assert found.max_value == found.max_reference
    # x.x / ||x||^2: the product, the two norms and the division, n terms each.
    assert found.cosine_similarity == pytest.approx(1.0, rel=0, abs=(2 * len(values) + 4) * U64)
    assert found.agreement_bits == 53.0
    assert found.equal_share == 1.0
    assert found.is_finite


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
def test_what_is_left_out_is_counted_and_not_compared(triples: list[tuple[float, float, bool]]) -> None:
    x, r = split([(x, r) for x, r, _ in triples])
    found = compare(Sample(x), Sample(r), FP32, torch.tensor([left for _, _, left in triples]))
    counts = {*NONFINITE, "both_inf_count"}
    every = Deviation.between(x, r, FP32).metrics()
    assert {name: getattr(found, name) for name in counts} == {name: every[name] for name in counts}
    kept = [(x, r) for x, r, left in triples if not left and math.isfinite(x) and math.isfinite(r)]
    assert found.compared == len(kept)
    if kept:
        alone = Deviation.between(*split(kept), FP32).metrics()
        assert {name: value for name, value in found.metrics().items() if name not in counts} == {
            name: value for name, value in alone.items() if name not in counts
        }
        assert triples[found.max_index[0]][2] is False


@given(st.lists(st.tuples(ANY, ANY), min_size=1, max_size=20))
def test_nan_and_inf_are_counted_and_left_out(pairs: list[tuple[float, float]]) -> None:
    """The rest of the metrics are those of the finite pairs alone, bit for bit."""
    found = Deviation.between(*split(pairs), FP32)
    kinds = Counter(map(kind, pairs))
    finite = [(x, r) for x, r in pairs if math.isfinite(x) and math.isfinite(r)]
    counts = {*NONFINITE, "both_inf_count"}
    assert {name: getattr(found, name) for name in counts} == {name: kinds[name] for name in counts}
    assert found.compared == kinds["compared"] == len(finite)
    assert sum(kinds[name] for name in counts) + found.compared == len(pairs), "each place is of one kind"
    assert found.is_finite == (not kinds.keys() & set(NONFINITE))
    rest = {name: value for name, value in found.metrics().items() if name not in {*counts, "compared"}}
    if finite:
        alone = Deviation.between(*split(finite), FP32).metrics()
        assert rest == {name: alone[name] for name in rest}
        x, r = pairs[found.max_index[0]]
        assert (x, r) == (found.max_value, found.max_reference)
    elif all(x == r for x, r in pairs):
        assert found.max_difference == found.wasserstein == found.max_ulp == 0.0
        assert (found.cosine_similarity, found.agreement_bits) == (1.0, 53.0)
    else:
        assert all(math.isnan(value) for value in rest.values())
        assert found.max_index == ()


def test_log_sums_of_fully_masked_rows_do_not_deviate() -> None:
    lse = torch.full((2, 3), -INF)
    found = Deviation.between(lse, lse.clone(), FP32)
    assert found.is_finite
    assert (found.max_difference, found.rmse, found.cosine_similarity) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("value", [0.0, -1e30, INF])
def test_another_log_sum_than_minus_infinity_is_counted(value: float) -> None:
    """A fully masked row's LSE is -inf; a kernel that writes a number there is not in agreement."""
    found = Deviation.between(tensor([1.0, value]), tensor([1.0, -INF]), FP32)
    assert found.inf_count + found.reference_inf_count == 1
    assert found.inf_count == (value == INF)
    assert not found.is_finite
    assert found.max_difference == 0.0


@settings(max_examples=40)
@given(st.sampled_from([(7,), (3, 5), (2, 3, 4), (2, 1, 3, 2), (1,)]), st.integers(0, 9), st.integers(0, 3))
def test_where_it_is_largest(shape: tuple[int, ...], seed: int, broken: int) -> None:
    x, r = normal(*shape, seed=seed), normal(*shape, seed=seed + 100)
    x.view(-1)[: min(broken, x.numel() - 1)] = NAN
    found = Deviation.between(x, r, FP32)
    assert len(found.max_index) == len(shape)
    assert float(x[found.max_index]) == found.max_value
    assert float(r[found.max_index]) == found.max_reference
    assert abs(found.max_value - found.max_reference) == found.max_difference == float((x - r).abs().nan_to_num(-1).max())


def spacing(fmt: Format, r: float) -> float:
    """From the table: the number at or below `|r|` and the next one; beyond the table, its last two."""
    table = [v for v in fmt.values().tolist() if v >= 0]
    below = min(bisect.bisect_right(table, abs(r)) - 1, len(table) - 2)
    return table[below + 1] - table[below]


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3FN], ids=str)
def test_ulp_equals_the_gap_in_the_table(fmt: Format) -> None:
    """Zero, subnormal, normal and largest numbers, and references between two of them."""
    table = [v for v in fmt.values().tolist() if v >= 0]
    edge = table.index(fmt.min_normal)
    places = sorted({0, 1, 2, edge - 1, edge, edge + 1, len(table) // 2, len(table) - 3, len(table) - 2, len(table) - 1})
    for below in places:
        for part in (0.0, 0.25, 0.5):
            gap = table[below + 1] - table[below] if below + 1 < len(table) else 0.0
            for sign in (1.0, -1.0):
                r = sign * (table[below] + part * gap)
                x = r + sign * 0.75 * spacing(fmt, r)
                found = Deviation.between(tensor([x]), tensor([r]), fmt)
                assert found.max_ulp == abs(x - r) / spacing(fmt, r), (r, part)


def test_largest_ulp_is_not_where_the_difference_is_largest() -> None:
    x, r = tensor([1.0 + 2.0**-5, 100.0 + 2.0**-4, 0.0]), tensor([1.0, 100.0, 0.0])
    found = Deviation.between(x, r, BF16)
    assert found.max_index == (1,)
    assert found.max_ulp == 2.0**-5 / 2.0**-7


@pytest.mark.parametrize(("fmt", "u"), [(BF16, 2.0**-8), (FP16, 2.0**-11), (E4M3FN, 2.0**-4), (FP32, 2.0**-24), (FP64, 2.0**-53)])
def test_u_is_relative_to_the_largest_reference(fmt: Format, u: float) -> None:
    found = Deviation.between(tensor([1.0, 8.0]), tensor([1.0 + 3 * 2.0**-20, 8.0]), fmt)
    assert found.max_u == 3 * 2.0**-20 / (8.0 * u)


@given(st.integers(0, 52), st.integers(-30, 30))
def test_bits_of_agreement(bits: int, exponent: int) -> None:
    r = torch.full((3,), 2.0**exponent, dtype=torch.float64)
    x = r.clone()
    x[1] *= 1 + 2.0**-bits
    assert Deviation.between(x, r, FP32).agreement_bits == bits


def test_no_agreement_is_no_bit() -> None:
    assert Deviation.between(tensor([5.0]), tensor([1.0]), FP32).agreement_bits == 0.0
    assert Deviation.between(tensor([5.0]), tensor([0.0]), FP32).agreement_bits == 0.0
    assert Deviation.between(tensor([0.0]), tensor([0.0]), FP32).agreement_bits == 53.0


def test_bias_is_positive_away_from_zero() -> None:
    r = tensor([-2.0, 4.0, 0.0, -1.0])
    assert Deviation.between(r * 1.5, r, FP32).bias == (1.0 + 2.0 + 0.0 + 0.5) / 4
    assert Deviation.between(r * 0.5, r, FP32).bias == -(1.0 + 2.0 + 0.0 + 0.5) / 4
    assert Deviation.between(r + 1.0, r, FP32).bias == (-1.0 + 1.0 + 0.0 - 1.0) / 4


def test_standard_error_of_the_bias() -> None:
    """Over M unbiased draws of n, (bias / error)^2 is n / (n - 1) times an F(1, n - 1) variable; its mean, within 5 sigma.

    With d = n - 1: E F = d / (d - 2), Var F = 2 d^2 (d - 1) / ((d - 2)^2 (d - 4)).
    """
    n, draws, square = 64, 400, 0.0
    r, noise = normal(n), normal(draws, n, seed=1)
    for one in noise:
        found = Deviation.between(r + one, r, FP32)
        square += (found.bias / found.bias_error) ** 2
    d = n - 1
    mean, variance = d / (d - 2), 2 * d * d * (d - 1) / ((d - 2) ** 2 * (d - 4))
    factor = n / d
    assert abs(square / draws - factor * mean) < 5 * factor * math.sqrt(variance / draws)


@pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((6,), (2, 3)), ((0,), (0,)), ((2, 0), (2, 0))])
def test_shapes_that_differ_or_hold_nothing_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    between: Callable[..., Deviation] = getattr(Deviation.between, "__wrapped__", Deviation.between)  # past the shape checker
    with pytest.raises(BadInput, match="^reference: ") as caught:
        between(torch.zeros(shapes[0]), torch.zeros(shapes[1]), FP32)
    assert caught.value.field == "reference"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_tensors_are_compared_in_fp64(dtype: torch.dtype) -> None:
    r = normal(5, 7)
    x = r.to(dtype)
    assert Deviation.between(x, r, FP32) == Deviation.between(x.double(), r, FP32)
    assert Deviation.between(x, r, FP32).max_difference > 0


SAMPLES = st.lists(st.floats(-1.0, 1.0, allow_nan=False), min_size=1, max_size=50)


@given(SAMPLES, SAMPLES)
def test_wasserstein_equals_scipy_for_any_counts(x: list[float], y: list[float]) -> None:
    """The specification's 1e-12, for values of size 1: both sum at most 100 terms of at most 2, 2 * 100 * 2 u = 4.4e-14."""
    assert abs(wasserstein(tensor(x), tensor(y)) - wasserstein_distance(x, y)) <= 1e-12
    assert wasserstein(tensor(x), tensor(x)) == 0.0
    assert wasserstein(tensor(x), tensor(y)) == wasserstein(tensor(y), tensor(x))


@given(st.integers(1, 300), st.integers(0, 99))
def test_wasserstein_of_equal_counts_equals_scipy(count: int, seed: int) -> None:
    x, y = torch.rand(2, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = wasserstein_distance(x.numpy(), y.numpy())
    assert abs(wasserstein(x, y) - expected) <= 1e-12
    assert abs(Deviation.between(x, y, FP32).wasserstein - expected) <= 1e-12


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.integers(-1000, 1000))
def test_wasserstein_of_a_shift_is_the_shift(values: list[float], shift: int) -> None:
    x = tensor(values)
    assert wasserstein(x, x.flip(0) + shift) == abs(shift)  # multiples of 2^-10: every sum is exact, and n|c|/n


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32])
def test_wasserstein_of_narrow_samples(dtype: torch.dtype) -> None:
    x, y = normal(100).to(dtype), normal(90, seed=1).to(dtype)
    assert wasserstein(x, y) == wasserstein(x.double(), y.double()) > 0


@pytest.mark.parametrize("bad", [[], [NAN], [1.0, NAN], [INF, 0.0], [-INF, 0.0]])
def test_wasserstein_refuses_nothing_and_nan(bad: list[float]) -> None:
    for x, y in ((bad, [1.0]), ([1.0, 2.0], bad)):
        with pytest.raises(BadInput, match="^sample: "):
            wasserstein(tensor(x), tensor(y))


@pytest.mark.parametrize("counts", [(500, 500), (500, 300)])
def test_large_samples_take_threads_and_give_the_same_bits(counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[int] = []

    class Watched(ThreadPoolExecutor):
        def __init__(self, workers: int) -> None:
            pools.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(distance, "ThreadPoolExecutor", Watched)
    x, y = normal(counts[0]), normal(counts[1], seed=1)
    small = wasserstein(x, y)
    assert pools == []
    monkeypatch.setattr(distance, "_PARALLEL", min(counts))
    assert wasserstein(x, y) == small
    assert pools == [2]


def test_chunks_of_the_distance_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of summation: both within n u of the exact sum of n positive terms."""
    x, y = normal(500), normal(500, seed=1)
    whole = wasserstein(x, y)
    monkeypatch.setattr(distance, "_CHUNK", 7)
    assert wasserstein(x, y) == pytest.approx(whole, rel=2 * 500 * U64, abs=0)


def test_a_sample_is_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = distance.ascending, []

    def counted(values: Tensor) -> Tensor:
        sizes.append(values.numel())
        return real(values)

    for module in (sampling, metrics):
        monkeypatch.setattr(module, "ascending", counted)
    x, first, second = Sample(normal(4, 5)), Sample(normal(4, 5, seed=1)), Sample(normal(4, 5, seed=2))
    sorts = []
    for reference in (first, second, first):
        compare(x, reference, FP32)
        sorts.append(len(sizes))
        sizes.clear()
    assert sorts == [3, 2, 1], "x, r and |D|; r and |D|; |D|"
    assert torch.equal(x.ordered, x.values.sort().values)
    assert compare(x, first, FP32) == Deviation.between(normal(4, 5), normal(4, 5, seed=1), FP32)


def patterns(dtype: torch.dtype) -> Tensor:
    """Numbers of a dtype in no order, with both zeros, both infinities, NaN of both signs, and the least and largest numbers.

    Of BF16 every bit pattern, of FP32 one for each of its upper 16 bits and some lower ones.
    """
    upper = torch.arange(2**16).roll(12345)[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    if dtype == torch.bfloat16:
        return (upper - 2**15).to(torch.int16).view(torch.bfloat16)
    lower = torch.randint(2**16, (2**16,), generator=torch.Generator().manual_seed(1))
    return ((upper << 16) + lower - 2**31).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_sorted_in_fp32_are_those_sorted_in_fp64(dtype: torch.dtype) -> None:
    """Widening keeps the order and every value, so both sorts give the same numbers; only equal zeros may change places."""
    special = tensor([0.0, -0.0, INF, -INF, NAN, -NAN, 2.0**-149, -(2.0**-149)]).to(dtype)
    x = torch.cat([patterns(dtype), special, patterns(dtype)[:100]])
    expected = x.double().sort().values  # another library's sort
    assert torch.equal(expected.isnan(), expected.isnan().sort().values), "NaN last"
    found = {distance.ascending(x), distance.ascending(x.double()), Sample(x).ordered, Sample(x.double()).ordered}
    for ordered in found:
        assert ordered.dtype == torch.float64
        torch.testing.assert_close(ordered, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_no_metric_depends_on_the_dtype_that_is_sorted(dtype: torch.dtype) -> None:
    x, r = torch.cat([normal(500), tensor([0.0, -0.0])]).to(dtype), normal(502, seed=1)
    bad = torch.cat([x[:-3].float(), tensor([INF, NAN, -INF]).float()])
    for values in (x, bad):
        assert repr(Deviation.between(values, r, FP32)) == repr(Deviation.between(values.double(), r, FP32))
        assert repr(Deviation.between(r, values, FP32)) == repr(Deviation.between(r, values.double(), FP32))


def test_whole_numbers_are_sorted_in_fp64() -> None:
    x = torch.tensor([2**24 + 1, 2**24, -(2**24) - 1])
    assert distance.ascending(x).tolist() == [-(2**24) - 1, 2**24, 2**24 + 1]


def test_metrics_by_name_and_as_a_table() -> None:
    found = Deviation.between(tensor([1.0, 2.5]), tensor([1.0, 2.0]), FP32)
    assert list(found.metrics()) == list(METRICS) == [f.name for f in fields(Deviation) if f.name != "max_index"]
    assert found.metrics()["max_difference"] == 0.5
    table = found._repr_html_()
    assert table.count("<tr>") == len(METRICS) + 2
    assert "<td>max_difference</td><td>0.5</td><td>absolute</td>" in table
    assert "<td>max_index</td><td>(1,)</td>" in table
