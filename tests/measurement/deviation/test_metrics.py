"""Every metric against NumPy, SciPy, exact sums and tables of values; NaN and Inf are counted, never averaged."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, FP64, Format
from numdev.errors import BadInput
from numdev.measurement.deviation import metrics
from numdev.measurement.deviation import sample as sampling
from numdev.measurement.deviation.metrics import METRICS, NONFINITE, Deviation, compare
from numdev.measurement.deviation.sample import Sample, wasserstein
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


@pytest.mark.parametrize("bad", [[], [NAN], [1.0, NAN], [INF, 0.0], [-INF, 0.0]])
def test_wasserstein_refuses_nothing_and_nan(bad: list[float]) -> None:
    for x, y in ((bad, [1.0]), ([1.0, 2.0], bad)):
        with pytest.raises(BadInput, match="^sample: "):
            wasserstein(tensor(x), tensor(y))


def test_a_sample_is_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = sampling.ascending, []

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


def test_metrics_by_name_and_as_a_table() -> None:
    found = Deviation.between(tensor([1.0, 2.5]), tensor([1.0, 2.0]), FP32)
    assert list(found.metrics()) == list(METRICS) == [f.name for f in fields(Deviation) if f.name != "max_index"]
    assert found.metrics()["max_difference"] == 0.5
    table = found._repr_html_()
    assert table.count("<tr>") == len(METRICS) + 2
    assert "<td>max_difference</td><td>0.5</td><td>absolute</td>" in table
    assert "<td>max_index</td><td>(1,)</td>" in table
