"""The steps of attention under a policy: each elementary operation is rounded once, to the format of its step.

Minus infinity stands for "no number": the score of a key that is not seen, or the maximum of a row that has seen none. It is never
rounded, saturated or subtracted, and its exponential is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from numdev.elementary import Operand, Operation, RoundedOnce
from numdev.formats import Format
from numdev.noise import Noise
from numdev.precision import Precision, Watch
from numdev.products import visible_product
from numdev.rounding import Cast

NEVER = float("-inf")
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Steps:
    """What attention does to tensors of one carrier. A method works in the memory of its first argument where it can.

    Attributes:
        precision: the format of each step.
        carrier: the dtype of all tensors.
        noise: where stochastic rounding takes its random numbers; None without it.
    """

    precision: Precision
    carrier: torch.dtype
    noise: Noise | None = None

    @staticmethod
    def of(precision: Precision, total_rows: int) -> Steps:
        """The steps of a run over so many rows of each head."""
        return Steps(precision, precision.carrier, Noise(total_rows=total_rows) if precision.is_random else None)

    def round(self, cast: Cast, x: Tensor) -> Tensor:
        return cast.apply_(x, self.noise)

    def at(self, split: int, tile: int, rows: int) -> None:
        """Begin the rounding events of a tile, on a block of rows; see `Noise.at`."""
        if self.noise is not None:
            self.noise.at(split, tile, rows)

    def scores(self, q: Tensor, keys: Tensor, factor: float) -> Tensor:
        """`S = factor Q K^T`."""
        step = self.precision.scores
        s = step(q, keys, self.noise)
        return s if factor == 1.0 else self._times("scores", step.accumulate, s, factor, step.accumulate.to, factor)

    def exponential(self, s: Tensor, m: Tensor, exp: Function) -> Tensor:
        """`P = exp(S - m)`, 0 where S or m is no number."""
        cast, scores = self.precision.exponential, self.precision.scores.accumulate.to
        never = None if cast.keeps_minus_infinity else s == NEVER
        if never is not None:
            s.masked_fill_(never, 0.0)
        difference = self._once("exponential", Operation.SUBTRACT, cast, scores, scores)(
            s, m.masked_fill(m == NEVER, 0.0), self.noise
        )
        p = cast.apply_(exp(difference), self.noise)
        return p if never is None else p.masked_fill_(never, 0.0)

    def rescale(self, m: Tensor, m_next: Tensor, exp: Function) -> Tensor:
        """`exp(m - m')`, the factor of what was summed relative to m; 0 where m is no number."""
        cast, scores = self.precision.rescale, self.precision.scores.accumulate.to
        never = m == NEVER
        difference = torch.where(never, 0.0, m)
        self._once("rescale", Operation.SUBTRACT, cast, scores, scores)(difference, torch.where(never, 0.0, m_next), self.noise)
        return cast.apply_(exp(difference), self.noise).masked_fill_(never, 0.0)

    def shift_tied(self, beta: float | None) -> Function:
        """`beta m`, in the format of the scores, for a tied maximum."""
        cast = self.precision.scores.accumulate
        return lambda m: m if beta is None else self._times("shift_tied", cast, m, beta, cast.to, beta)

    def row_sum(self, p: Tensor, scale: float = 1.0, watch: Watch | None = None) -> Tensor:
        """`sum P`, and the scale of P taken out of it."""
        dot = self.precision.row_sum
        total, cast = dot.sum(p, self.noise, watch), dot.accumulate
        if scale == 1.0:
            return total
        return self._once("row_sum", Operation.DIVIDE, cast, cast.to, scale)(total, scale, self.noise)

    def weigh_sum(self, row_sum: Tensor, factor: Tensor) -> Tensor:
        """`alpha l`, in memory of its own."""
        cast = self.precision.row_sum.accumulate
        return self._times("weigh_sum", cast, row_sum.clone(), factor, cast.to, self.precision.rescale.to)

    def add_sums(self, row_sum: Tensor, more: Tensor) -> Tensor:
        """`l + sum P`, in memory of its own."""
        cast = self.precision.row_sum.accumulate
        return self._once("add_sums", Operation.ADD, cast, cast.to, cast.to)(row_sum.clone(), more, self.noise)

    def probabilities(self, p: Tensor, scale: float = 1.0) -> Tensor:
        """P times `scale` as it enters the second product."""
        cast, entered = self.precision.probabilities, self.precision.exponential
        if scale != 1.0 and isinstance(cast, Cast):
            return self._times("probabilities", cast, p, scale, entered.to, scale)
        return p if cast == entered else cast.apply_(p.mul_(scale), self.noise)  # a number of the format is not rounded again

    def share(self, p: Tensor, row_sum: Tensor) -> Tensor:
        """`P / l` in the format of P, then as it enters the second product: a softmax, then a matmul."""
        cast, sums = self.precision.exponential, self.precision.row_sum.accumulate.to
        return self.probabilities(self._once("share", Operation.DIVIDE, cast, cast.to, sums)(p, divisor(row_sum), self.noise))

    def values(self, p: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """`P V`, in which keys that a row does not see have no part."""
        return visible_product(p, v, visible, lambda p, v: self.precision.values(p, v, self.noise))

    def unscale_values(self, product: Tensor, scale: float) -> Tensor:
        """`P V / scale`, which undoes the scale of P."""
        cast = self.precision.values.accumulate
        return self._once("unscale_values", Operation.DIVIDE, cast, cast.to, scale)(product, scale, self.noise)

    def rescale_output(self, o: Tensor, alpha: Tensor) -> Tensor:
        """`alpha O`."""
        cast = self.precision.accumulator
        return self._times("rescale_output", cast, o, alpha, cast.to, self.precision.rescale.to)

    def weigh_output(self, o: Tensor, row_sum: Tensor) -> Tensor:
        """`(alpha l) O`: the result so far, as the sum that it was."""
        cast = self.precision.accumulator
        return self._times("weigh_output", cast, o, row_sum, cast.to, self.precision.row_sum.accumulate.to)

    def weigh_values(self, product: Tensor, beta: Tensor) -> Tensor:
        """`beta P V`, in the format of the accumulator."""
        of = self.precision.values.accumulate.to
        return self._times("weigh_values", self.precision.accumulator, product, beta, of, self.precision.rescale.to)

    def accumulate(self, o: Tensor, more: Tensor) -> Tensor:
        """`O + P V`."""
        cast = self.precision.accumulator
        return self._once("accumulate", Operation.ADD, cast, cast.to, self.precision.values.accumulate.to)(o, more, self.noise)

    def accumulate_weighed(self, o: Tensor, more: Tensor) -> Tensor:
        """`O + beta P V`, or `O + w O_s`: both of the format of the accumulator."""
        cast = self.precision.accumulator
        return self._once("accumulate_weighed", Operation.ADD, cast, cast.to, cast.to)(o, more, self.noise)

    def normalise(self, o: Tensor, row_sum: Tensor) -> Tensor:
        """`O / l`, 0 where l is 0."""
        cast, sums = self.precision.accumulator, self.precision.row_sum.accumulate.to
        return self._once("normalise", Operation.DIVIDE, cast, cast.to, sums)(o, divisor(row_sum), self.noise)

    def output(self, out: Tensor) -> Tensor:
        return self.precision.output.apply_(out, self.noise)

    def lse(self, m: Tensor, row_sum: Tensor, of: Format, log_scale: float = 1.0) -> Tensor:
        """`LSE = m / log_scale + log l`, in memory of its own; minus infinity where the row has no sum. `of` is the format of m."""
        cast = self.precision.row_sum.accumulate
        m = m.masked_fill(m == NEVER, 0.0)
        if log_scale != 1.0:
            m = self._once("unscale_maximum", Operation.DIVIDE, cast, of, log_scale)(m, log_scale, self.noise)
            of = cast.to
        empty = row_sum == 0
        log = cast.apply_(row_sum.masked_fill(empty, 1.0).log_(), self.noise)
        return self._once(f"lse of {of.name}", Operation.ADD, cast, of, cast.to)(m, log, self.noise).masked_fill_(empty, NEVER)

    def weight(self, lse: Tensor, of: Tensor) -> Tensor:
        """`exp(LSE_s - LSE)`, the weight of a split; 0 of one without a sum."""
        cast, sums = self.precision.rescale, self.precision.row_sum.accumulate.to
        never = lse == NEVER
        difference = torch.where(never, 0.0, lse)
        self._once("weight", Operation.SUBTRACT, cast, sums, sums)(difference, torch.where(never, 0.0, of), self.noise)
        return cast.apply_(difference.exp_(), self.noise).masked_fill_(never, 0.0)

    def add_weight(self, total: Tensor, weight: Tensor) -> Tensor:
        """`l + w`, the sum of the weights of the splits."""
        cast = self.precision.row_sum.accumulate
        return self._once("add_weight", Operation.ADD, cast, cast.to, self.precision.rescale.to)(total, weight, self.noise)

    def add_part(self, combined: Tensor, out: Tensor, weight: Tensor) -> Tensor:
        """`O + w O_s`."""
        return self.accumulate_weighed(combined, self.rescale_output(out.clone(), weight))

    def _times(self, name: str, cast: Cast, x: Tensor, y: Tensor | float, left: Format, right: Operand) -> Tensor:
        return self._once(name, Operation.MULTIPLY, cast, left, right)(x, y, self.noise)

    def _once(self, name: str, operation: Operation, cast: Cast, left: Operand, right: Operand) -> RoundedOnce:
        """The operation of a name, made when it is first asked for: a step is taken at every tile."""
        if name not in self._known:
            self._known[name] = RoundedOnce(operation, cast, left, right, self.carrier)
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, RoundedOnce]:
        return {}


def divisor(row_sum: Tensor) -> Tensor:
    """`l`, and 1 for a row without a sum, whose result is 0 as that of every shipped kernel."""
    return row_sum.masked_fill(row_sum == 0, 1.0)
