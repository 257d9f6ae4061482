"""Seeded random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Generator, Tensor

from numdev.attention.problem import Shape
from numdev.errors import BadInput

Size = tuple[int, int, int, int]


class Kind(Enum):
    """What the entries of q, k and v are."""

    UNIFORM = "uniform"  # U[0, 1)
    NORMAL = "normal"  # N(0, 1)
    NORMAL_LOGITS = "normal_logits"  # v ~ N(0, 1); q and k normal, such that scores have standard deviation `parameter`
    OUTLIERS = "outliers"  # N(0, 1) + N(0, 100) * Bernoulli(parameter) (FlashAttention-3, section 4.3)
    STUDENT_T = "student_t"  # Student's t with `parameter` degrees of freedom
    TIED = "tied"  # normal, and each query's best key occurs `parameter` times, if its score is positive
    SINK = "sink"  # normal, and every query's score at key 0 is raised by `parameter`
    GAP = "gap"  # v ~ N(0, 1); every query's score is `parameter` at key 0 and 0 at every other key: a sink without noise
    CONSTANT = "constant"  # every entry is `parameter`


_DEFAULTS = {
    Kind.NORMAL_LOGITS: 4.0,
    Kind.OUTLIERS: 1e-3,
    Kind.STUDENT_T: 3.0,
    Kind.TIED: 4.0,
    Kind.SINK: 10.0,
    Kind.GAP: 10.0,
    Kind.CONSTANT: 1.0,
}


@dataclass(frozen=True)
class Distribution:
    """Independent entries of one kind, in FP64.

    Attributes:
        kind: see `Kind`.
        parameter: what `Kind` says of it; None takes the default (logits 4, outliers 0.001, t 3, tied 4, sink 10,
            gap 10, constant 1).
    """

    kind: Kind = Kind.UNIFORM
    parameter: float | None = None

    def __post_init__(self) -> None:
        if self.parameter is None:
            object.__setattr__(self, "parameter", _DEFAULTS.get(self.kind))
            return
        fits = {
            Kind.NORMAL_LOGITS: self.parameter > 0,
            Kind.OUTLIERS: 0 <= self.parameter <= 1,
            Kind.STUDENT_T: self.parameter > 0,
            Kind.TIED: self.parameter >= 1 and self.parameter % 1 == 0,
            Kind.SINK: True,
            Kind.GAP: True,
            Kind.CONSTANT: True,
        }.get(self.kind, False)
        if not (fits and math.isfinite(self.parameter)):
            takes = "takes no parameter" if self.kind not in _DEFAULTS else f"takes such as {_DEFAULTS[self.kind]:g}"
            raise BadInput("problem.source.parameter", self.parameter, f"{self.kind.value} {takes}")

    def replicates(self, shape: Shape) -> None:
        """Any number can be drawn."""

    def cluster(self, shape: Shape, seed: int) -> str:
        """None: draws are independent."""
        return ""

    def draw(self, shape: Shape, scale: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in FP64 on the CPU: a function of the arguments alone."""
        generator = torch.Generator().manual_seed(seed)
        entries = _ENTRIES.get(self.kind, _normal)
        parameter = 0.0 if self.parameter is None else self.parameter
        q, k, v = (entries(size, generator, parameter) for size in (shape.q, shape.kv, shape.kv))
        if self.kind is Kind.NORMAL_LOGITS:
            # Var(q . k) = d s^4 for entries of variance s^2, so s^2 = sigma / (scale sqrt(d)).
            spread = math.sqrt(parameter / (scale * math.sqrt(shape.head_dim)))
            return q * spread, k * spread, v
        if self.kind is Kind.TIED:
            return q, _tie(k, int(parameter)), v
        if self.kind is Kind.SINK:
            return *_sink(q, k, parameter / scale), v
        if self.kind is Kind.GAP:
            return *_sink_alone(q, k, parameter / scale), v
        return q, k, v


def _uniform(size: Size, generator: Generator, _: float) -> Tensor:
    return torch.rand(size, generator=generator, dtype=torch.float64)


def _normal(size: Size, generator: Generator, _: float) -> Tensor:
    return torch.randn(size, generator=generator, dtype=torch.float64)


def _outliers(size: Size, generator: Generator, probability: float) -> Tensor:
    base, large = _normal(size, generator, 0.0), _normal(size, generator, 0.0) * 10.0  # N(0, 100): variance 100
    return base + large * (_uniform(size, generator, 0.0) < probability)


def _student_t(size: Size, generator: Generator, freedom: float) -> Tensor:
    # t = Z / sqrt(chi2_nu / nu); chi2_nu / 2 ~ Gamma(nu / 2).
    normal = _normal(size, generator, 0.0)
    chi2 = 2.0 * torch._standard_gamma(torch.full(size, freedom / 2, dtype=torch.float64), generator=generator)
    # NumPy's root is correctly rounded everywhere; torch's is an ulp off for some arguments on some processors.
    return normal / torch.from_numpy(np.sqrt((chi2 / freedom).numpy()))


def _constant(size: Size, _: Generator, value: float) -> Tensor:
    return torch.full(size, value, dtype=torch.float64)


_ENTRIES: dict[Kind, Callable[[Size, Generator, float], Tensor]] = {
    Kind.UNIFORM: _uniform,
    Kind.OUTLIERS: _outliers,
    Kind.STUDENT_T: _student_t,
    Kind.CONSTANT: _constant,
}


def _tie(k: Tensor, copies: int) -> Tensor:
    """The first `keys // copies` keys over and over, so that every key, and with it every query's best, occurs `copies` times.

    What is left of the keys is 0, whose score of 0 is below any positive one.
    """
    keys = k.shape[-2]
    distinct = keys // copies
    if distinct == 0:
        raise BadInput("problem.source.parameter", copies, f"there are only {keys} keys to be copies")
    tied = torch.zeros_like(k)
    tied[:, :, : distinct * copies] = k[:, :, :distinct].repeat(1, 1, copies, 1)
    return tied


def _sink(q: Tensor, k: Tensor, raised: float) -> tuple[Tensor, Tensor]:
    """q and k such that every query's product with key 0 is larger by `raised`.

    All queries get the same component along the first coordinate, and key 0 alone a matching one.
    """
    q, k = q.clone(), k.clone()
    length = math.sqrt(abs(raised))
    q[..., 0] = length
    k[..., 0] = 0.0
    k[:, :, 0, 0] = math.copysign(length, raised)
    return q, k


def _sink_alone(q: Tensor, k: Tensor, gap: float) -> tuple[Tensor, Tensor]:
    """q and k whose product is `gap` at key 0 and 0 elsewhere, each a product of two numbers with no sum.

    Every query is the first unit vector, a number of every format; key 0 is `gap` times it, which a format rounds once.
    """
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1.0
    k[:, :, 0, 0] = gap
    return q, k
