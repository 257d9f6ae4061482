"""Problems: shapes, a mask, a scale, and where q, k and v come from; a distribution is a class with its own parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar

from jaxtyping import Float

from numdev.attention.mask import Mask
from numdev.errors import BadInput
from numdev.lazy import torch
from numdev.settings import held, inline, setting

REPLICATES = 10
"""Draws of a distribution, unless a number is given."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one problem. `kv_heads` below `heads` is grouped-query attention, 1 multi-query attention."""

    batch: int = setting(1, "sequences in a batch", "count", word="batch size")
    heads: int = setting(1, "attention heads, each with a q of its own", "count", word="heads")
    kv_heads: int = setting(
        1,
        "heads of k and v; fewer than heads of q in grouped-query attention, 1 in multi-query attention",
        "count",
        word="heads of k and v",
        follows=".heads",
    )
    queries: int = setting(None, "length of q, and rows of the output in each head", "tokens", word="queries", follows=".n")
    keys: int = setting(
        None, "length of k and v, which is N where there are as many queries", "tokens", word="keys", follows=".n"
    )
    head_dim: int = setting(64, "d, the length of one row of q, k or v", "entries", word="head dimension d")
    _: KW_ONLY
    n: InitVar[int] = setting(
        1024, "queries and keys", "tokens", column="", overruled={"queries": None, "keys": None}, word="sequence length N"
    )

    def __post_init__(self, n: int) -> None:
        for name in ("queries", "keys"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, n)
        for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim"):
            if getattr(self, name) < 1:
                raise BadInput(f"problem.{name}", getattr(self, name), "give a whole number of at least 1")
        if self.heads % self.kv_heads:
            raise BadInput("problem.kv_heads", self.kv_heads, f"it must divide problem.heads, {self.heads}")

    def packed(self, mask: Mask, most: int) -> Shape:
        """As a kernel that packs heads computes it: where it can, the heads that share a KV head are rows of one head.

        It can with one query, which sees every key under a causal limit too, and without a limit with at most `most` rows of a
        KV head; not in a window.
        """
        rows = self.heads // self.kv_heads * self.queries
        packs = mask.window is None and (self.queries == 1 or (rows <= most and not mask.causal))
        return replace(self, heads=self.kv_heads, queries=rows) if packs else self

    @property
    def q(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.head_dim

    @property
    def kv(self) -> tuple[int, int, int, int]:
        return self.batch, self.kv_heads, self.keys, self.head_dim


class Source:
    """Where q, k and v come from: a seeded distribution, to which the defaults apply, or captured tensors."""

    def draw(
        self, shape: Shape, scale: float, seed: int
    ) -> tuple[
        Float[torch.Tensor, "batch heads queries dim"],
        Float[torch.Tensor, "batch kv_heads keys dim"],
        Float[torch.Tensor, "batch kv_heads keys dim"],
    ]:
        """q, k, v in FP64 on the CPU, a function of the arguments alone."""
        raise NotImplementedError

    def gradient(self, shape: Shape, seed: int) -> Float[torch.Tensor, "batch heads queries dim"] | None:
        """dO of a replicate, in FP64 on the CPU; None where the source has none, and the backward pass draws one."""
        return None

    def mask(self, shape: Shape, **fields: Any) -> Mask:
        """The mask under which the tensors were computed, some of its fields replaced; nothing masked for drawn ones."""
        return Mask(**fields)

    def scale(self) -> float | None:
        """The scale under which the tensors were computed; None for 1/sqrt(head_dim), and for drawn ones."""
        return None

    def replicates(self, shape: Shape) -> int | None:
        """How many replicates there are; None where any number can be drawn."""
        return None

    def cluster(self, shape: Shape, seed: int) -> str:
        """The group of replicates that are alike to which one belongs, such as a layer; empty where all are independent."""
        return ""


_OF_SOURCE = Mask()
"""Stands, by its identity, for the mask of the source."""


@dataclass(frozen=True)
class Problem:
    """One attention problem; `problem.inputs(seed)` draws its replicate.

    Mask and scale are those of captured tensors unless given; drawn ones are not masked, and their scale is 1/sqrt(head_dim).
    `causal`, `window`, `key_lengths` and `softcap` replace these fields of the source's mask.
    """

    source: Source = held()
    shape: Shape = inline(Shape)
    mask: Mask = _OF_SOURCE
    scale: float | None = setting(None, "factor of Q K^T; empty for that of captured tensors, else 1/sqrt(d)")
    _: KW_ONLY
    causal: InitVar[bool | None] = setting(
        None,
        "whether a query sees no key behind its own position; the last query stands at the last key; "
        "empty for the mask of captured tensors, else false",
        column="mask.causal",
        word="causal mask",
    )
    window: InitVar[int | None] = setting(
        None,
        "a query sees only keys less far from its position than this; empty for that of captured tensors, else none",
        "tokens",
        column="mask.window",
        word="window",
    )
    key_lengths: InitVar[tuple[int, ...] | None] = setting(
        None,
        "keys that exist in each batch entry, the rest is padding; empty for those of captured tensors, else all",
        "tokens",
        column="mask.key_lengths",
    )
    softcap: InitVar[float | None] = setting(
        None,
        "cap in S = cap tanh(scale Q K^T / cap), such as 50 in Gemma 2; empty for that of captured tensors, else none",
        column="mask.softcap",
        word="softcap",
    )

    def __post_init__(
        self, causal: bool | None, window: int | None, key_lengths: tuple[int, ...] | None, softcap: float | None
    ) -> None:
        fields = {"causal": causal, "window": window, "key_lengths": key_lengths, "softcap": softcap}
        if self.mask is _OF_SOURCE:
            mask = self.source.mask(self.shape, **{name: value for name, value in fields.items() if value is not None})
            object.__setattr__(self, "mask", mask)
        if self.scale is None:
            object.__setattr__(self, "scale", self.source.scale())
        self.mask.check(self.shape.batch, self.shape.keys, self.shape.heads, self.shape.queries)
        if self.scale is not None and not 0 < self.scale < float("inf"):
            raise BadInput("problem.scale", self.scale, "give a positive finite factor, or null for 1/sqrt(head_dim)")

    @property
    def softmax_scale(self) -> float:
        """`scale`, which is 1/sqrt(head_dim) where nothing says another."""
        return float(self.shape.head_dim**-0.5) if self.scale is None else self.scale

    def inputs(self, seed: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The replicate's `q`, `k`, `v` in FP64: drawn on the CPU, so the same on every device."""
        q, k, v = self.source.draw(self.shape, self.softmax_scale, seed)
        return {"q": q.to(device), "k": k.to(device), "v": v.to(device)}

    def replicates(self, seeds: int | None = None) -> int:
        """How many replicates a measurement has: `seeds` where given, else all that the source has, else `REPLICATES`."""
        return (self.source.replicates(self.shape) or REPLICATES) if seeds is None else seeds

    def cluster(self, seed: int) -> str:
        """See `Source.cluster`."""
        return self.source.cluster(self.shape, seed)

    @property
    def bytes(self) -> int:
        """About what a measurement holds at once: inputs, rounded inputs, golden twice, baseline, state, in FP64."""
        q, k = self.shape.batch * self.shape.heads * self.shape.queries, self.shape.batch * self.shape.kv_heads * self.shape.keys
        return 8 * self.shape.head_dim * (12 * q + 6 * k)

    def arguments(self) -> dict[str, Mask | float]:
        """The arguments of an attention besides the tensors."""
        return {"mask": self.mask, "scale": self.softmax_scale}


@dataclass(frozen=True)
class BackwardProblem(Problem):
    """A problem whose v and dO need not have mean 0: `v_mean` is added to v, and dO is N(do_mean, 1).

    If all rounding errors of O have the sign of v, they add up in delta, the sum of dO * O, when dO has a nonzero mean too (Qiu &
    Yao 2025, arXiv 2510.04212). With independent dO of mean 0 they average out.
    """

    v_mean: float = setting(0.0, "what is added to every entry of v")
    do_mean: float = setting(0.0, "mean of the entries of dO, which are normal with variance 1")

    def inputs(self, seed: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """See `Problem.inputs`."""
        drawn = super().inputs(seed, device)
        return drawn if self.v_mean == 0 else drawn | {"v": drawn["v"] + self.v_mean}


_STREAM = 0x9E3779B9  # changes the seed, so that dO is independent of q, k and v of any small seed; torch reads 32 bits of it


def draw_do(problem: Any, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`do` `[batch, heads, queries, head_dim]` in FP64, drawn on the CPU, so it is equal on every device.

    If the problem's source provides dO, as captured tensors may, it is taken from there; otherwise entries are independent
    N(mean, 1), where the mean is `do_mean` of a `BackwardProblem` and 0 for other problems.
    """
    mean = problem.do_mean if isinstance(problem, BackwardProblem) else 0.0
    do = problem.source.gradient(problem.shape, seed)
    if do is None:
        generator = torch.Generator().manual_seed(seed ^ _STREAM)
        do = torch.randn(problem.shape.q, dtype=torch.float64, generator=generator) + mean
    elif mean != 0:
        raise BadInput("problem.do_mean", mean, "dO comes from the captured file; give 0, or a file without dO")
    return {"do": do.to(device)}


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
    """Independent entries of q, k and v, in FP64, by a seed; a class for each distribution says which."""

    kind: Kind = field(init=False)  # the distribution's name
    # Whether a parameter can have a value, and what to give instead
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
