"""The online softmax recurrence for a block of rows, one KV tile at a time, every operation in its format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.attention.counters import Counters
from numdev.mask import Mask
from numdev.precision import Precision
from numdev.softmax import Normalise, OnlineSoftmax, SumOver


@dataclass(frozen=True)
class Setting:
    """What stays the same for all rows and tiles of a run. q, k and v are in the carrier, with heads grouped."""

    precision: Precision
    softmax: OnlineSoftmax
    q: Float[Tensor, "batch kv_heads group queries dim"]
    k: Float[Tensor, "batch kv_heads 1 keys dim"]
    v: Float[Tensor, "batch kv_heads 1 keys values"]
    mask: Mask
    factor: float
    counters: Counters | None


class Rows:
    """The rows `[first, last)` of the queries, and their running `m`, `l` and `O`."""

    def __init__(self, setting: Setting, first: int, last: int) -> None:
        self._setting = setting
        self._first, self._last = first, last
        rows = setting.q[..., first:last, :]
        self.m = rows.new_full((*rows.shape[:-1], 1), float("-inf"))
        self.l = torch.zeros_like(self.m)
        self.o = rows.new_zeros(*rows.shape[:-1], setting.v.shape[-1])

    def meet(self, tile: tuple[int, int]) -> None:
        """One KV tile, for every row that sees a key of it; the state of the others is not touched."""
        run = self._setting
        queries, keys = run.q.shape[-2], run.k.shape[-2]
        first, last = run.mask.query_range(queries, keys, *tile)
        first, last = max(first, self._first), min(last, self._last)
        if first >= last:
            return
        here = slice(first - self._first, last - self._first)
        s = self._scores(run.q[..., first:last, :], run.k[..., slice(*tile), :])
        visible = run.mask.visible(queries, keys, (first, last), tile, s.device)
        if visible is not None:
            visible = visible[:, :, None]
            s.masked_fill_(~visible, float("-inf"))
        self._update(here, s, run.v[..., slice(*tile), :], visible, first)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        step = self._setting.precision.scores
        s = step(q, k.mT)
        return s if self._setting.factor == 1.0 else step.accumulate.apply_(s.mul_(self._setting.factor))

    def _update(self, here: slice, s: Tensor, v: Tensor, visible: Tensor | None, first: int) -> None:
        """`m, l, O -> m', l', O'` for the rows `here` of the block."""
        step, soft, counters = self._setting.precision, self._setting.softmax, self._setting.counters
        m_old, l_old = self.m[..., here, :], self.l[..., here, :]
        m = soft.maximum(m_old, s)
        if counters is not None:
            counters.scores(s, m, first)
        shift = m.masked_fill(m == float("-inf"), 0.0)
        p = step.exponential.apply_(soft.exp(step.exponential.apply_(s.sub_(shift))))
        # alpha is no entry of P: kernels compute it by the exact exponential also where P is by a polynomial (FA4, section 3).
        alpha = step.rescale.apply_(soft.exp.exact(step.rescale.apply_(m_old - shift)))
        rounded = self._round(p.clone(), visible) if soft.sum_over is SumOver.PROBABILITIES else None
        tile_sum = step.row_sum.sum(p) if rounded is None else self._unscaled_sum(rounded)
        kept = step.row_sum.accumulate.apply_(alpha * l_old)
        row_sum = step.row_sum.accumulate.apply_(kept + tile_sum)
        if counters is not None:
            counters.row_sums(p, alpha, l_old > 0, kept, row_sum, tile_sum)
        product = self._product(self._round(p, visible) if rounded is None else rounded, v)
        if visible is None or bool((seen := visible.any(-1, keepdim=True)).all()):
            self._accumulate_(self.o[..., here, :], alpha, kept, row_sum, product)
        else:
            o = self.o[..., here, :]
            o.copy_(torch.where(seen, self._accumulate_(o.clone(), alpha, kept, row_sum, product), o))
            row_sum = torch.where(seen, row_sum, l_old)
        m_old.copy_(m)
        l_old.copy_(row_sum)

    def _round(self, p: Tensor, visible: Tensor | None) -> Tensor:
        """P times its scale in the format that enters the second product, in place."""
        step, scale, counters = self._setting.precision, self._setting.softmax.p_scale, self._setting.counters
        if scale != 1.0:
            p.mul_(scale)
        if counters is not None:
            counters.before_cast(p)
        if scale != 1.0 or step.probabilities != step.exponential:  # a number of the format is not rounded again
            p = step.probabilities.apply_(p)
        if counters is not None:
            counters.after_cast(p, visible)
        return p

    def _unscaled_sum(self, p: Tensor) -> Tensor:
        """`rowsum P` from the rounded and scaled P, the scale taken out of it as out of the product."""
        step, scale = self._setting.precision.row_sum, self._setting.softmax.p_scale
        total = step.sum(p)
        return total if scale == 1.0 else step.accumulate.apply_(total.div_(scale))

    def _product(self, p: Tensor, v: Tensor) -> Tensor:
        """`P V`, the scale of P taken out of it."""
        step, scale = self._setting.precision, self._setting.softmax.p_scale
        product = step.values(p, v)
        return product if scale == 1.0 else step.values.accumulate.apply_(product.div_(scale))

    def _accumulate_(self, o: Tensor, alpha: Tensor, kept: Tensor, row_sum: Tensor, product: Tensor) -> Tensor:
        """`O <- alpha O + P V`, or with `Normalise.EACH` `O <- (alpha l O + P V) / l'` (FlashAttention-1, line 12)."""
        cast = self._setting.precision.accumulator
        each = self._setting.softmax.normalise is Normalise.EACH
        if each:
            cast.apply_(o.mul_(kept))
        else:
            self._rescale_(o, alpha)
        cast.apply_(o.add_(product))
        return cast.apply_(o.div_(_divisor(row_sum))) if each else o

    def _rescale_(self, o: Tensor, alpha: Tensor) -> None:
        """`O <- alpha O`. On a CPU the rows whose alpha is 1, soon nearly all, are left alone: nothing about them changes."""
        cast, moved = self._setting.precision.accumulator, (alpha != 1).squeeze(-1)
        if o.is_cpu and 4 * int(moved.sum()) < moved.numel():
            o[moved] = cast.apply_(o[moved].mul_(alpha[moved]))
        else:
            cast.apply_(o.mul_(alpha))

    def finish(self) -> tuple[Tensor, Tensor]:
        """The normalised rows, and their LSE."""
        step, soft = self._setting.precision, self._setting.softmax
        out = self.o if soft.normalise is Normalise.EACH else step.accumulator.apply_(self.o.div_(_divisor(self.l)))
        cast = step.row_sum.accumulate
        m = self.m.masked_fill(self.m == float("-inf"), 0.0)
        if soft.exp.is_binary:
            m = cast.apply_(m / soft.log_scale)
        return out, cast.apply_(m + cast.apply_(self.l.log()))


def _divisor(row_sum: Tensor) -> Tensor:
    """`l`, and 1 for a row that has seen no key, whose result is 0."""
    return row_sum.masked_fill(row_sum == 0, 1.0)
