"""Tiled attention in pure tensors, every step in a format of its own: the instrument's subject.

The recurrence of FlashAttention-1 (Dao et al. 2022, Algorithm 1) and -2 (Dao 2023, Algorithm 1) as DESIGN states it.
All rows of all heads and batch entries go through one KV tile together, since rows are independent; only tiles are a loop.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.attention.base import Output, check_shapes, group_heads, softmax_scale
from numdev.attention.counters import Counters
from numdev.formats import Format
from numdev.mask import Mask
from numdev.precision import Precision
from numdev.rounding import Cast
from numdev.softmax import Normalise, OnlineSoftmax, ScaleOn
from numdev.tiling import Tiling


@dataclass
class _State:
    """The running values of a block of rows; the tile step updates them in place."""

    m: Float[Tensor, "*rows 1"]
    l: Float[Tensor, "*rows 1"]  # noqa: E741  the paper's symbol
    o: Float[Tensor, "*rows dim"]

    @staticmethod
    def start(q: Tensor, dim: int) -> _State:
        rows = q.shape[:-1]
        return _State(q.new_full((*rows, 1), float("-inf")), q.new_zeros(*rows, 1), q.new_zeros(*rows, dim))

    def rows(self, first: int, last: int) -> _State:
        """A view of some rows."""
        return _State(*(t[..., first:last, :] for t in (self.m, self.l, self.o)))


@dataclass(frozen=True)
class Tiled:
    """Tiled attention under a precision policy.

    A row's state is not touched by a tile in which the row sees no key. So the result of a row depends on its own query,
    on k and v, on `bc`, the order and the splits; never on `br`, on the loop order or on other rows.

    Attributes:
        precision: the format of each step.
        tiling: which tiles, in which order.
        softmax: the recurrence.
        count: whether to fill `Output.counters`; counting reads every P twice more and changes no result.
    """

    precision: Precision
    tiling: Tiling = Tiling()
    softmax: OnlineSoftmax = OnlineSoftmax()
    count: bool = True

    @property
    def format(self) -> Format:
        return self.precision.format

    @property
    def input_key(self) -> Hashable:
        return self.precision.inputs, self.precision.carrier

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.precision.round_inputs(q, k, v)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs in, the carrier out. Shapes as in `Output`."""
        check_shapes(q, k, v, mask)
        factor = softmax_scale(q, scale) * self.softmax.log_scale
        carrier = self.precision.carrier
        q, k, v = group_heads(q.to(carrier), k.shape[1]), k.to(carrier)[:, :, None], v.to(carrier)[:, :, None]
        if self.softmax.scale_on is ScaleOn.QUERIES:
            q, factor = self._scale_queries(q * factor), 1.0
        counters = Counters(q[..., :1], self.softmax, self.precision.probabilities) if self.count else None
        parts = []
        for tiles in self.tiling.key_tiles(k.shape[-2]):
            state = _State.start(q, v.shape[-1])
            for tile in tiles:
                self._tile(state, q, k, v, mask, factor, tile, counters)
            parts.append(self._finish(state))
        out, lse = parts[0] if len(parts) == 1 else self._combine(parts)
        out = self.precision.output.apply_(out)
        counted = counters.summary() if counters is not None else {}
        return Output(out.flatten(1, 2), lse.squeeze(-1).flatten(1, 2), counted)

    def _scale_queries(self, q: Tensor) -> Tensor:
        """Scaled queries enter the product in the format of the inputs; a quantised grid is not cast to again."""
        inputs = self.precision.inputs
        return inputs.apply_(q) if isinstance(inputs, Cast) else q

    def _tile(
        self,
        state: _State,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        factor: float,
        tile: tuple[int, int],
        counters: Counters | None,
    ) -> None:
        """One KV tile for every row that sees a key of it."""
        queries, keys = q.shape[-2], k.shape[-2]
        first, last = mask.query_range(queries, keys, *tile)
        if first >= last:
            return
        step, soft = self.precision, self.softmax
        state, q = state.rows(first, last), q[..., first:last, :]
        k, v = k[..., slice(*tile), :], v[..., slice(*tile), :]
        s = step.scores(q, k.mT)
        if factor != 1.0:
            s = step.scores.accumulate.apply_(s.mul_(factor))
        visible = mask.visible(queries, keys, (first, last), tile, q.device)
        if visible is not None:
            visible = visible[:, :, None]
            s.masked_fill_(~visible, float("-inf"))
        m = soft.maximum(state.m, s)
        if counters is not None:
            counters.scores(s, m, state.m, first)
        shift = m.masked_fill(m == float("-inf"), 0.0) if visible is not None else m
        p = step.exponential.apply_(soft.exp(step.exponential.apply_(s.sub_(shift))))
        alpha = step.rescale.apply_(soft.exp(step.rescale.apply_(state.m - shift)))
        tile_sum = step.row_sum.sum(p)
        kept = step.row_sum.accumulate.apply_(alpha * state.l)
        row_sum = step.row_sum.accumulate.apply_(kept + tile_sum)
        if counters is not None:
            counters.row_sums(p, alpha, state.l > 0, kept, row_sum, tile_sum)
        if soft.p_scale != 1.0:
            p.mul_(soft.p_scale)
        if counters is not None:
            counters.before_cast(p)
        p = step.probabilities.apply_(p)
        if counters is not None:
            counters.after_cast(p, visible)
        product = step.values(p, v)
        if soft.p_scale != 1.0:
            product = step.values.accumulate.apply_(product.mul_(1.0 / soft.p_scale))
        self._accumulate(state, visible, m, alpha, kept, row_sum, product)

    def _accumulate(
        self,
        state: _State,
        visible: Tensor | None,
        m: Tensor,
        alpha: Tensor,
        kept: Tensor,
        row_sum: Tensor,
        product: Tensor,
    ) -> None:
        """`O <- alpha O + P V`, or with `Normalise.EACH` `O <- (alpha l O + P V) / l'` (FlashAttention-1, line 12)."""
        cast = self.precision.accumulator
        seen = None if visible is None else visible.any(-1, keepdim=True)
        if self.softmax.normalise is Normalise.END:
            new = cast.apply_(cast.apply_(state.o * alpha).add_(product))
        else:
            new = cast.apply_(cast.apply_(state.o * kept).add_(product))
            new = cast.apply_(new.div_(torch.where(row_sum == 0, 1.0, row_sum)))
        state.o.copy_(new if seen is None else torch.where(seen, new, state.o))
        state.m.copy_(m)
        state.l.copy_(row_sum if seen is None else torch.where(seen, row_sum, state.l))

    def _finish(self, state: _State) -> tuple[Tensor, Tensor]:
        """The normalised result and the LSE of one split."""
        step = self.precision
        out = state.o
        if self.softmax.normalise is Normalise.END:
            out = step.accumulator.apply_(out / torch.where(state.l == 0, 1.0, state.l))
        cast = step.row_sum.accumulate
        m = state.m.masked_fill(state.m == float("-inf"), 0.0)
        if self.softmax.exp.is_binary:
            m = m / self.softmax.log_scale
        return out, cast.apply_(cast.apply_(m) + cast.apply_(state.l.log()))

    def _combine(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """`O = sum_s w_s O_s` with `w_s = exp(LSE_s - LSE)` (Flash-Decoding): weights in `rescale`, sums in `accumulator`."""
        step = self.precision
        stacked = torch.stack([lse for _, lse in parts])
        largest = stacked.amax(0)
        largest = largest.masked_fill(largest == float("-inf"), 0.0)
        total = torch.zeros_like(largest)
        for _, lse in parts:
            weight = step.rescale.apply_(step.rescale.apply_(lse - largest).exp_())
            total = step.row_sum.accumulate.apply_(total + weight)
        cast = step.row_sum.accumulate
        lse_all = cast.apply_(largest + cast.apply_(total.log()))
        reference = lse_all.masked_fill(lse_all == float("-inf"), 0.0)
        combined = torch.zeros_like(parts[0][0])
        for out, lse in parts:
            weight = step.rescale.apply_(step.rescale.apply_(lse - reference).exp_())
            combined = step.accumulator.apply_(combined + step.accumulator.apply_(out * weight))
        return combined, lse_all
