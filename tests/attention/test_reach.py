"""How far a score may lie below its maximum, against the scores and entries of P themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.precision import Precision
from numdev.attention.reach import keeps_every, reach_of_zero
from numdev.attention.softmax import EXPONENTIALS, OnlineSoftmax
from numdev.attention.steps import Steps

FORMATS = [Format.parse(name) for name in ("bf16", "fp16", "fp32", "e5m2", "e4m3fn", "e4m3", "e3m2fn", "e2m1fn")]
MODES = [mode for mode in Rounding if mode is not Rounding.STOCHASTIC]

casts = st.builds(Cast, st.sampled_from(FORMATS), st.sampled_from(MODES))
policies = st.builds(
    lambda inputs, scores, every, exponential, probabilities: Precision.kernel(inputs).with_step(
        scores=Dot(scores, every), exponential=exponential, probabilities=probabilities
    ),
    st.sampled_from(FORMATS),
    casts,
    st.sampled_from([None, 1, 4]),
    casts,
    casts,
)
softmaxes = st.builds(OnlineSoftmax, exp=st.sampled_from(list(EXPONENTIALS.values())), p_scale=st.sampled_from([1.0, 256.0]))


@given(policies, softmaxes, st.sampled_from([2.0**e for e in range(-6, 7)]), st.integers(0, 1000))
def test_no_entry_is_0_where_none_is_expected(precision: Precision, softmax: OnlineSoftmax, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (spread * torch.randn(1, 1, 24, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k, _ = (x.to(precision.carrier) for x in precision.round_inputs(q, k, v))
    factor = softmax.log_scale / math.sqrt(8)
    if keeps_every(precision, softmax, q, k, factor):
        steps = Steps.of(precision, 24)
        s = steps.scores(q, k.mT, factor)
        p = steps.exponential(s, s.amax(-1, keepdim=True), softmax.exp)
        assert bool((steps.probabilities(p, softmax.p_scale) != 0).all())


@pytest.mark.parametrize("to", FORMATS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_an_entry_is_0_beyond_twice_the_reach_and_not_within(to: Format, mode: Rounding) -> None:
    precision = Precision.golden().with_step(probabilities=Cast(to, mode))
    twice = 2 * reach_of_zero(precision, OnlineSoftmax())

    def p(distance: float) -> float:
        return float(precision.probabilities(torch.tensor(-distance, dtype=torch.float64).exp()))  # type: ignore[operator]

    assert p(0.999 * twice) != 0
    assert p(1.001 * twice + 1e-9) == 0


def test_it_decides_for_the_inputs_of_the_paper_and_not_for_far_scores() -> None:
    precision, softmax = Precision.uniform(FORMATS[0]), OnlineSoftmax()
    x = torch.rand(1, 4, 256, 64, generator=torch.Generator().manual_seed(0))
    assert keeps_every(precision, softmax, x, x, 0.125)
    assert not keeps_every(precision, softmax, 30 * x, x, 0.125)
    assert not keeps_every(precision, softmax, x, x.masked_fill(x > 0.999, torch.nan), 0.125)
    assert not keeps_every(precision, softmax, x, x.masked_fill(x > 0.999, torch.inf), 0.125)
