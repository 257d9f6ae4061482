"""The online softmax recurrence and its variants: when to normalise, which exponential, when to rescale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from enum import Enum
from fractions import Fraction
from typing import ClassVar

from jaxtyping import Float

from numdev.errors import BadInput, NotAChoice, NotHonoured
from numdev.lazy import torch
from numdev.settings import held, setting


class Normalise(Enum):
    """When the accumulator is divided by the row sum."""

    EACH = "each"  # after every tile: FlashAttention-1, Algorithm 1, line 12
    END = "end"  # once: FlashAttention-2, section 3.1


class Maximum(Enum):
    """Which maximum the exponentials of a tile are taken from."""

    RUNNING = "running"  # P = exp(S - m'), the maximum so far: FlashAttention-2, Algorithm 1, line 9
    LOCAL = "local"  # P = exp(S - rowmax S), then times exp(rowmax S - m'): FlashAttention-1, Algorithm 1, lines 10 to 12


class SumOver(Enum):
    """The terms of the row sum."""

    EXPONENTIALS = "exponentials"  # P before its cast: FlashAttention-2 to -4, SageAttention2's FP8 kernels
    PROBABILITIES = "probabilities"  # P after it, as it is multiplied with V: SageAttention's FP16 kernels for CUDA


class ScaleOn(Enum):
    """Where the softmax scale (and log2(e), if folded) is applied."""

    SCORES = "scores"
    QUERIES = "queries"  # once to q: the exact product is rounded once, to the format of the inputs


EXP2_MINIMAX = {
    # Of 2^f on [0, 1), lowest power first, by degree: experiments/exp2_minimax.py (Remez exchange on the relative error).
    1: (0.9701787941914296, 0.9701787941914296),
    2: (1.001724763214745, 0.6576362757360772, 0.3371894346196878),
    3: (0.9999252185627103, 0.6958335404948242, 0.2260671554272482, 0.07802452264063797),
    4: (1.0000025933706944, 0.6930038344699749, 0.24144275689150807, 0.05201146061030688, 0.013534167916127089),
    5: (
        *(0.9999999250635262, 0.693153073200169, 0.24015361704437535),
        *(0.05582631805329582, 0.008989340090494529, 0.0018775766751915242),
    ),
}


def exp2(x: Float[torch.Tensor, "*shape"]) -> Float[torch.Tensor, "*shape"]:
    """`2^x = 2^n e^((x - n) log 2)` in the carrier, with `n` the whole number nearest to `x`.

    The relative error is below 1.5 ulp of the carrier, and 0 for whole `x`. torch's own exp2 computes the last elements
    of a CPU tensor by other code than the rest, so its result would depend on an element's place; its exp does not.
    """
    whole = x.round()
    fraction = torch.where(x.isinf(), 0.0, x - whole)  # exact: |x - n| <= 1/2
    return fraction.mul_(math.log(2)).exp_().mul_(torch.exp2(whole))


def exp2_polynomial(x: Float[torch.Tensor, "*shape"], coefficients: tuple[float, ...]) -> Float[torch.Tensor, "*shape"]:
    """`2^x = 2^floor(x) p(x - floor(x))` by Horner's rule in the carrier (FlashAttention-4, section 3).

    `2^floor(x)` underflows to zero below the carrier's range; `-inf` gives 0 and NaN stays NaN.
    """
    whole = x.floor()
    fraction = torch.where(x.isneginf(), 0.0, x - whole)
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(fraction).add_(coefficient)
    return value * torch.exp2(whole)


@dataclass(frozen=True)
class Exponential:
    """`e^x` or `2^x`, and for which entries of P a polynomial stands in for it.

    `2^x = 2^floor(x) p(x - floor(x))`: a kernel computes some columns of a tile so, to relieve the unit that evaluates exp2
    (FlashAttention-4, arXiv 2603.05451, section 3). Which ones is a fixed pattern: column `c` of a tile if `c mod period` is
    one of `columns`.

    Attributes:
        binary: 2^x, on scores that carry a folded factor log2(e).
        coefficients: of `p`, lowest power first; none for the exact exponential everywhere.
        period: of the pattern, in columns.
        columns: those of a period that go by the polynomial, ascending.
    """

    EXP: ClassVar[Exponential]
    EXP2: ClassVar[Exponential]

    binary: bool = False
    coefficients: tuple[float, ...] = ()
    period: int = 1
    columns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        coefficients = list(self.coefficients)
        if not all(map(math.isfinite, coefficients)):
            raise BadInput("softmax.exp", coefficients, "give finite numbers, lowest power first")
        if coefficients and not self.binary:
            raise BadInput("softmax.exp", coefficients, "it is a polynomial of 2^f, and so binary")
        inside = all(0 <= column < self.period for column in self.columns)
        if not (inside and sorted(set(self.columns)) == list(self.columns) and bool(self.columns) == bool(coefficients)):
            hint = f"give columns 0 to {self.period - 1} ascending, with a polynomial and only then"
            raise BadInput("softmax.exp", str(self.columns), hint)

    @staticmethod
    def parse(text: str) -> Exponential:
        """Read a name of `EXPONENTIALS`, or that of a polynomial and its share of the columns: `exp2_poly3@0.25`."""
        name, at, share = text.partition("@")
        if name not in EXPONENTIALS:
            raise NotAChoice("softmax.exp", name, EXPONENTIALS)
        if not at:
            return EXPONENTIALS[name]
        try:
            number = float(share)
        except ValueError:
            raise BadInput("softmax.exp", text, "after @ comes the polynomial's share of the columns, such as 0.25") from None
        return Exponential.polynomial(EXPONENTIALS[name].coefficients, number)

    @staticmethod
    def polynomial(coefficients: tuple[float, ...], share: float = 1.0) -> Exponential:
        """2^x by a polynomial in a share of the columns, evenly spread.

        With `share = a / b` in lowest terms column `c` of each `b` is one where `floor((c + 1) a / b) > floor(c a / b)`.
        BadInput for no coefficients, a share outside (0, 1], or one that is no fraction of `b <= 256`.
        """
        if not coefficients:
            raise BadInput("softmax.exp", [], "a share of the columns needs a polynomial; give one, such as exp2_poly3@0.25")
        fraction = Fraction(share).limit_denominator(_LONGEST_PERIOD) if math.isfinite(share) else Fraction(0)
        if not (0 < fraction <= 1 and abs(float(fraction) - share) < 1e-9):
            hint = f"give a fraction above 0 and up to 1 whose denominator is at most {_LONGEST_PERIOD}, such as 0.25"
            raise BadInput("softmax.exp", share, hint)
        a, b = fraction.numerator, fraction.denominator
        return Exponential(True, coefficients, b, tuple(c for c in range(b) if (c + 1) * a // b > c * a // b))

    def describe(self) -> str:
        """The text that stands for it in a configuration."""
        return str(self)

    def __str__(self) -> str:
        names = {exponential: name for name, exponential in EXPONENTIALS.items()}
        if self in names:
            return names[self]
        name = next((name for each, name in names.items() if each.coefficients == self.coefficients), f"exp2{self.coefficients}")
        even = bool(self.coefficients) and self == Exponential.polynomial(self.coefficients, self.share)
        return f"{name}@{self.share:g}" if even else f"{name} in columns {self.columns} of {self.period}"

    def __repr__(self) -> str:
        return f"Exponential({self})"

    @property
    def share(self) -> float:
        """Of the columns of a tile of whole periods, those that go by the polynomial."""
        return len(self.columns) / self.period

    def ineffective(self, bc: int, group: str = "softmax") -> list[NotHonoured]:
        """The polynomial, where no column of a tile of `bc` keys goes by it."""
        if not self.columns or self.columns[0] < bc:
            return []
        why = (
            f"its first column by the polynomial is {self.columns[0]}, and a tile has {bc}; give tiling.bc of at least "
            f"{self.columns[0] + 1}, or a larger share"
        )
        return [NotHonoured(f"{group}.exp", str(self), why)]

    def __call__(self, x: Float[torch.Tensor, "*rows columns"]) -> Float[torch.Tensor, "*rows columns"]:
        """e^x, or 2^x, of a tile, in the carrier of `x`, in place where it can be."""
        if not self.columns:
            return self.exact(x)
        approximate = exp2_polynomial(x, self.coefficients)
        if self.share == 1:
            return approximate
        chosen = torch.zeros(self.period, dtype=torch.bool, device=x.device)
        chosen[list(self.columns)] = True
        return torch.where(chosen[torch.arange(x.shape[-1], device=x.device) % self.period], approximate, self.exact(x))

    def exact(self, x: Float[torch.Tensor, "*shape"]) -> Float[torch.Tensor, "*shape"]:
        """e^x or 2^x to the carrier's accuracy, never by a polynomial of low degree."""
        return exp2(x) if self.binary else x.exp_()


Exponential.EXP = Exponential()
Exponential.EXP2 = Exponential(binary=True)

_LONGEST_PERIOD = 256  # columns, the widest tile of any kernel
# flash_attn/cute/utils.py, POLY_EX2[3] (flash-attention at 0251105): Sollya's fpminimax of 2^f on [0, 1] with p(0) = 1, in FP32.
FA4_COEFFICIENTS = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)

EXPONENTIALS = {
    "exp": Exponential.EXP,
    "exp2": Exponential.EXP2,
    **{f"exp2_poly{degree}": Exponential.polynomial(best) for degree, best in EXP2_MINIMAX.items()},
    # The tuning tables of flash_fwd_sm100.py and apply_exp2_convert of softmax.py, at the same revision: in the two middle ones
    # of the four fragments of 32 columns of a tile of 128 the last 4 of each 16, or 8 with FP8 (head_dim 128, causal, B200).
    "exp2_fa4": Exponential(True, FA4_COEFFICIENTS, 128, tuple(c for c in range(32, 96) if c % 16 >= 12)),
    "exp2_fa4_fp8": Exponential(True, FA4_COEFFICIENTS, 128, tuple(c for c in range(32, 96) if c % 8 >= 4)),
}
"""The exponentials that have names."""


@dataclass(frozen=True)
class OnlineSoftmax:
    """The recurrence `m, l, O -> m', l', O'` over KV tiles.

    FlashAttention-1 is `EACH` with `LOCAL`, FlashAttention-2 `END` with `RUNNING`.

    - `rescale_threshold` keeps the old maximum, and so skips the rescale, unless the new one exceeds it by more, in units of
      log 2 (FlashAttention-4 takes 8). 0 always follows the maximum.
    - `p_scale`: P is multiplied by this before its cast and the product divided by it: 256 uses more of E4M3's range (FA3), 127
      is for INT8. Powers of two are exact.
    - `tie_shift` is `beta`: where several scores of a row tie for a positive maximum, shift by `beta m` instead of `m`, and by 0
      instead of a negative tied maximum (Qiu & Yao 2025, arXiv 2510.04212, section 4). The product is rounded to the format of
      the scores.
    """

    normalise: Normalise = setting(
        Normalise.END,
        "when O is divided by l: `each`, after every tile (FlashAttention-1), or `end`, once (FlashAttention-2)",
        word="place of the division by l",
    )
    exp: Exponential = setting(
        None,
        "how the exponential of S - m is computed: exp, exp2, or exp2 by a polynomial: exp2_poly1 to exp2_poly5, exp2_fa4, "
        "exp2_fa4_fp8, behind @ in which share of the columns, as in exp2_poly3@0.25; null is exp, and exp2 for attention=triton",
        word="exponential",
    )
    scale_on: ScaleOn = setting(
        ScaleOn.SCORES,
        "what the forward pass multiplies with 1/sqrt(d): the scores, or the queries, then rounded as the inputs are",
    )
    rescale_threshold: float = setting(
        0.0,
        "how far a row's maximum must rise for O and l to be rescaled (FlashAttention-4); 0 rescales always",
        "log 2",
        word="threshold of rescaling",
    )
    p_scale: float = setting(1.0, "factor of P before it is rounded, taken out after the product with V", word="factor of P")
    tie_shift: float | None = setting(
        None, "factor of m in S - m where a row's largest score is tied (Qiu & Yao 2025); empty leaves ties alone"
    )
    sum_over: SumOver = setting(
        SumOver.EXPONENTIALS, "what l adds up: `exponentials`, P before it is rounded, or `probabilities`, P as it meets V"
    )
    maximum: Maximum = setting(
        Maximum.RUNNING,
        "maximum that exponentials are taken from: `running` (FlashAttention-2), or the tile's own, `local` (FlashAttention-1)",
        word="running maximum",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "exp", self.exp or Exponential.EXP)
        if not (self.rescale_threshold >= 0 and math.isfinite(self.rescale_threshold)):
            raise BadInput("softmax.rescale_threshold", self.rescale_threshold, "give a finite number of at least 0")
        if not (self.p_scale > 0 and math.isfinite(self.p_scale)):
            raise BadInput("softmax.p_scale", self.p_scale, "give a positive finite factor, such as 256")
        if self.tie_shift is not None and not 1 < self.tie_shift < math.inf:
            raise BadInput("softmax.tie_shift", self.tie_shift, "give a finite factor above 1 (Qiu & Yao take 2 to 8), or null")

    @property
    def log_scale(self) -> float:
        """Factor of the softmax scale: log2(e) where it is folded in for a binary exponential."""
        return math.log2(math.e) if self.exp.binary else 1.0

    @property
    def threshold(self) -> float:
        """`rescale_threshold` in the units of the scores."""
        return self.rescale_threshold if self.exp.binary else self.rescale_threshold * math.log(2)

    def largest(
        self, scores: Float[torch.Tensor, "*rows keys"], times_beta: Callable[[torch.Tensor], torch.Tensor]
    ) -> Float[torch.Tensor, "*rows 1"]:
        """`rowmax S` of one tile, shifted by `times_beta` where it is tied and the tie shift is on."""
        largest = scores.amax(-1, keepdim=True)
        if self.tie_shift is None:
            return largest
        tied = (scores == largest).sum(-1, keepdim=True) > 1
        shifted = torch.where(largest > 0, times_beta(largest.clone()), largest.clamp(min=0))
        return torch.where(tied & largest.isfinite(), shifted, largest)

    def running(
        self, m: Float[torch.Tensor, "*rows 1"], largest: Float[torch.Tensor, "*rows 1"]
    ) -> Float[torch.Tensor, "*rows 1"]:
        """`m' = max(m, rowmax S)`, with the lazy threshold where it is on."""
        if self.threshold == 0:
            return torch.maximum(m, largest)
        return torch.where(largest - m > self.threshold, largest, m)  # -inf - -inf is NaN: such a row keeps -inf


class DeltaForm(Enum):
    """The products of which delta is the row sum. Without rounding both are equal: `sum_j P_ij dP_ij = sum_j P_ij (dO_i V_j)`."""

    OUTPUT = "output"  # rowsum(dO * O): FlashAttention-2, Algorithm 2, line 4
    PROBABILITIES = "probabilities"  # rowsum(dP * P), which needs a pass of its own over the keys


class OutputForDelta(Enum):
    """Which O the backward pass reads to compute delta."""

    ROUNDED = "rounded"  # O as the forward pass returns it, after its output cast: FlashAttention
    UNROUNDED = "unrounded"  # O before that cast, of which a kernel would have to keep a copy


@dataclass(frozen=True)
class Recompute:
    """How the backward pass recomputes what the forward pass did not keep: P, and delta.

    `exponential` is that of `P = exp(S - LSE)`; if binary, `P = 2^(S log2(e) - LSE log2(e))`. On the command line it is that of
    the forward pass, `softmax`, unless one is set here.
    """

    delta: DeltaForm = setting(
        DeltaForm.OUTPUT,
        "of what delta is the sum over a row: `output`, dO times O (FlashAttention), or `probabilities`, dP times P",
    )
    output: OutputForDelta = setting(
        OutputForDelta.ROUNDED,
        "O of which delta is made: `rounded`, as the forward pass returns it, or `unrounded`, before its last cast",
    )
    exponential: Exponential = Exponential.EXP
    _: KW_ONLY
    exp: InitVar[Exponential | None] = setting(
        None,
        "how the exponential of S - LSE is computed, as softmax.exp takes it; null is as in the forward pass",
        column="exponential",
    )
    softmax: InitVar[OnlineSoftmax | None] = held(None, "softmax")

    def __post_init__(self, exp: Exponential | None, softmax: OnlineSoftmax | None) -> None:
        chosen = exp or (softmax.exp if softmax is not None else self.exponential)
        object.__setattr__(self, "exponential", chosen)

    @property
    def reads_output(self) -> bool:
        """Whether the O of the forward pass is read at all."""
        return self.delta is DeltaForm.OUTPUT
