"""The router of a mixture of experts: logits `x w^T`, softmax or sigmoid, and the k experts of each token that score highest.

A rounding can exchange the k-th expert for the next one: a flip, after which other weights compute the token. `experts` is 1 for
the experts of a token and 0 for others, so that half the sum of |D| counts changed experts. `Expected` predicts them.

Sources: Shazeer et al. 2017 (arXiv 1701.06538), section 2.1; the sigmoid of DeepSeek-V3 (arXiv 2412.19437), equation 15.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from numdev.arithmetic.elementary import Operation as Elementary
from numdev.arithmetic.formats import FP32, FP64, Format
from numdev.arithmetic.products import Dot
from numdev.arithmetic.rounding import Cast
from numdev.errors import BadInput, Unsupported
from numdev.measurement.operation import Inputs, Operation, Output, Result
from numdev.operations.base import Compiled, Emulated, Entries, InDtype, Seeded, Steps, columns, jit, power_of_two
from numdev.settings import held, setting

if TYPE_CHECKING:
    import triton.language as tl


class Score(Enum):
    """The function of the logits by which experts are chosen and weighed."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Problem(Seeded):
    """x `[tokens, hidden]` and w `[experts, hidden]`, normal, such that logits have the standard deviation `spread`."""

    tokens: int = setting(1024, "rows of x", "count")
    experts: int = setting(64, "rows of w", "count")
    k: int = setting(8, "experts of a token", "count")
    hidden: int = setting(512, "entries of a row of x and of w", "count")
    spread: float = setting(1.0, "standard deviation of the logits")
    score: Score = setting(Score.SOFTMAX, "function of the logits: softmax or sigmoid")
    kind: Entries = setting(Entries.NORMAL, "entries of x: normal, uniform in [0, 1), or normal with outliers")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k >= self.experts:
            raise BadInput("problem.k", self.k, f"there are {self.experts} experts; give fewer")

    @property
    def largest(self) -> int:
        return self.tokens * max(self.hidden, self.experts)

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        x = self.kind.draw(generator, self.tokens, self.hidden)
        w = Entries.NORMAL.draw(generator, self.experts, self.hidden)
        return {"x": x, "w": w * self.spread / math.sqrt(self.hidden)}

    def arguments(self) -> dict[str, Any]:
        return {"k": self.k, "score": self.score}

    def naive(self, fmt: Format) -> Eager:
        return Eager(fmt)


@dataclass(frozen=True, repr=False)
class Policy(Steps):
    """One Cast or Dot for each step; a `kernel` stores inputs, logits and weights in its format."""

    WIDE = ("exponential", "sum")
    STORED = ("inputs", "stored", "output")
    factors = {"logits": ("inputs", "inputs")}  # noqa: RUF012

    inputs: Cast = setting(None, "x and w as the algorithm receives them", "format")
    logits: Dot = setting(None, "the running sum of x w^T; behind `@`, after how many products it is rounded", "format")
    stored: Cast = setting(None, "the logits as they are stored: the router's output format", "format")
    exponential: Cast = setting(None, "softmax: l - m, then exp; sigmoid: exp(-l)", "format")
    sum: Dot = setting(None, "the sum of the exponentials, of 1 and exp(-l), and of the scores of the chosen", "format")
    scores: Cast = setting(None, "the scores, by which experts are chosen", "format")
    output: Cast = setting(None, "the weights: scores over the sum of those chosen", "format")


def chosen(scores: Tensor, k: int) -> Tensor:
    """1 for the k largest scores of a row, of equal ones the first; 0 for others."""
    places = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(scores).scatter_(-1, places, 1.0)


@dataclass(frozen=True)
class Routed(Emulated):
    """Each step under a policy; of equal scores the first expert is taken."""

    precision: Policy = held(follows="precision")

    @property
    def formats(self) -> dict[str, Format]:
        return {"experts": self.precision.format, "weights": self.precision.format, "logits": self.precision.stored.to}

    def __call__(self, x: Tensor, w: Tensor, *, k: int, score: Score) -> Result:
        policy = self.precision
        logits = policy.stored(policy.logits(x, w.T, unit=policy.units.get("logits")))
        if score is Score.SOFTMAX:
            shifted = policy.do(Elementary.SUBTRACT, "exponential", logits, logits.amax(-1, keepdim=True))
            exponentials = policy.exponential(shifted.exp())
            scores = policy.do(Elementary.DIVIDE, "scores", exponentials, policy.sum.sum(exponentials))
        else:
            total = policy.do(Elementary.ADD, "sum", policy.exponential((-logits).exp()), 1.0)
            scores = policy.do(Elementary.DIVIDE, "scores", torch.ones_like(total), total)
        experts = chosen(scores, k)
        weights = policy.do(Elementary.DIVIDE, "output", scores * experts, policy.sum.sum(scores * experts))
        return Result({"experts": experts, "weights": weights, "logits": logits})


@dataclass(frozen=True)
class Expected(Emulated):
    """The expected flips of a policy: golden's experts, but for the k-th, 1 - p, and the next, p, the probability of their flip.

    With g the gap of their logits, errors before the last sum add a normal variable to g, with a variance of ulp^2 / 12 for each
    rounded number. Each later rounding puts both logits on a lattice of spacing h at a random place: their distance d becomes one
    of the multiples of h next to d, with the probabilities that keep its mean. h is the ulp of a step over the derivative of its
    result by the logit. Equal scores flip in half of all cases.

    The k-th and the next expert alone are known to it: it is right to first order in the noise over the gap.
    """

    precision: Policy = held(follows="precision")
    rounds = Cast(FP64)  # golden's inputs, whose rounding it predicts

    @property
    def formats(self) -> dict[str, Format]:
        return {"experts": self.precision.format}

    def __call__(self, x: Tensor, w: Tensor, *, k: int, score: Score) -> Result:
        logits = x @ w.T
        values, places = logits.topk(k + 1, -1)
        last, following = places[:, k - 1], places[:, k]
        noise = self._variance(x, w[last], w[following]).sqrt()
        lattices = [*self._lattices(values[:, k - 1], values[:, 0], logits, score)]
        count, gap, p = 63, values[:, k - 1] - values[:, k], torch.zeros(len(x), dtype=x.dtype, device=x.device)
        for i in range(count):
            p += _flips(gap + NormalDist().inv_cdf((i + 0.5) / count) * noise, lattices) / count
        experts = chosen(logits, k)
        experts.scatter_(-1, last[:, None], 1 - p[:, None]).scatter_(-1, following[:, None], p[:, None])
        return Result({"experts": experts})

    def _variance(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Of the error of the difference of two logits before the last rounding of their sums."""
        inputs, dot = self.precision.inputs.to, self.precision.logits
        if dot.architecture is not None:
            raise Unsupported("precision.logits", "the prediction knows sums that are rounded, no tensor cores; give a format")
        total = (inputs.ulp(x) * (first - second)).square().sum(-1)
        total += (x.square() * (inputs.ulp(first).square() + inputs.ulp(second).square())).sum(-1)
        if dot.every is not None:
            for rows in (first, second):
                sums = (x * rows).cumsum(-1)[:, dot.every - 1 : -1 : dot.every]
                total += dot.accumulate.to.ulp(sums).square().sum(-1)
        return total / 12

    def _lattices(self, value: Tensor, m: Tensor, logits: Tensor, score: Score) -> Iterator[Tensor]:
        """The spacing of each later rounding, in units of the logit."""
        policy = self.precision
        yield policy.logits.accumulate.to.ulp(value)
        yield policy.stored.to.ulp(value)
        if score is Score.SOFTMAX:
            yield policy.exponential.to.ulp(value - m)
            exponential, share = (value - m).exp(), (value - logits.logsumexp(-1)).exp()
            yield policy.exponential.to.ulp(exponential) / exponential
            yield policy.scores.to.ulp(share) / share
        else:
            exponential, share = (-value).exp(), value.sigmoid()
            yield policy.exponential.to.ulp(exponential) / exponential
            yield policy.sum.accumulate.to.ulp(1 + exponential) / exponential
            yield policy.scores.to.ulp(share) / (share * (1 - share))


def _flips(distance: Tensor, lattices: list[Tensor]) -> Tensor:
    """The probability that a distance is below 0, or 0 and unlucky, after it was rounded to each lattice."""
    if not lattices:
        return (distance < 0).to(distance.dtype) + (distance == 0).to(distance.dtype) / 2
    steps = distance / lattices[0]
    below = steps.floor()
    upper = steps - below
    return torch.lerp(_flips(below * lattices[0], lattices[1:]), _flips((below + 1) * lattices[0], lattices[1:]), upper)


@dataclass(frozen=True)
class Prediction:
    """The rule of a baseline: the expected flips of the variant's policy."""

    def of(self, variant: Any, problem: Problem) -> Expected:
        """The baseline of a variant on a problem."""
        return Expected(variant.precision)


@dataclass(frozen=True)
class Eager(InDtype):
    """Torch's product, softmax or sigmoid, and top-k; golden is that in FP64."""

    OUTPUTS = ("experts", "weights", "logits")

    upcast: bool = setting(False, "whether the product and what follows are in FP32, of inputs in the format: an FP32 router")

    @property
    def formats(self) -> dict[str, Format]:
        return dict.fromkeys(self.OUTPUTS, FP32 if self.upcast else self.format)

    @property
    def precision(self) -> Policy:
        """The policy that predicts it."""
        return Policy.eager(FP32).with_step(inputs=self.format) if self.upcast else Policy.eager(self.format)

    def __call__(self, x: Tensor, w: Tensor, *, k: int, score: Score) -> Result:
        dtype = torch.float32 if self.upcast else self.dtype
        logits = x.to(dtype) @ w.to(dtype).T
        scores = logits.softmax(-1) if score is Score.SOFTMAX else logits.sigmoid()
        top, places = scores.topk(k, -1)
        experts = torch.zeros_like(logits).scatter_(-1, places, 1.0)
        weights = torch.zeros_like(logits).scatter_(-1, places, top / top.sum(-1, keepdim=True))
        return Result({"experts": experts, "weights": weights, "logits": logits})


@jit
def _router(
    x_ptr: tl.tensor, w_ptr: tl.tensor, e_ptr: tl.tensor, p_ptr: tl.tensor, s_ptr: tl.tensor, hidden: tl.tensor,
    experts: tl.tensor,
    K: tl.constexpr, SIGMOID: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row, ids = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    logits = tl.zeros([EXPERTS], tl.float32)
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
        inside = (ids[:, None] < experts) & (at[None, :] < hidden)
        w = tl.load(w_ptr + ids[:, None] * hidden + at[None, :], mask=inside, other=0.0).to(tl.float32)
        logits += tl.sum(w * x[None, :], 1)  # [EXPERTS]
    logits = tl.where(ids < experts, logits, float("-inf"))
    if SIGMOID:
        scores = tl.where(ids < experts, 1 / (1 + tl.exp(-logits)), -1.0)
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = tl.where(ids < experts, scores / tl.sum(scores, 0), -1.0)
    left, taken = scores, tl.zeros([EXPERTS], tl.float32)
    for _ in tl.static_range(K):
        here = ids == tl.argmax(left, 0)
        left, taken = tl.where(here, -2.0, left), tl.where(here, 1.0, taken)
    weights = scores * taken
    place = row * experts + ids
    tl.store(s_ptr + place, logits.to(s_ptr.dtype.element_ty), mask=ids < experts)
    tl.store(e_ptr + place, taken.to(e_ptr.dtype.element_ty), mask=ids < experts)
    tl.store(p_ptr + place, (weights / tl.sum(weights, 0)).to(p_ptr.dtype.element_ty), mask=ids < experts)


@dataclass(frozen=True)
class Triton(Compiled):
    """A fused Triton kernel: logits, scores and top-k in FP32; one program for each token."""

    OUTPUTS = ("experts", "weights", "logits")
    WIDE = ("logits",)

    block: int = setting(64, "entries of x that a program loads at once, a power of two", "count")

    def __post_init__(self) -> None:
        super().__post_init__()
        power_of_two("block", self.block)

    @property
    def precision(self) -> Policy:
        """The policy that predicts it."""
        return Policy.kernel(self.format).with_step(stored=FP32)

    def __call__(self, x: Tensor, w: Tensor, *, k: int, score: Score) -> Result:
        rows, (experts, hidden) = len(x), w.shape
        mask, weights = (x.new_empty(rows, experts) for _ in range(2))
        logits = x.new_empty(rows, experts, dtype=torch.float32)
        size = 1 << (experts - 1).bit_length()
        _router(x)[(rows,)](x, w, mask, weights, logits, hidden, experts, k, score is Score.SIGMOID, size, self.block)
        outputs = {"experts": self.stored(mask), "weights": self.stored(weights), "logits": logits}
        return Result(outputs, kernel=f"triton router block={self.block}")


ROUTER = Operation(
    name="router",
    golden=Eager(FP64),
    inputs=(Inputs(("x", "w")),),
    outputs=(
        Output("experts", "1 for the experts of a token, 0 for others: half the sum of |D| counts the experts that changed"),
        Output("weights", "scores of the chosen experts over their sum, 0 for others"),
        Output("logits", "x w^T"),
    ),
    rows=dict.fromkeys(("x", "experts", "weights", "logits"), 0),
    steps=tuple(field.name for field in fields(Policy)),
    settings=columns(Problem, Policy, Routed, Eager, Triton),
    smaller="fewer tokens, experts or hidden entries",
)
