"""Inputs are a function of their arguments, and are what their kind says, within five standard errors."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from numdev.attention.distributions import (
    DISTRIBUTIONS,
    Distribution,
    Drawn,
    Gap,
    Kind,
    Normal,
    NormalLogits,
    Outliers,
    Sink,
    StudentT,
    Tied,
    Uniform,
)
from numdev.attention.problem import Shape
from numdev.errors import BadInput
from numdev.settings import declared
from tests.cases import U64

LARGE = Shape(batch=2, heads=4, kv_heads=2, queries=256, keys=300, head_dim=32)
SIGMAS = 5  # a sound generator fails one such check in a million; the seeds are fixed, so a pass stays a pass


def scores(q: Tensor, k: Tensor) -> Tensor:
    """`q . k` of every query and key as sums in one order, so that equal keys have equal bits."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q[:, :, :, None] * k[:, :, None]).sum(-1)


def everything(source: Drawn, seed: int = 0) -> Tensor:
    return torch.cat([t.flatten() for t in source.draw(LARGE, 1.0, seed)])


def check_mean(values: Tensor, mean: float, variance: float) -> None:
    """The mean of n independent values has standard error sqrt(variance / n)."""
    assert abs(float(values.mean()) - mean) < SIGMAS * math.sqrt(variance / values.numel())


def check_share(values: Tensor, probability: float) -> None:
    check_mean(values.double(), probability, probability * (1 - probability))


@pytest.mark.parametrize("kind", Kind)
def test_shapes_type_and_seed(kind: Kind) -> None:
    source = Distribution(kind)
    drawn = source.draw(LARGE, 0.25, 3)
    assert [t.shape for t in drawn] == [(2, 4, 256, 32), (2, 2, 300, 32), (2, 2, 300, 32)]
    fixed = {Kind.CONSTANT: "qkv", Kind.GAP: "qk"}.get(kind, "")
    before, state = torch.get_default_dtype(), torch.manual_seed(1234).get_state()
    try:  # nothing global enters, or is changed
        torch.set_default_dtype(torch.bfloat16)
        repeated = source.draw(LARGE, 0.25, 3)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.get_rng_state(), state)
    for name, one, again, other in zip("qkv", drawn, repeated, source.draw(LARGE, 0.25, 4), strict=True):
        assert one.dtype == torch.float64
        assert one.device.type == "cpu"
        assert bool(one.isfinite().all())
        assert torch.equal(one, again)
        assert torch.equal(one, other) == (name in fixed)
    if kind is Kind.CONSTANT:
        assert all(bool((tensor == 1.0).all()) for tensor in drawn)
    else:
        assert not torch.equal(drawn[1], drawn[2]), "k and v are different draws"


def test_uniform() -> None:
    """Variance 1/12; that of the square about the middle 1/80 - 1/144 = 1/180."""
    values = everything(Uniform())
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    check_mean(values, 0.5, 1 / 12)
    check_mean((values - 0.5).square(), 1 / 12, 1 / 180)
    for edge in (0.01, 0.25, 0.9):
        check_share(values < edge, edge)


def test_normal() -> None:
    """E z^2 = 1, Var z^2 = 2."""
    values = everything(Normal())
    check_mean(values, 0.0, 1.0)
    check_mean(values.square(), 1.0, 2.0)
    for edge in (-2.0, 0.0, 1.0):
        check_share(values < edge, float(stats.norm.cdf(edge)))


@pytest.mark.parametrize(("scale", "sigma"), [(32**-0.5, None), (1.0, 0.5), (0.03, 20.0)])
def test_scores_have_the_standard_deviation_asked_for(scale: float, sigma: float | None) -> None:
    """The mean of S^2 over n queries, n keys and h heads, for q and k of variance s^2 in d dimensions.

    It is scale^2 tr(A B), A and B the second moments of q and k: its mean is scale^2 d s^4, its variance, first given B and
    then over B, 2 (2 + (d + 1) / n) / (n d h) times the square of that (E tr B^2 = s^4 (d + d (d + 1) / n)).
    """
    n, d, heads = 200, 32, 4
    shape = Shape(heads=heads, kv_heads=heads, queries=n, keys=n, head_dim=d)
    q, k, v = (NormalLogits() if sigma is None else NormalLogits(sigma)).draw(shape, scale, 0)
    found = float(scores(q, k).mul(scale).square().mean()) / (4.0 if sigma is None else sigma) ** 2
    assert abs(found - 1) < SIGMAS * math.sqrt(2 * (2 + (d + 1) / n) / (n * d * heads))
    check_mean(v.square(), 1.0, 2.0)
    check_mean(q.square() / float(k.square().mean()), 1.0, 2.0 * 2)  # both carry the same spread; k's mean is as uncertain


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.02, 1.0])
def test_outliers(p: float) -> None:
    """A mixture of N(0, 1) and, with probability p, N(0, 101): E x^2 = 1 + 100 p, E x^4 = 3 (1 - p + 101^2 p)."""
    values = everything(Outliers(p))
    mean = 1 + 100 * p
    check_mean(values, 0.0, mean)
    check_mean(values.square(), mean, 3 * (1 - p + 101**2 * p) - mean**2)
    beyond = 2 * ((1 - p) * float(stats.norm.sf(6)) + p * float(stats.norm.sf(6 / math.sqrt(101))))
    check_share(values.abs() > 6, beyond)


@pytest.mark.parametrize("freedom", [1.0, 3.0, 30.0])
def test_student_t(freedom: float) -> None:
    values = everything(StudentT(freedom))
    for edge in (0.5, 2.0, 5.0):
        check_share(values.abs() > edge, 2 * float(stats.t.sf(edge, freedom)))
        check_share(values > edge, float(stats.t.sf(edge, freedom)))


@pytest.mark.parametrize(("keys", "copies"), [(128, 4), (130, 4), (7, 7), (9, 4), (28, 27), (16, 1), (64, 32)])
def test_the_best_key_occurs_as_often_as_asked_for(keys: int, copies: int) -> None:
    shape = Shape(batch=2, heads=4, kv_heads=2, queries=50, keys=keys, head_dim=16)
    q, k, v = Tied(copies).draw(shape, 0.25, 1)
    plain = Normal().draw(shape, 0.25, 1)
    assert torch.equal(q, plain[0])
    assert torch.equal(v, plain[2])
    s = scores(q, k)
    best = s.amax(-1, keepdim=True)
    positive = best.squeeze(-1) > 0
    assert int(positive.sum()) > 50
    assert set((s == best).sum(-1)[positive].tolist()) == {copies}


@pytest.mark.parametrize(("scale", "raised", "dim"), [(0.25, None, 16), (1.0, 3.0, 1), (0.25, -2.0, 16), (1.0, 0.0, 16)])
def test_the_sink_raises_every_score_at_key_0(scale: float, raised: float | None, dim: int) -> None:
    """Over that of the other coordinates; the first coordinate is for the sink alone. d products, a root squared, two sums."""
    shape = Shape(batch=2, heads=4, kv_heads=2, queries=30, keys=20, head_dim=dim)
    q, k, v = (Sink() if raised is None else Sink(raised)).draw(shape, scale, 5)
    plain_q, plain_k, plain_v = Normal().draw(shape, scale, 5)
    assert torch.equal(v, plain_v)
    expected = scores(plain_q[..., 1:], plain_k[..., 1:]) * scale
    found = scores(q, k) * scale
    expected[..., 0] += 10.0 if raised is None else raised
    loose = (dim + 6) * U64 * scale * scores(q.abs(), k.abs())
    assert bool(((found - expected).abs() <= loose).all())


@pytest.mark.parametrize(("scale", "gap", "dim"), [(0.25, None, 16), (1.0, 3.0, 1), (128**-0.5, -2.0, 16), (1.0, 0.0, 16)])
def test_the_gap_is_exact_and_has_no_noise(scale: float, gap: float | None, dim: int) -> None:
    """Every score but those of key 0 is 0; those are off by the quotient's and the product's roundoff, 0 with a power of two."""
    shape = Shape(batch=2, heads=4, kv_heads=2, queries=30, keys=20, head_dim=dim)
    q, k, v = (Gap() if gap is None else Gap(gap)).draw(shape, scale, 5)
    assert torch.equal(v, Normal().draw(shape, scale, 5)[2])
    found, wanted = scores(q, k) * scale, 10.0 if gap is None else gap
    assert bool((found[..., 1:] == 0).all())
    exact = math.log2(scale) % 1 == 0
    assert bool(((found[..., 0] - wanted).abs() <= (0.0 if exact else 2 * U64 * abs(wanted))).all())
    for drawn in (q, k):
        assert torch.equal(drawn.bfloat16().double(), drawn) or not exact


ONLY_PARAMETER = [(kind, each.name) for kind in DISTRIBUTIONS for each in declared(kind)]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (NormalLogits, "std", 0.0),
        (NormalLogits, "std", -1.0),
        (Outliers, "share", -0.1),
        (Outliers, "share", 1.1),
        (StudentT, "df", 0.0),
        (Tied, "copies", 0),
        (Tied, "copies", 9),  # of 8 keys
        *((kind, name, bad) for kind, name in ONLY_PARAMETER if kind is not Tied for bad in (math.nan, math.inf, -math.inf)),
    ],
)
def test_bad_parameters_are_refused_by_name(kind: type[Drawn], name: str, value: float) -> None:
    with pytest.raises(BadInput) as caught:
        kind(**{name: value}).draw(Shape(queries=4, keys=8, head_dim=8), 1.0, 0)
    assert caught.value.field == f"problem.source.{name}"
    assert kind().kind.value in caught.value.hint


@pytest.mark.parametrize(("kind", "words"), [(Kind.UNIFORM, "no parameter"), (Kind.SINK, "takes rise")])
def test_a_parameter_that_it_has_not_is_refused(kind: Kind, words: str) -> None:
    assert Distribution(Kind.SINK, rise=3.0) == Sink(3.0)
    with pytest.raises(BadInput, match=rf"^problem\.source\.copies: 3 .*{kind.value} .*{words}"):
        Distribution(kind, copies=3)
