"""Seeded random inputs: one class for each distribution, with its own parameter by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from numdev.attention.problem import Shape, Source
from numdev.errors import BadInput
from numdev.lazy import torch
from numdev.settings import setting

Size = tuple[int, int, int, int]


class Kind(Enum):
    """The distributions by name; see the class of each."""

    UNIFORM = "uniform"
    NORMAL = "normal"
    NORMAL_LOGITS = "normal_logits"
    OUTLIERS = "outliers"
    STUDENT_T = "student_t"
    TIED = "tied"
    SINK = "sink"
    GAP = "gap"
    CONSTANT = "constant"


@dataclass(frozen=True)
class Drawn(Source):
    """Independent entries of q, k and v, in FP64, by a seed; a class for each distribution says which.

    Attributes:
        kind: the distribution's name.
        takes: whether a parameter can have a value, and what to give instead.
    """

    kind: Kind = field(init=False)
    takes: ClassVar[tuple[Callable[[float], bool], str]] = (math.isfinite, "give a finite number")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (int, float)):
                for accepts, hint in (Drawn.takes, self.takes):
                    self._require(accepts(value), each.name, hint)

    def draw(self, shape: Shape, scale: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (self.entries(size, generator) for size in (shape.q, shape.kv, shape.kv))
        return *self.posed(q, k, scale), v

    def entries(self, size: Size, generator: torch.Generator) -> torch.Tensor:
        """The entries of one of the three, normal unless the distribution says otherwise."""
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def posed(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The drawn q and k, changed so that their scores under `scale` are those of the distribution."""
        return q, k

    def _require(self, holds: bool, name: str, hint: str) -> None:
        if not holds:
            raise BadInput(f"problem.source.{name}", getattr(self, name), f"{self.kind.value}: {hint}")


@dataclass(frozen=True)
class Uniform(Drawn):
    """U[0, 1)."""

    kind: Kind = field(init=False, default=Kind.UNIFORM)

    def entries(self, size: Size, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Normal(Drawn):
    """N(0, 1)."""

    kind: Kind = field(init=False, default=Kind.NORMAL)


@dataclass(frozen=True)
class NormalLogits(Drawn):
    """v ~ N(0, 1); q and k normal, such that scores have standard deviation `std`."""

    kind: Kind = field(init=False, default=Kind.NORMAL_LOGITS)
    std: float = setting(4.0, "standard deviation of the scores of normal_logits")
    takes = (lambda std: std > 0, "give a positive number, such as 4")

    def posed(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Var(q . k) = d s^4 for entries of variance s^2, so s^2 = std / (scale sqrt(d))."""
        spread = math.sqrt(self.std / (scale * math.sqrt(q.shape[-1])))
        return q * spread, k * spread


@dataclass(frozen=True)
class Outliers(Drawn):
    """N(0, 1) + N(0, 100) * Bernoulli(share) (FlashAttention-3, section 4.3)."""

    kind: Kind = field(init=False, default=Kind.OUTLIERS)
    share: float = setting(1e-3, "share of the entries of outliers that get N(0, 100) on top")
    takes = (lambda share: 0 <= share <= 1, "give a share from 0 to 1, such as 0.001")

    def entries(self, size: Size, generator: torch.Generator) -> torch.Tensor:
        base, large = super().entries(size, generator), super().entries(size, generator) * 10.0  # N(0, 100): variance 100
        return base + large * (torch.rand(size, generator=generator, dtype=torch.float64) < self.share)


@dataclass(frozen=True)
class StudentT(Drawn):
    """Student's t."""

    kind: Kind = field(init=False, default=Kind.STUDENT_T)
    df: float = setting(3.0, "degrees of freedom of student_t", "count")
    takes = (lambda df: df > 0, "give a positive number, such as 3")

    def entries(self, size: Size, generator: torch.Generator) -> torch.Tensor:
        """t = Z / sqrt(chi2_nu / nu); chi2_nu / 2 ~ Gamma(nu / 2)."""
        import numpy as np  # late: `--help` knows the distributions

        normal = super().entries(size, generator)
        chi2 = 2.0 * torch._standard_gamma(torch.full(size, self.df / 2, dtype=torch.float64), generator=generator)
        # NumPy's root is correctly rounded everywhere; torch's is an ulp off for some arguments on some processors.
        return normal / torch.from_numpy(np.sqrt((chi2 / self.df).numpy()))


@dataclass(frozen=True)
class Tied(Drawn):
    """Normal, and each query's best key occurs `copies` times, if its score is positive."""

    kind: Kind = field(init=False, default=Kind.TIED)
    copies: int = setting(4, "how often each query's best key occurs in tied", "count")
    takes = (lambda copies: copies >= 1, "give a whole number of at least 1, such as 4")

    def posed(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `keys // copies` keys over and over, so that every key, and every query's best, occurs `copies` times.

        What is left of the keys is 0, whose score of 0 is below any positive one.
        """
        keys = k.shape[-2]
        distinct = keys // self.copies
        self._require(distinct > 0, "copies", f"there are only {keys} keys to be copies")
        tied = torch.zeros_like(k)
        tied[:, :, : distinct * self.copies] = k[:, :, :distinct].repeat(1, 1, self.copies, 1)
        return q, tied


@dataclass(frozen=True)
class Sink(Drawn):
    """Normal, and every query's score at key 0 is raised by `rise`."""

    kind: Kind = field(init=False, default=Kind.SINK)
    rise: float = setting(10.0, "by how much every score at key 0 is raised in sink")

    def posed(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """All queries get the same component along the first coordinate, and key 0 alone a matching one."""
        raised = self.rise / scale
        q, k = q.clone(), k.clone()
        length = math.sqrt(abs(raised))
        q[..., 0] = length
        k[..., 0] = 0.0
        k[:, :, 0, 0] = math.copysign(length, raised)
        return q, k


@dataclass(frozen=True)
class Gap(Drawn):
    """v ~ N(0, 1); every query's score is `gap` at key 0 and 0 at every other key: a sink without noise."""

    kind: Kind = field(init=False, default=Kind.GAP)
    gap: float = setting(10.0, "every query's score at key 0 in gap, where all others are 0")

    def posed(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Products of two numbers with no sum.

        Every query is the first unit vector, a number of every format; key 0 is `gap / scale` times it, which a format rounds
        once.
        """
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0] = 1.0
        k[:, :, 0, 0] = self.gap / scale
        return q, k


@dataclass(frozen=True)
class Constant(Drawn):
    """Every entry is `value`."""

    kind: Kind = field(init=False, default=Kind.CONSTANT)
    value: float = setting(1.0, "every entry in constant")

    def entries(self, size: Size, generator: torch.Generator) -> torch.Tensor:
        return torch.full(size, self.value, dtype=torch.float64)


DISTRIBUTIONS = (Uniform, Normal, NormalLogits, Outliers, StudentT, Tied, Sink, Gap, Constant)


def Distribution(kind: Kind = Kind.UNIFORM, **parameters: int | float) -> Drawn:  # noqa: N802, it is called as the classes are
    """The distribution of a name with its own parameters: `Distribution(Kind.SINK, rise=3.0)` is `Sink(3.0)`."""
    made: type[Any] = next(each for each in DISTRIBUTIONS if each.kind is kind)
    known = [each.name for each in fields(made) if each.init]
    for name, value in parameters.items():
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no parameter"
            raise BadInput(f"problem.source.{name}", value, f"{kind.value} {takes}")
    drawn: Drawn = made(**parameters)
    return drawn
