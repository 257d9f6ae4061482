"""The online softmax's parts: exponentials against multiprecision, the running maximum against one row at a time."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf, workprec
from torch import Tensor

from numdev.arithmetic.formats import FP64
from numdev.arithmetic.rounding import Cast
from numdev.attention.softmax import EXP2_MINIMAX, EXPONENTIALS, FA4_COEFFICIENTS, Exponential, OnlineSoftmax, exp2
from numdev.errors import BadInput
from tests.cases import EXP2_ERRORS
from tests.oracles.double_loop import largest_of, new_maximum

DEGREES = sorted(EXP2_MINIMAX)
CARRIERS = {torch.float32: 23, torch.float64: 52}


@pytest.mark.parametrize("degree", DEGREES)
def test_polynomial_has_the_stated_error(degree: int) -> None:
    """To the four digits stated. The grid misses a smooth extremum by at most `pi^2 (degree + 1)^2 / 2 / 2000^2 < 5e-5`."""
    with workprec(200):
        coefficients, grid = [mpf(c) for c in reversed(EXP2_MINIMAX[degree])], [mpf(i) / 2000 for i in range(2001)]
        worst = max(abs(float(mp.polyval(coefficients, f) / mpf(2) ** f - 1)) for f in grid)
    assert worst == pytest.approx(EXP2_ERRORS[degree], rel=1e-4)
    assert len(EXP2_MINIMAX[degree]) == degree + 1


@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
def test_exp2_is_within_an_ulp_and_a_half(carrier: torch.dtype) -> None:
    low = -125.0 if carrier is torch.float32 else -1021.0
    spread = [-torch.rand(800, dtype=torch.float64) * 20, torch.linspace(low, 9, 400, dtype=torch.float64)]
    x = torch.cat([*spread, -torch.logspace(-14, 0, 200, dtype=torch.float64)]).to(carrier)
    with workprec(200):
        for value, result in zip(x.tolist(), exp2(x.clone()).tolist(), strict=True):
            exact = mpf(2) ** mpf(value)
            ulp = mpf(2) ** (mp.floor(mpf(value)) - CARRIERS[carrier])
            assert abs(mpf(result) - exact) <= 1.5 * ulp, value


@pytest.mark.parametrize("kind", [Exponential.EXP, Exponential.EXP2], ids=str)
@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
def test_an_exponential_does_not_depend_on_its_place(kind: Exponential, carrier: torch.dtype) -> None:
    """Vector code and the code for the last few elements must agree: rows are independent only if elements are."""
    x = -torch.rand(1037, dtype=carrier) * 20
    whole = kind(x.clone())
    for first, last in ((0, 1), (1, 2), (5, 12), (17, 50), (1000, 1037), (1, 1037)):
        assert torch.equal(kind(x[first:last].clone()), whole[first:last])
    strided = torch.stack([x, x], 1)[:, 0]
    assert torch.equal(kind(strided), whole)


@pytest.mark.parametrize("name", ["exp", "exp2", "exp2_poly3", "exp2_fa4"])
@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
def test_special_values(name: str, carrier: torch.dtype) -> None:
    kind = EXPONENTIALS[name]
    x = torch.tensor([-math.inf, math.nan, -1e30, 0.0, -0.0], dtype=carrier)
    got = kind(x[:, None].expand(5, kind.period).clone())
    error = 0.0  # 2^0; a polynomial's is its own, which its roundings may exceed
    if kind.coefficients:
        terms = len(kind.coefficients)
        error = abs(kind.coefficients[0] - 1) * (1 + 1e-4) + (terms + 1) * 2.0 ** -CARRIERS[carrier]
    assert bool((got[[0, 2]] == 0).all())
    assert bool(got[1].isnan().all())
    assert float((got[3:] - 1).abs().max()) <= error


def test_flash_attention_4s_polynomial() -> None:
    """2^0 is exactly 1, so that P = 1 is; the coefficients are numbers of FP32."""
    assert [float(torch.tensor(c, dtype=torch.float32)) for c in FA4_COEFFICIENTS] == list(FA4_COEFFICIENTS)
    whole = -torch.arange(0.0, 100.0)[:, None].expand(100, 128)
    assert torch.equal(EXPONENTIALS["exp2_fa4"](whole.clone()), torch.exp2(whole))


@pytest.mark.parametrize(("name", "frequency"), [("exp2_fa4", 16), ("exp2_fa4_fp8", 8)])
def test_flash_attention_4s_columns(name: str, frequency: int) -> None:
    """Fragment by fragment and pair by pair, as its kernel goes through a tile of 128 columns."""
    replaced = []
    for fragment in range(4):
        for pair in range(0, 32, 2):
            if pair % frequency >= frequency - 4 and 1 <= fragment < 3:
                replaced += [32 * fragment + pair, 32 * fragment + pair + 1]
    kind = EXPONENTIALS[name]
    assert (kind.period, list(kind.columns)) == (128, replaced)
    x = torch.full((3, 300), -0.4, dtype=torch.float64)
    exact = Exponential.EXP2(x.clone())
    by_polynomial = (kind(x.clone()) != exact).any(0).nonzero().flatten().tolist()
    assert by_polynomial == [c for c in range(300) if c % 128 in replaced]


@given(st.integers(1, 256), st.data())
def test_a_share_is_spread_evenly(denominator: int, data: st.DataObject) -> None:
    """Of any run of columns the polynomial takes its share, but for less than one column."""
    numerator = data.draw(st.integers(1, denominator))
    share = numerator / denominator
    kind = Exponential.polynomial((1.0, 0.7), share)
    assert kind.share == pytest.approx(share, abs=1e-12)
    taken = [c % kind.period in kind.columns for c in range(600)]
    first = data.draw(st.integers(0, 500))
    last = data.draw(st.integers(first, 600))
    assert abs(sum(taken[first:last]) - share * (last - first)) < 1 + 1e-9


IMPOSSIBLE: list[tuple[bool, tuple[float, ...], int, tuple[int, ...]]] = [
    *((False, (1.0, 0.7), 1, (0,)), (True, (1.0, math.nan), 1, (0,)), (True, (1.0, 0.7), 1, ())),
    *((True, (), 2, (0,)), (True, (1.0, 0.7), 2, (2,)), (True, (1.0, 0.7), 4, (2, 1))),
]


def test_impossible_exponentials_and_recurrences_are_refused() -> None:
    makers = [partial(Exponential, *values) for values in IMPOSSIBLE] + [partial(Exponential.parse, "exp3")]
    makers += [partial(Exponential.polynomial, (1.0, 0.7), share) for share in (0.0, 1.5, math.nan, 1e-4)]
    for make in makers:
        with pytest.raises(BadInput, match=r"^softmax\.exp: "):
            make()
    bad = {"rescale_threshold": (-1.0, math.inf), "p_scale": (0.0, math.nan), "tie_shift": (1.0,)}
    for field, value in ((field, value) for field, values in bad.items() for value in values):
        with pytest.raises(BadInput, match=rf"^softmax\.{field}: "):
            OnlineSoftmax(**{field: value})  # type: ignore[arg-type]


def next_maximum(soft: OnlineSoftmax, m: Tensor, s: Tensor) -> Tensor:
    """`m'` of each row; the product with beta is not rounded here."""
    return soft.running(m, soft.largest(s, lambda largest: largest * (soft.tie_shift or 1.0)))


scores = st.one_of(st.integers(-3, 3).map(float), st.just(-math.inf), st.floats(-2, 2))


@settings(max_examples=300)
@given(
    st.lists(st.tuples(scores, st.lists(scores, min_size=5, max_size=5)), min_size=1, max_size=6),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from([None, 2.0, 4.0]),
    st.sampled_from([Exponential.EXP, Exponential.EXP2]),
)
def test_running_maximum_is_that_of_each_row(
    rows: list[tuple[float, list[float]]], threshold: float, tie_shift: float | None, kind: Exponential
) -> None:
    soft = OnlineSoftmax(exp=kind, rescale_threshold=threshold, tie_shift=tie_shift)
    old = torch.tensor([[m] for m, _ in rows], dtype=torch.float64)
    got = next_maximum(soft, old, torch.tensor([s for _, s in rows], dtype=torch.float64))
    assert got[:, 0].tolist() == [new_maximum(m, largest_of(s, soft, Cast(FP64), torch.float64), soft) for m, s in rows]
