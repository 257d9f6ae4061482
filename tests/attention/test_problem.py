"""Problems: what is refused, and inputs that are a function of their arguments and what their kind says, within five errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from scipy import stats
from torch import Tensor

from numdev import Distribution, Gap, Kind, Mask, Normal, NormalLogits, Outliers, Problem, Shape, Sink, StudentT, Tied, Uniform
from numdev.attention.problem import DISTRIBUTIONS, Drawn
from numdev.errors import BadInput
from numdev.settings import declared
from tests.cases import U64

LARGE = Shape(batch=2, heads=4, kv_heads=2, queries=256, keys=300, head_dim=32)
SIGMAS = 5  # a sound generator fails one such check in a million; the seeds are fixed, so a pass stays a pass


def scores(q: Tensor, k: Tensor) -> Tensor:
    """`q . k` of every query and key as sums in one order, so that equal keys have equal bits."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q[:, :, :, None] * k[:, :, None]).sum(-1)


def check_mean(values: Tensor, mean: float, variance: float) -> None:
    """The mean of n independent values has standard error sqrt(variance / n)."""
    assert abs(float(values.mean()) - mean) <= SIGMAS * math.sqrt(variance / values.numel())


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


@dataclass(frozen=True)
class Law:
    """Mean and variance, the variance of the squared distance from the mean, and the chance of being below x."""

    source: Drawn
    mean: float
    variance: float
    fourth: float
    below: Callable[[float], float]


def student(freedom: float) -> Law:
    return Law(StudentT(freedom), 0.0, math.nan, math.nan, lambda x: float(stats.t.cdf(x, freedom)))


def outliers(p: float) -> Law:
    """A mixture of N(0, 1) and, with probability p, N(0, 101): E x^2 = 1 + 100 p, E x^4 = 3 (1 - p + 101^2 p)."""
    variance = 1 + 100 * p

    def below(x: float) -> float:
        return float((1 - p) * stats.norm.cdf(x) + p * stats.norm.cdf(x / math.sqrt(101)))

    return Law(Outliers(p), 0.0, variance, 3 * (1 - p + 101**2 * p) - variance**2, below)


LAWS = [
    Law(Uniform(), 0.5, 1 / 12, 1 / 180, lambda x: min(max(x, 0.0), 1.0)),  # 1/80 - 1/144 = 1/180
    Law(Normal(), 0.0, 1.0, 2.0, lambda x: float(stats.norm.cdf(x))),
    *map(outliers, (0.0, 1e-3, 0.02, 1.0)),
    *map(student, (1.0, 3.0, 30.0)),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: str(law.source))
def test_numbers_have_their_distribution(law: Law) -> None:
    values = torch.cat([t.flatten() for t in law.source.draw(LARGE, 1.0, 0)])
    if not math.isnan(law.variance):
        check_mean(values, law.mean, law.variance)
        check_mean((values - law.mean).square(), law.variance, law.fourth)
    for edge in (-6.0, -2.0, 0.0, 0.01, 0.25, 0.9, 1.0, 5.0):
        check_mean((values < edge).double(), law.below(edge), law.below(edge) * (1 - law.below(edge)))


@pytest.mark.parametrize(("scale", "sigma"), [(32**-0.5, None), (1.0, 0.5), (0.03, 20.0)])
def test_scores_have_the_standard_deviation_asked_for(scale: float, sigma: float | None) -> None:
    """The mean of S^2 over n queries, n keys and h heads, for q and k of variance s^2 in d dimensions.

    It is scale^2 tr(A B), A and B the second moments of q and k: its mean is scale^2 d s^4, its variance, first given B and
    then over B, 2 (2 + (d + 1) / n) / (n d h) times the square of that (E tr B^2 = s^4 (d + d (d + 1) / n)).
    """
    n, d, heads = 200, 32, 4
    shape = Shape(heads=heads, kv_heads=heads, queries=n, keys=n, head_dim=d)
    q, k, v = (NormalLogits() if sigma is None else NormalLogits(sigma)).draw(shape, scale, 0)
    squared = float(scores(q, k).mul(scale).square().mean()) / (4.0 if sigma is None else sigma) ** 2
    assert abs(squared - 1) < SIGMAS * math.sqrt(2 * (2 + (d + 1) / n) / (n * d * heads))
    check_mean(v.square(), 1.0, 2.0)
    check_mean(q.square() / float(k.square().mean()), 1.0, 2.0 * 2)  # both carry the same spread; k's mean is as uncertain


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


@pytest.mark.parametrize(("scale", "rise", "dim"), [(0.25, 10.0, 16), (1.0, 3.0, 1), (128**-0.5, -2.0, 16), (1.0, 0.0, 16)])
def test_the_sink_and_the_gap_raise_every_score_at_key_0(scale: float, rise: float, dim: int) -> None:
    """The sink over that of the other coordinates: d products, a root squared, two sums. The gap has no noise.

    Its scores are off by the quotient's and the product's roundoff, and by none with a power of two.
    """
    shape = Shape(batch=2, heads=4, kv_heads=2, queries=30, keys=20, head_dim=dim)
    plain_q, plain_k, plain_v = Normal().draw(shape, scale, 5)
    for source in (Sink(rise), Gap(rise)):
        q, k, v = source.draw(shape, scale, 5)
        assert torch.equal(v, plain_v)
        expected = scores(plain_q[..., 1:], plain_k[..., 1:]) * scale if isinstance(source, Sink) else torch.zeros(2, 4, 30, 20)
        expected[..., 0] += rise
        loose = (dim + 6) * U64 * scale * scores(q.abs(), k.abs())
        assert bool(((scores(q, k) * scale - expected).abs() <= loose).all())
    exact = math.log2(scale) % 1 == 0
    got = scores(q, k) * scale
    assert bool((got[..., 1:] == 0).all())
    assert bool(((got[..., 0] - rise).abs() <= (0.0 if exact else 2 * U64 * abs(rise))).all())
    assert all(torch.equal(drawn.bfloat16().double(), drawn) or not exact for drawn in (q, k))
    assert (Sink(), Gap()) == (Sink(10.0), Gap(10.0))


ONLY_PARAMETER = [(kind, each.name) for kind in DISTRIBUTIONS for each in declared(kind)]


BAD: list[tuple[type[Drawn], str, float]] = [
    (NormalLogits, "std", 0.0),
    (NormalLogits, "std", -1.0),
    (Outliers, "share", -0.1),
    (Outliers, "share", 1.1),
]
BAD += [(StudentT, "df", 0.0), (Tied, "copies", 0), (Tied, "copies", 9)]  # of 8 keys
BAD += [(kind, name, bad) for kind, name in ONLY_PARAMETER if kind is not Tied for bad in (math.nan, math.inf, -math.inf)]


@pytest.mark.parametrize(("kind", "name", "value"), BAD)
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


NORMAL = Distribution(Kind.NORMAL)


def test_problems_that_are_refused_and_their_scale() -> None:
    for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim"):
        with pytest.raises(BadInput, match=f"^problem.{name}: 0 "):
            Shape(**{name: 0})
    with pytest.raises(BadInput, match="^problem.kv_heads: 2"):
        Shape(heads=3, kv_heads=2)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(BadInput, match="^problem.scale: "):
            Problem(NORMAL, scale=scale)
    mask = Mask(causal=True)
    assert Problem(NORMAL, Shape(head_dim=16), mask).arguments() == {"mask": mask, "scale": 0.25}
    assert Problem(NORMAL, Shape(head_dim=64), scale=3.0).softmax_scale == 3.0
