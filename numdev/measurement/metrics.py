"""How far one tensor is from a reference: every metric, from one pass over the difference.

A `Sample` holds the values of a tensor, and what every comparison with it needs again: sorted values, norms, ulp. Squares and
sums of FP64 numbers may lie outside the range of FP64; they are kept as a number and a power of two. Of an error that is a matrix
for each head there are rank and direction too: a small error that keeps its direction adds up over steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput

_ORDINARY = 400  # squares of numbers of size 2^-400 to 2^400, and sums of 2^200 of them, neither underflow nor overflow
_SQUARINGS = 24  # p = 2^24 in `largest_singular`: a part in 10^7 at the worst
_CHUNK = 1 << 16  # values whose differences stay in the cache, and whose sum has one order


@dataclass(frozen=True)
class Scaled:
    """`number * 2^exponent`, which may lie outside the range of FP64 until it is divided by another."""

    number: float
    exponent: int = 0

    def __float__(self) -> float:
        try:
            return math.ldexp(self.number, self.exponent)
        except OverflowError:
            return math.copysign(math.inf, self.number)

    def over(self, other: Scaled) -> float:
        """The quotient; 0/0 is 0, no deviation, and any deviation from an all-zero reference is infinite."""
        if other.number == 0:
            return 0.0 if self.number == 0 else math.inf
        (a, i), (b, j) = math.frexp(self.number), math.frexp(other.number)
        return float(Scaled(a / b, i - j + self.exponent - other.exponent))


def exponent_of(largest: float) -> int:
    """The exponent by which numbers of at most this size are scaled before they are squared or added; 0 if none is needed."""
    exponent = math.frexp(largest)[1]
    return 0 if abs(exponent) <= _ORDINARY else exponent


def shifted(values: Tensor, exponent: int) -> Tensor:
    """`values * 2^exponent`, in two steps, since 2^exponent itself may lie outside the range of FP64."""
    if exponent == 0:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


class Sample:
    """The values of a tensor in FP64, and what every comparison with it needs again."""

    def __init__(self, tensor: Float[Tensor, "*shape"]) -> None:
        self.shape = tensor.shape
        self.values = tensor.detach().double().reshape(-1)
        self._ulp: dict[Format, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the values and of what is computed from them at their length: the same sorted, their signs, their ulp."""
        return 4 * self.values.nbytes

    @cached_property
    def is_finite(self) -> bool:
        """Known by `largest`, which is needed anyway: a maximum of NaN and numbers is NaN."""
        return math.isfinite(self.largest)

    @cached_property
    def ordered(self) -> Tensor:
        return ascending(self.values)

    @cached_property
    def largest(self) -> float:
        return float(self.values.abs().amax())

    @cached_property
    def exponent(self) -> int:
        """Of the power of two that `scaled` leaves out; 0 where every sum of squares is safe."""
        return exponent_of(self.largest)

    @cached_property
    def scaled(self) -> Tensor:
        """`values / 2^exponent`."""
        return shifted(self.values, -self.exponent)

    @cached_property
    def norm(self) -> Scaled:
        return Scaled(float(self.scaled.norm()), self.exponent)

    @cached_property
    def l1(self) -> Scaled:
        return Scaled(float(self.scaled.abs().sum()), self.exponent)

    @cached_property
    def sign(self) -> Tensor:
        return self.values.sign()

    def ulp(self, fmt: Format) -> Tensor:
        """The spacing of a format at each value."""
        if fmt not in self._ulp:
            self._ulp[fmt] = fmt.ulp(self.values)
        return self._ulp[fmt]

    def at(self, places: Tensor) -> Sample:
        return Sample(self.values[places])


def ascending(values: Tensor) -> Tensor:
    """Ascending, with NaN at the end. NumPy sorts 17 times as fast as torch on a CPU (131,072 values in 0.6 ms)."""
    return values.sort().values if values.is_cuda else torch.from_numpy(np.sort(values.numpy()))


def wasserstein(x: Float[Tensor, " n"], y: Float[Tensor, " m"]) -> float:
    """Wasserstein-1 distance between the empirical distributions of two samples, absolute.

    On the line `W1 = int |F_x - F_y|` (Panaretos & Zemel 2019, section 2.1); for equal counts that is the mean distance of the
    sorted samples.

    Raises:
        BadInput: if a sample is empty or not finite.
    """
    if x.numel() == 0 or y.numel() == 0:
        raise BadInput("sample", 0, "each sample needs at least one value")
    first, second = Sample(x), Sample(y)
    if not (first.is_finite and second.is_finite):
        raise BadInput("sample", "NaN or Inf", "leave them out first; Deviation counts them")
    return distance(first, second)


def distance(x: Sample, y: Sample) -> float:
    """The area between two empirical distribution functions."""
    area = _area(x.ordered, y.ordered)
    if math.isfinite(area):
        return area
    down = 2 + max(x.values.numel(), y.values.numel()).bit_length()  # a difference, or a sum of them, went beyond FP64
    return float(Scaled(_area(shifted(x.ordered, -down), shifted(y.ordered, -down)), down))


def _area(x: Tensor, y: Tensor) -> float:
    if x.numel() == y.numel():
        if x.is_cuda:
            return float((x - y).abs_().mean())
        with np.errstate(over="ignore"):
            parts = (np.abs(part).sum() for part in np.split(x.numpy() - y.numpy(), range(_CHUNK, x.numel(), _CHUNK)))
            return float(sum(map(float, parts))) / x.numel()
    both = torch.cat([x, y]).sort().values
    below_x = torch.searchsorted(x, both[:-1], right=True).double() / x.numel()
    below_y = torch.searchsorted(y, both[:-1], right=True).double() / y.numel()
    return float(((below_x - below_y).abs_() * both.diff()).sum())


_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_MOST_BITS = 53.0  # of agreement, as many as FP64 has


def _metric(unit: str, text: str) -> Any:
    return field(metadata={"unit": unit, "text": text})


@dataclass(frozen=True)
class Deviation:
    """Every metric of `x` against a reference `r`, with `D = x - r` over the elements where both are finite.

    Each place where one of the two is not finite is counted once: for `x`, for `r`, or for both if both are NaN or the same
    infinity. The other metrics leave these places out; `compared` is the number of elements that they include, from which a
    comparison may exclude more (`compare`).

    Every metric is accurate over the whole range of FP64: sums of squares are scaled by a power of two, and a result overflows
    or underflows only if it lies outside the range of FP64 itself.
    """

    max_difference: float = _metric("absolute", "max |D|, the paper's max_difference (section V)")
    max_value: float = _metric("absolute", "x where |D| is largest")
    max_reference: float = _metric("absolute", "r where |D| is largest")
    mean: float = _metric("absolute", "mean of D")
    std: float = _metric("absolute", "standard deviation of D")
    mean_absolute: float = _metric("absolute", "mean of |D|")
    rmse: float = _metric("absolute", "root mean square of D")
    relative_frobenius: float = _metric("relative", "||D||_2 / ||r||_2")
    relative_l1: float = _metric("relative", "||D||_1 / ||r||_1")
    cosine_similarity: float = _metric("relative", "x.r / (||x|| ||r||)")
    wasserstein: float = _metric("absolute", "Wasserstein-1 distance of the distributions of the values of x and r")
    p50: float = _metric("absolute", "median of |D|")
    p90: float = _metric("absolute", "90th percentile of |D|")
    p99: float = _metric("absolute", "99th percentile of |D|")
    p99_9: float = _metric("absolute", "99.9th percentile of |D|")
    bias: float = _metric("absolute", "mean of sign(r) D: positive where x is drawn away from zero")
    bias_error: float = _metric("absolute", "standard error of bias, were the elements independent")
    max_ulp: float = _metric("ulp", "max |D| / ulp(r), in the format of the output")
    max_u: float = _metric("u", "max |D| / (u max |r|), normwise, in units of the unit roundoff of the output")
    equal_share: float = _metric("relative", "share of elements with D = 0")
    agreement_bits: float = _metric("bits", "-log2(max |D| / max |r|), at most 53")
    nan_count: int = _metric("count", "NaN in x alone: r has none there")
    inf_count: int = _metric("count", "Inf in x alone: r is neither the same there nor NaN")
    reference_nan_count: int = _metric("count", "NaN in r alone: x has none there")
    reference_inf_count: int = _metric("count", "Inf in r alone: x is finite there")
    both_nan_count: int = _metric("count", "NaN in x and r alike")
    both_inf_count: int = _metric("count", "the same Inf in x and r, which do not differ there")
    compared: int = _metric("count", "elements that the other metrics are taken over")
    max_index: tuple[int, ...] = field(default=(), metadata={"unit": "index", "text": "where |D| is largest"})

    @staticmethod
    def between(x: Float[Tensor, "*shape"], reference: Float[Tensor, "*shape"], fmt: Format) -> Deviation:
        """Compare `x` with a reference of the same shape; `fmt` is the format of `x`, for ulp and u.

        Raises:
            BadInput: if the shapes differ or are empty.
        """
        if x.shape != reference.shape or x.numel() == 0:
            raise BadInput("reference", tuple(reference.shape), f"give the shape of x, {tuple(x.shape)}, not empty")
        return compare(Sample(x), Sample(reference), fmt)

    @property
    def is_finite(self) -> bool:
        """Whether neither `x` nor the reference has NaN, and each has Inf only where the other has the same."""
        return not any(getattr(self, name) for name in NONFINITE)

    def metrics(self) -> dict[str, float]:
        """Every metric by name, without the index."""
        return {name: getattr(self, name) for name in METRICS}

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{f.name}</td><td>{getattr(self, f.name)!s}</td><td>{f.metadata['unit']}</td></tr>" for f in fields(self)
        )
        return f"<table><tr><th>metric</th><th>value</th><th>unit</th></tr>{rows}</table>"


METRICS: dict[str, tuple[str, str]] = {
    f.name: (f.metadata["unit"], f.metadata["text"]) for f in fields(Deviation) if f.name != "max_index"
}


NONFINITE = ("nan_count", "inf_count", "reference_nan_count", "reference_inf_count", "both_nan_count")
"""Metrics that count faults of a comparison; the same infinity on both sides is not a fault."""


def compare(sample: Sample, reference: Sample, fmt: Format, leave_out: Tensor | None = None) -> Deviation:
    """`Deviation.between` on samples, whose sorted values are kept from one comparison to the next.

    `leave_out` marks, in the flattened tensor, the elements that only the counts include.
    """
    shape, counts, places = sample.shape, dict.fromkeys(_COUNTS, 0), None
    if not (sample.is_finite and reference.is_finite and leave_out is None):
        x, r = sample.values, reference.values
        counts, usable = _counts(x, r), x.isfinite() & r.isfinite()
        if leave_out is not None:
            usable &= ~leave_out
        places = usable.nonzero().squeeze(-1)
        if places.numel() == 0:
            return _without_values(counts, equal=bool((x == r).all()))
        sample, reference = sample.at(places), reference.at(places)
    x, r = sample.values, reference.values
    difference, halved = x - r, 0
    absolute = difference.abs()
    if not math.isfinite(float(absolute.amax())):  # beyond FP64
        difference, halved = x / 2 - r / 2, 1
        absolute = difference.abs()
    ordered, worst = ascending(absolute), _first_of_largest(absolute)
    largest = Scaled(float(ordered[-1]), halved)
    exponent = exponent_of(largest.number)
    scaled = shifted(difference, -exponent)

    def size(number: float) -> Scaled:
        return Scaled(number, exponent + halved)

    square, l1, mean = size(float(scaled.norm())), size(float(shifted(absolute, -exponent).sum())), float(scaled.mean())
    signed, root = scaled * reference.sign, math.sqrt(x.numel())
    bias = float(signed.mean())
    # What follows is the last use of each tensor, which it overwrites: half as much memory for the cache of a core.
    spread, spread_signed = _spread_in_place(scaled, mean), _spread_in_place(signed, bias)
    largest_ulp = float(absolute.div_(reference.ulp(fmt)).amax())
    p50, p90, p99, p99_9 = (float(Scaled(value, halved)) for value in _percentiles(ordered))
    share, place = math.frexp(fmt.u)
    return Deviation(
        max_difference=float(largest),
        max_value=float(x[worst]),
        max_reference=float(r[worst]),
        mean=float(size(mean)),
        std=float(size(spread)),
        mean_absolute=float(size(l1.number / x.numel())),
        rmse=float(size(square.number / root)),
        relative_frobenius=square.over(reference.norm),
        relative_l1=l1.over(reference.l1),
        cosine_similarity=_cosine(sample, reference),
        wasserstein=distance(sample, reference),
        p50=p50,
        p90=p90,
        p99=p99,
        p99_9=p99_9,
        bias=float(size(bias)),
        bias_error=float(size(spread_signed / root)),
        max_ulp=float(Scaled(largest_ulp, halved)),
        max_u=largest.over(Scaled(reference.largest, place)) / share,
        equal_share=1.0 - (x.numel() - int(torch.searchsorted(ordered, 0.0, right=True))) / x.numel(),
        agreement_bits=_agreement(largest, reference.largest),
        **counts,
        compared=x.numel(),
        max_index=tuple(int(i) for i in np.unravel_index(worst if places is None else int(places[worst]), shape)),
    )


_COUNTS = (*NONFINITE, "both_inf_count")


def _counts(x: Tensor, r: Tensor) -> dict[str, int]:
    """Each place where one of the two is not finite, once."""
    same = x == r
    places_by_kind = {
        "nan_count": x.isnan() & ~r.isnan(),
        "inf_count": x.isinf() & ~same & ~r.isnan(),
        "reference_nan_count": r.isnan() & ~x.isnan(),
        "reference_inf_count": r.isinf() & x.isfinite(),
        "both_nan_count": x.isnan() & r.isnan(),
        "both_inf_count": x.isinf() & same,
    }
    return {name: int(places.sum()) for name, places in places_by_kind.items()}


def _percentiles(ordered: Tensor) -> list[float]:
    """Linear interpolation between order statistics, as NumPy's default."""
    count, values = ordered.numel(), []
    for percent in _PERCENTILES:
        place = percent / 100.0 * (count - 1)
        below = math.floor(place)
        low, high = float(ordered[below]), float(ordered[min(below + 1, count - 1)])
        values.append(low + (high - low) * (place - below))
    return values


def _spread_in_place(values: Tensor, mean: float) -> float:
    """Standard deviation around a mean already known, dividing by n; overwrites the values."""
    return math.sqrt(float(values.sub_(mean).square_().mean()))


def _cosine(sample: Sample, reference: Sample) -> float:
    if sample.norm.number == 0 or reference.norm.number == 0:
        return 1.0 if sample.norm.number == reference.norm.number else 0.0
    product = sample.norm.number * reference.norm.number
    return max(-1.0, min(1.0, float(sample.scaled.dot(reference.scaled)) / product))


def _agreement(largest: Scaled, top: float) -> float:
    """`log2(top / largest)`, from mantissas and exponents separately, since the quotient may lie outside the range of FP64."""
    if largest.number == 0 or top == 0:
        return _MOST_BITS if largest.number == 0 else 0.0
    (a, i), (b, j) = math.frexp(top), math.frexp(largest.number)
    return max(0.0, min(_MOST_BITS, math.log2(a / b) + (i - j - largest.exponent)))


def _without_values(counts: dict[str, int], equal: bool) -> Deviation:
    """The deviation if no element can be compared: zero if all are equal infinities, else NaN."""
    numbers: dict[str, float] = dict.fromkeys(METRICS, 0.0 if equal else math.nan)
    if equal:
        numbers |= {"cosine_similarity": 1.0, "equal_share": 1.0, "agreement_bits": _MOST_BITS}
    return Deviation(**(numbers | counts | {"compared": 0}))  # type: ignore[arg-type]


def _first_of_largest(values: Tensor) -> int:
    """The index of the largest of several equal numbers that comes first; torch promises none, and takes ten times as long."""
    return int(values.argmax() if values.is_cuda else values.numpy().argmax())


DIRECTED: dict[str, tuple[str, str]] = {
    "stable_rank": (
        "relative",
        "||D||_F^2 / ||D||_2^2 of the error of one head, the mean over heads: 1 if all rows of D are multiples of one vector",
    ),
    "top_share": (
        "relative",
        "sigma_1^2 / ||D||_F^2, the share of the error's energy that lies in its top singular vector, the mean over heads",
    ),
    "step_cosine": (
        "relative",
        "cosine of the error of all heads, as one vector, with that of the seed before: far from 0 if the error does not depend "
        "on the inputs; empty for the first seed",
    ),
    "step_alignment": (
        "relative",
        "|cosine| of the top right singular vector of D, a direction among the dim columns, with that of the seed before, the "
        "mean over heads: 1 if the direction stays, about 0.8 / sqrt(dim) by chance; empty for the first seed",
    ),
}
"""Figures of an error `D`, one matrix `[tokens, dim]` for each head, with unit and meaning; NaN where they are not defined.

Heads without an error have neither rank nor direction and are left out of means. An error that is not finite has neither in any
head; NaN and Inf are counted separately.
"""


@dataclass(frozen=True)
class Direction:
    """The error of one replicate, as the next is compared with it."""

    error: Float[Tensor, " elements"] | None  # the error of all heads as one unit vector; None if the error is 0 or not finite
    # The top right singular vector of each head, up to its sign; 0 for a head without an error
    vectors: Float[Tensor, "heads dim"]
    energy: Float[Tensor, " heads"]  # `||D||_F^2` of each head, in a unit of its own
    top: Float[Tensor, " heads"]  # `||D||_2^2` of each head, in the same unit

    @staticmethod
    def of(sample: Sample, reference: Sample) -> Direction:
        """The direction of `D = x - r`, whose last two dimensions are tokens and dim.

        The singular values are square roots of eigenvalues of the Gram matrix `D^T D`, or of `D D^T` if that is smaller, in
        FP64: the largest is accurate to about `tokens * dim * 2^-53`; the small ones are not accurate, and are not used.

        Raises:
            BadInput: for a tensor of fewer dimensions.
        """
        if len(sample.shape) < 2:
            raise BadInput("outputs", tuple(sample.shape), "an output with `directed` has the dimensions [..., tokens, dim]")
        matrices = (sample.values - reference.values).reshape(-1, *sample.shape[-2:])
        largest = float(matrices.abs().amax())
        if not 0 < largest < math.inf:
            nothing = matrices.new_zeros(len(matrices))
            return Direction(None, matrices.new_zeros(len(matrices), sample.shape[-1]), nothing, nothing)
        matrices = shifted(matrices, -math.frexp(largest)[1])  # now no square overflows, and only negligible ones underflow
        energy = matrices.square().sum((-2, -1))
        top, vectors = largest_singular(matrices)
        return Direction((matrices / math.sqrt(float(energy.sum()))).reshape(-1), vectors, energy, top)

    def after(self, before: Direction | None) -> dict[str, float]:
        """The figures of `DIRECTED`, given the direction of the seed before; None if there is none."""
        figures, erring = dict.fromkeys(DIRECTED, math.nan), self.energy > 0
        if self.error is None or not bool(erring.any()):
            return figures
        share = (self.top[erring] / self.energy[erring]).clamp(max=1.0)
        figures |= {"stable_rank": float((1 / share).mean()), "top_share": float(share.mean())}
        if before is None or before.error is None or before.error.shape != self.error.shape:
            return figures
        figures["step_cosine"] = max(-1.0, min(1.0, float(self.error.dot(before.error))))
        both = erring & (before.energy > 0)
        if bool(both.any()):
            aligned = (self.vectors * before.vectors).sum(-1).abs()[both]
            figures["step_alignment"] = float(aligned.clamp(max=1.0).mean())
        return figures


def largest_singular(matrices: Float[Tensor, "heads tokens dim"]) -> tuple[Tensor, Tensor]:
    """The square of the largest singular value of each matrix, and its right singular vector; 0 and 0 of a matrix of zeros.

    `G^p` of the Gram matrix `G`, by repeated squaring, tends to the projection on its leading eigenvector `u`, and `u^T G u` is
    the value. It is too small by at most `log(dim) / (2 p)` of itself, where many other values are as close to it as that. All
    matrices go through the same products, so a GPU is not kept waiting by an eigensolver.
    """
    wide = matrices.shape[-1] > matrices.shape[-2]
    gram = matrices @ matrices.mT if wide else matrices.mT @ matrices
    power, least = gram, torch.finfo(gram.dtype).tiny
    for number in range(_SQUARINGS):
        if number % 4 == 0:  # a trace of 1 is at least dim^-15 after four squarings
            power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=least)[..., None, None]
        power = torch.bmm(power, power)
    column = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    u = normalize(power.take_along_dim(column, -1).squeeze(-1), dim=-1, eps=least)
    value = (u * (gram @ u[..., None]).squeeze(-1)).sum(-1)
    if wide:  # v = D^T u / sigma
        u = normalize((matrices.mT @ u[..., None]).squeeze(-1), dim=-1, eps=least)
    return value.clamp(min=0.0), u
