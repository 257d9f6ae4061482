"""The steps of attention under a policy: each elementary operation is rounded once, to the format of its step.

Minus infinity stands for "no number": the score of a key that is not seen, or the maximum or LSE of a row that has seen none. It
is never rounded, saturated or subtracted, and its exponential is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from numdev.arithmetic.elementary import RoundedOnce
from numdev.arithmetic.products import Dot, Watch, visible_product
from numdev.arithmetic.rounding import Cast, Noise
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Exponential

NEVER = float("-inf")
LOG2_E = math.log2(math.e)
# Rounding events of a backward run; the forward pass has those of its splits, which are fewer.
TILES, DELTA, END = 1 << 16, (1 << 16) + 1, (1 << 16) + 2
Function = Callable[[Tensor], Tensor]
AnyPrecision = TypeVar("AnyPrecision", Precision, BackwardPrecision)
Kind = TypeVar("Kind", bound="CommonSteps[Any]")


@dataclass(frozen=True)
class CommonSteps(Generic[AnyPrecision]):
    """The steps that both passes have. A method works in the memory of its first argument where it can.

    All tensors are in the carrier. From the noise stochastic rounding takes its random numbers; None is without it.
    """

    precision: AnyPrecision
    carrier: torch.dtype
    noise: Noise | None = None

    @classmethod
    def of(cls: type[Kind], precision: Precision | BackwardPrecision, total_rows: int) -> Kind:
        """The steps of a run over so many rows of each head: queries or, backward, keys if these are more."""
        return cls(precision, precision.carrier, Noise(total_rows=total_rows) if precision.is_random else None)

    def at(self, split: int, tile: int, rows: int) -> None:
        """Begin the rounding events of a tile, on a block of rows; see `Noise.at`."""
        if self.noise is not None:
            self.noise.at(split, tile, rows)

    def do(self, name: str, x: Tensor, y: Tensor | float) -> Tensor:
        """An operation of the table on `x` and `y`, in the memory of `x`, rounded once by its step."""
        constant = y if isinstance(y, float) else 1.0
        key = name, constant
        if key not in self._known:
            self._known[key] = self.precision.operation(name, self.carrier, constant)
        return self._known[key](x, y, self.noise)

    @cached_property
    def _known(self) -> dict[tuple[str, float], RoundedOnce]:
        return {}  # an operation is done at every tile

    def product(self, step: str, a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
        """The product `a b` of a step, added to `start` where tensor cores add to that."""
        dot: Dot = getattr(self.precision, step)
        return dot(a, b, self.noise, self.precision.units.get(step), start)

    def scores(self, q: Tensor, keys: Tensor, factor: float | Tensor, cap: float | None = None) -> Tensor:
        """`factor Q K^T`; with a cap, in the units of the scores, `tanh(factor / cap Q K^T)`.

        Of codes the factor is a number of FP32 for each score, with the scales of its row and column.
        """
        s = self.product("scores", q, keys)
        factor = factor if cap is None else factor / cap
        if isinstance(factor, Tensor):
            s = self.unscaled("scores", s, factor)
        elif factor != 1.0:
            s = self.do("scale scores", s, factor)
        return s if cap is None else self.precision.scores.accumulate.apply_(s.tanh_(), self.noise)

    def raised(self, s: Tensor, cap: float | None, bias: Tensor | None, log_scale: float = 1.0) -> Tensor:
        """`S` of what `scores` returns, plus `log_scale bias`, which is rounded to the format of the scores first."""
        s = s if cap is None else self.do("scale scores", s, cap)
        if bias is None:
            return s
        bias = self.precision.scores.accumulate.apply_(bias.clone(), self.noise).expand_as(s)
        return self.do("bias scores", s, bias if log_scale == 1.0 else self.do("scale scores", bias.clone(), log_scale))

    def unscaled(self, step: str, codes: Tensor, scale: Tensor) -> Tensor:
        """A product of codes times their scale, an FP32 number, rounded once; in the memory of `codes`."""
        dot: Dot = getattr(self.precision, step)
        return dot.accumulate.apply_(codes.mul_(scale), self.noise)

    def exponential(self, s: Tensor, m: Tensor, exp: Function) -> Tensor:
        """`P = exp(S - m)`, 0 where S or m is no number; the backward pass has LSE for m."""
        cast = self.precision.exponential
        never = None if cast.keeps_minus_infinity else s == NEVER
        if never is not None:
            s.masked_fill_(never, 0.0)
        difference = self.do("shift scores", s, m.masked_fill(m == NEVER, 0.0))
        p = cast.apply_(exp(difference), self.noise)
        return p if never is None else p.masked_fill_(never, 0.0)

    def output(self, out: Tensor) -> Tensor:
        """The tensor that is returned, in the format of the output."""
        return self.precision.output.apply_(out, self.noise)


@dataclass(frozen=True)
class Steps(CommonSteps[Precision]):
    """The steps of the forward pass."""

    def shift_tied(self, beta: float | None) -> Function:
        """`beta m`, in the format of the scores, for a tied maximum."""
        return lambda m: m if beta is None else self.do("shift ties", m, beta)

    def rescale(self, m: Tensor, m_next: Tensor, exp: Function) -> Tensor:
        """`exp(m - m')`, the factor of what was summed relative to m; 0 where m is no number."""
        return self._decay("fall of the maximum", m, m_next, exp)

    def row_sum(self, p: Tensor, scale: float = 1.0, watch: Watch | None = None) -> Tensor:
        """`sum P`, and the scale of P taken out of it."""
        total = self.precision.row_sum.sum(p, self.noise, watch)
        return total if scale == 1.0 else self.do("unscale sum", total, scale)

    def probabilities(self, p: Tensor, scale: float = 1.0) -> Tensor:
        """P times `scale` as it enters the second product."""
        cast = self.precision.probabilities
        if scale != 1.0 and isinstance(cast, Cast):
            return self.do("scale probabilities", p, scale)
        if cast == self.precision.exponential:
            return p  # a number of the format is not rounded again
        return cast.apply_(p.mul_(scale), self.noise)

    def share(self, p: Tensor, row_sum: Tensor, scale: float = 1.0) -> Tensor:
        """`P / l` in the format of P, then as it enters the second product: a softmax, then a matmul."""
        return self.probabilities(self.do("share", p, divisor(row_sum)), scale)

    def values(self, p: Tensor, v: Tensor, visible: Tensor | None, start: Tensor | None = None) -> Tensor:
        """`P V`, in which keys that a row does not see have no part, added to `start` where tensor cores add to that."""
        return visible_product(p, v, visible, lambda p, v: self.product("values", p, v, start))

    def normalise(self, o: Tensor, row_sum: Tensor) -> Tensor:
        """`O / l`, 0 where l is 0."""
        return self.do("normalise", o, divisor(row_sum))

    def lse(self, m: Tensor, row_sum: Tensor, log_scale: float = 1.0) -> Tensor:
        """`LSE = m / log_scale + log l`, in memory of its own; minus infinity where the row has no sum."""
        m = m.masked_fill(m == NEVER, 0.0)
        if log_scale == 1.0:
            return self._log_sum("log sum", m, row_sum)
        return self._log_sum("add sums", self.do("unscale maximum", m, log_scale), row_sum)

    def combine(self, parts: list[tuple[Tensor, Tensor]], first: int = 0) -> tuple[Tensor, Tensor]:
        """`O = sum_s w_s O_s` with `w_s = exp(LSE_s - LSE)` (Flash-Decoding): weights in `rescale`, sums in `accumulator`.

        Each part is the normalised `O_s` and its natural LSE `[..., 1]`, -inf where a row has no sum in the split. `first` is the
        place of the first row.
        """
        self.at(-1, -1, first)
        largest = torch.stack([lse for _, lse in parts]).amax(0)
        total = torch.zeros_like(largest)
        for _, lse in parts:
            total = self.do("add weight", total, self._weight(lse, largest))
        whole = self._log_sum("add sums", largest.masked_fill(largest == NEVER, 0.0), total)
        combined = torch.zeros_like(parts[0][0])
        for out, lse in parts:
            combined = self.do("accumulate weighed", combined, self.do("rescale output", out.clone(), self._weight(lse, whole)))
        return combined, whole

    def _weight(self, lse: Tensor, of: Tensor) -> Tensor:
        """`exp(LSE_s - LSE)`, the weight of a split; 0 of one without a sum."""
        return self._decay("distance of splits", lse, of, torch.exp_)

    def _log_sum(self, name: str, m: Tensor, row_sum: Tensor) -> Tensor:
        empty = row_sum == 0
        log = self.precision.row_sum.accumulate.apply_(row_sum.masked_fill(empty, 1.0).log_(), self.noise)
        return self.do(name, m, log).masked_fill_(empty, NEVER)

    def _decay(self, name: str, x: Tensor, of: Tensor, exp: Function) -> Tensor:
        """`exp(x - of)` in the format of `rescale`, 0 where x is no number."""
        never = x == NEVER
        difference = self.do(name, torch.where(never, 0.0, x), torch.where(never, 0.0, of))
        return self.precision.rescale.apply_(exp(difference), self.noise).masked_fill_(never, 0.0)


@dataclass(frozen=True)
class BackwardSteps(CommonSteps[BackwardPrecision]):
    """The steps of the backward pass."""

    def lse(self, lse: Tensor, exponential: Exponential) -> Tensor:
        """LSE in the units of the scores: times log2(e) where the exponential is binary."""
        if not exponential.binary:
            return lse
        hidden = lse == NEVER
        return self.do("scale lse", lse.masked_fill(hidden, 0.0), LOG2_E).masked_fill_(hidden, NEVER)

    def probabilities(self, p: Tensor, dropped: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """P as it enters `P^T dO`, in memory of its own if it changes; with dropout times its Z."""
        if dropped is None:
            return self.precision.probabilities(p, self.noise)
        return self.do("drop probabilities", p.masked_fill(dropped, 0.0), scale)

    def dp(self, do: Tensor, v: Tensor, dropped: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """`dP = dO V^T`; with dropout times its Z."""
        dp = self.product("dp", do, v.mT)
        return dp if dropped is None else self.do("drop dp", dp.masked_fill_(dropped, 0.0), scale)

    def delta(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """`rowsum(dO * O)` or `rowsum(dP * P)`; `name` is the operation that multiplies."""
        return self.precision.delta.sum(self.do(name, x, y), self.noise)

    def ds(self, dp: Tensor, p: Tensor, delta: Tensor, slope: Tensor | None = None) -> Tensor:
        """`dS = P * (dP - delta)` as it enters its products; under a softcap times its slope `1 - tanh^2`."""
        return self._enter(self.do("weigh difference", self.do("shift dp", dp, delta), p), slope)

    def ds_of_stored(self, dp: Tensor, p: Tensor, delta: Tensor, slope: Tensor | None, factor: float) -> Tensor:
        """`scale dS` with the P that the forward pass stored: the gradient of softmax, then that of the scaling."""
        ds = self._enter(self.do("weigh difference by stored", self.do("shift dp", dp, delta), p), slope)
        return ds if factor == 1.0 else self.do("scale ds", ds, factor)

    def _enter(self, ds: Tensor, slope: Tensor | None) -> Tensor:
        cast, ds = self.precision.ds, ds if slope is None else self.do("cap difference", ds, slope)
        return ds if cast == self.precision.difference else cast.apply_(ds, self.noise)

    def add(self, name: str, total: Tensor, a: Tensor, b: Tensor, visible: Tensor | None) -> None:
        """The product `a b` of the step `name`, in which what is not visible has no part, added to the sum of that gradient."""
        self.do(f"add {name}", total, visible_product(a, b, visible, lambda a, b: self.product(name, a, b)))

    def scale(self, name: str, gradient: Tensor, factor: float) -> Tensor:
        """`scale dQ` or `scale dK`; `name` is the operation."""
        return gradient if factor == 1.0 else self.do(name, gradient, factor)


def slope(tanh: Tensor, cap: float | None) -> Tensor | None:
    """`1 - tanh^2` of what `CommonSteps.scores` returns, in the carrier; None without a cap."""
    return None if cap is None else 1 - tanh * tanh


def divisor(row_sum: Tensor) -> Tensor:
    """`l`, and 1 for a row without a sum, whose result is 0 as that of every shipped kernel."""
    return row_sum.masked_fill(row_sum == 0, 1.0)
