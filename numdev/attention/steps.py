"""The steps of forward attention under a policy: each elementary operation is rounded once, to the format of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.dot import Watch
from numdev.arithmetic.noise import Noise
from numdev.arithmetic.products import visible_product
from numdev.arithmetic.rounding import Cast
from numdev.attention.commonsteps import NEVER, CommonSteps, Function
from numdev.attention.operations import OPERATIONS, Row
from numdev.attention.precision import Precision


@dataclass(frozen=True)
class Steps(CommonSteps):
    """The steps of the forward pass; see `CommonSteps`."""

    table: ClassVar[Mapping[str, Row]] = OPERATIONS

    precision: Precision

    @staticmethod
    def of(precision: Precision, total_rows: int) -> Steps:
        """The steps of a run over so many rows of each head."""
        return Steps(precision, precision.carrier, Noise(total_rows=total_rows) if precision.is_random else None)

    def shift_tied(self, beta: float | None) -> Function:
        """`beta m`, in the format of the scores, for a tied maximum."""
        return lambda m: m if beta is None else self._do("shift ties", m, beta)

    def rescale(self, m: Tensor, m_next: Tensor, exp: Function) -> Tensor:
        """`exp(m - m')`, the factor of what was summed relative to m; 0 where m is no number."""
        return self._decay("fall of the maximum", m, m_next, exp)

    def row_sum(self, p: Tensor, scale: float = 1.0, watch: Watch | None = None) -> Tensor:
        """`sum P`, and the scale of P taken out of it."""
        total = self.precision.row_sum.sum(p, self.noise, watch)
        return total if scale == 1.0 else self._do("unscale sum", total, scale)

    def weigh_sum(self, row_sum: Tensor, factor: Tensor) -> Tensor:
        """`alpha l`, in memory of its own."""
        return self._do("weigh sum", row_sum.clone(), factor)

    def add_sums(self, row_sum: Tensor, more: Tensor) -> Tensor:
        """`l + sum P`, in memory of its own."""
        return self._do("add sums", row_sum.clone(), more)

    def probabilities(self, p: Tensor, scale: float = 1.0) -> Tensor:
        """P times `scale` as it enters the second product."""
        cast = self.precision.probabilities
        if scale != 1.0 and isinstance(cast, Cast):
            return self._do("scale probabilities", p, scale)
        if cast == self.precision.exponential:
            return p  # a number of the format is not rounded again
        return cast.apply_(p.mul_(scale), self.noise)

    def share(self, p: Tensor, row_sum: Tensor) -> Tensor:
        """`P / l` in the format of P, then as it enters the second product: a softmax, then a matmul."""
        return self.probabilities(self._do("share", p, divisor(row_sum)))

    def values(self, p: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """`P V`, in which keys that a row does not see have no part."""
        return visible_product(p, v, visible, lambda p, v: self.precision.values(p, v, self.noise))

    def unscale_values(self, product: Tensor, scale: float) -> Tensor:
        """`P V / scale`, which undoes the scale of P."""
        return self._do("unscale values", product, scale)

    def rescale_output(self, o: Tensor, alpha: Tensor) -> Tensor:
        """`alpha O`."""
        return self._do("rescale output", o, alpha)

    def weigh_output(self, o: Tensor, row_sum: Tensor) -> Tensor:
        """`(alpha l) O`: the result so far, as the sum that it was."""
        return self._do("weigh output", o, row_sum)

    def weigh_values(self, product: Tensor, beta: Tensor) -> Tensor:
        """`beta P V`, in the format of the accumulator."""
        return self._do("weigh values", product, beta)

    def accumulate(self, o: Tensor, more: Tensor) -> Tensor:
        """`O + P V`."""
        return self._do("accumulate", o, more)

    def accumulate_weighed(self, o: Tensor, more: Tensor) -> Tensor:
        """`O + beta P V`, or `O + w O_s`: both of the format of the accumulator."""
        return self._do("accumulate weighed", o, more)

    def normalise(self, o: Tensor, row_sum: Tensor) -> Tensor:
        """`O / l`, 0 where l is 0."""
        return self._do("normalise", o, divisor(row_sum))

    def enter_accumulator(self, product: Tensor) -> Tensor:
        """`P V` in the format of the accumulator."""
        return self.precision.accumulator.apply_(product, self.noise)

    def output(self, out: Tensor) -> Tensor:
        """What is returned, in the format of the output."""
        return self.precision.output.apply_(out, self.noise)

    def lse(self, m: Tensor, row_sum: Tensor, log_scale: float = 1.0) -> Tensor:
        """`LSE = m / log_scale + log l`, in memory of its own; minus infinity where the row has no sum."""
        m = m.masked_fill(m == NEVER, 0.0)
        if log_scale == 1.0:
            return self._log_sum("log sum", m, row_sum)
        return self._log_sum("add sums", self._do("unscale maximum", m, log_scale), row_sum)

    def weight(self, lse: Tensor, of: Tensor) -> Tensor:
        """`exp(LSE_s - LSE)`, the weight of a split; 0 of one without a sum."""
        return self._decay("distance of splits", lse, of, torch.exp_)

    def add_weight(self, total: Tensor, weight: Tensor) -> Tensor:
        """`l + w`, the sum of the weights of the splits."""
        return self._do("add weight", total, weight)

    def lse_of_splits(self, largest: Tensor, total: Tensor) -> Tensor:
        """`LSE = max LSE_s + log l`."""
        return self._log_sum("add sums", largest.masked_fill(largest == NEVER, 0.0), total)

    def add_part(self, combined: Tensor, out: Tensor, weight: Tensor) -> Tensor:
        """`O + w O_s`."""
        return self.accumulate_weighed(combined, self.rescale_output(out.clone(), weight))

    def _log_sum(self, name: str, m: Tensor, row_sum: Tensor) -> Tensor:
        empty = row_sum == 0
        log = self.precision.row_sum.accumulate.apply_(row_sum.masked_fill(empty, 1.0).log_(), self.noise)
        return self._do(name, m, log).masked_fill_(empty, NEVER)

    def _decay(self, name: str, x: Tensor, of: Tensor, exp: Function) -> Tensor:
        """`exp(x - of)` in the format of `rescale`, 0 where x is no number."""
        never = x == NEVER
        difference = self._do(name, torch.where(never, 0.0, x), torch.where(never, 0.0, of))
        return self.precision.rescale.apply_(exp(difference), self.noise).masked_fill_(never, 0.0)


def divisor(row_sum: Tensor) -> Tensor:
    """`l`, and 1 for a row without a sum, whose result is 0 as that of every shipped kernel."""
    return row_sum.masked_fill(row_sum == 0, 1.0)
