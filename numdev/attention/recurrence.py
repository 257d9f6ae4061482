"""The online softmax recurrence for a block of rows, one KV tile at a time, every operation in its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.attention.combine import combine
from numdev.attention.commonsteps import NEVER
from numdev.attention.counters import Counters
from numdev.attention.mask import Mask
from numdev.attention.softmax import Maximum, Normalise, OnlineSoftmax, SumOver
from numdev.attention.steps import Steps


@dataclass(frozen=True)
class Run:
    """What stays the same for all rows and tiles of a run. q, k and v are in the carrier, with heads grouped."""

    steps: Steps
    softmax: OnlineSoftmax
    q: Float[Tensor, "batch kv_heads group queries dim"]
    k: Float[Tensor, "batch kv_heads 1 keys dim"]
    v: Float[Tensor, "batch kv_heads 1 keys values"]
    mask: Mask
    factor: float
    counters: Counters | None


class Block(Protocol):
    """The running state of a block of rows over one split of the keys."""

    def meet(self, index: int, tile: tuple[int, int]) -> None:
        """The KV tile that stands at `index` of the order."""
        ...

    def finish(self) -> tuple[Tensor, Tensor]:
        """The normalised rows, and their LSE."""
        ...


def through(run: Run, splits: list[list[tuple[int, int]]], first: int, start: Callable[[int], Block]) -> tuple[Tensor, Tensor]:
    """A block of rows from row `first` on through every tile of every split; `start` begins a split."""
    parts = []
    for split, tiles in enumerate(splits):
        rows = start(split)
        for index, tile in enumerate(tiles):
            rows.meet(index, tile)
        parts.append(rows.finish())
    out, lse = parts[0] if len(parts) == 1 else combine(parts, run.steps, first)
    return run.steps.output(out), lse


class Rows:
    """The rows `[first, last)` of the queries, and their running `m`, `l` and `O` over one split of the keys."""

    def __init__(self, run: Run, first: int, last: int, split: int) -> None:
        self._run = run
        self._first, self._last, self._split = first, last, split
        rows = run.q[..., first:last, :]
        self.m = rows.new_full((*rows.shape[:-1], 1), NEVER)
        self.l = torch.zeros_like(self.m)
        self.o = rows.new_zeros(*rows.shape[:-1], run.v.shape[-1])

    def meet(self, index: int, tile: tuple[int, int]) -> None:
        """The KV tile that stands at `index` of the order, for every row that sees a key of it; the others keep their state."""
        run = self._run
        queries, keys = run.q.shape[-2], run.k.shape[-2]
        first, last = run.mask.query_range(queries, keys, *tile)
        first, last = max(first, self._first), min(last, self._last)
        if first >= last:
            return
        run.steps.at(self._split, index, first)
        s = run.steps.scores(run.q[..., first:last, :], run.k[..., slice(*tile), :].mT, run.factor)
        visible = run.mask.visible(queries, keys, (first, last), tile, s.device)
        if visible is not None:
            visible = visible[:, :, None]
            s.masked_fill_(~visible, NEVER)
        self._update(slice(first - self._first, last - self._first), s, run.v[..., slice(*tile), :], visible, first)

    def _update(self, here: slice, s: Tensor, v: Tensor, visible: Tensor | None, first: int) -> None:
        """`m, l, O -> m', l', O'` for the rows `here` of the block."""
        run, steps, soft = self._run, self._run.steps, self._run.softmax
        m_old, l_old = self.m[..., here, :], self.l[..., here, :]
        largest = soft.largest(s, steps.shift_tied(soft.tie_shift))
        m = soft.running(m_old, largest)
        if run.counters is not None:
            run.counters.scores(s, largest, m, first)
        local = soft.maximum is Maximum.LOCAL
        p = steps.exponential(s, largest if local else m, soft.exp)
        # alpha is no entry of P: kernels compute it by the exact exponential also where P is by a polynomial (FA4, section 3).
        alpha = steps.rescale(m_old, m, soft.exp.exact)
        beta = steps.rescale(largest, m, soft.exp.exact) if local else None
        watch = None if run.counters is None else run.counters.addition
        rounded = self._round(p.clone(), visible) if soft.sum_over is SumOver.PROBABILITIES else None
        tile_sum = steps.row_sum(p, 1.0, watch) if rounded is None else steps.row_sum(rounded, soft.p_scale, watch)
        if beta is not None:
            tile_sum = steps.weigh_sum(tile_sum, beta)
        kept = steps.weigh_sum(l_old, alpha)
        row_sum = steps.add_sums(kept, tile_sum)
        if run.counters is not None:
            run.counters.row_sums(p, alpha, l_old)
            run.counters.addition(kept, tile_sum, row_sum)
        product = self._product(self._round(p, visible) if rounded is None else rounded, v, visible)
        if visible is None or bool((seen := visible.any(-1, keepdim=True)).all()):
            self._accumulate_(self.o[..., here, :], alpha, beta, kept, row_sum, product)
        else:
            o = self.o[..., here, :]
            o.copy_(torch.where(seen, self._accumulate_(o.clone(), alpha, beta, kept, row_sum, product), o))
            row_sum = torch.where(seen, row_sum, l_old)
        m_old.copy_(m)
        l_old.copy_(row_sum)

    def _round(self, p: Tensor, visible: Tensor | None) -> Tensor:
        """P times its scale in the format that enters the second product, in place."""
        scale, counters = self._run.softmax.p_scale, self._run.counters
        if counters is not None:
            counters.before_cast(p, scale)
        p = self._run.steps.probabilities(p, scale)
        if counters is not None:
            counters.after_cast(p, visible)
        return p

    def _product(self, p: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """`P V`, the scale of P taken out of it."""
        steps, scale = self._run.steps, self._run.softmax.p_scale
        product = steps.values(p, v, visible)
        return product if scale == 1.0 else steps.unscale_values(product, scale)

    def _accumulate_(
        self, o: Tensor, alpha: Tensor, beta: Tensor | None, kept: Tensor, row_sum: Tensor, product: Tensor
    ) -> Tensor:
        """`O <- alpha O + P V`, or with `Normalise.EACH` `O <- (alpha l O + P V) / l'` (FlashAttention-1, line 12).

        With `Maximum.LOCAL` the product is weighed by `beta = exp(rowmax S - m')`.
        """
        steps = self._run.steps
        each = self._run.softmax.normalise is Normalise.EACH
        if each:
            steps.weigh_output(o, kept)
        else:
            self._rescale_(o, alpha)
        if beta is None:
            steps.accumulate(o, product)
        else:
            steps.accumulate_weighed(o, steps.weigh_values(product, beta))
        return steps.normalise(o, row_sum) if each else o

    def _rescale_(self, o: Tensor, alpha: Tensor) -> None:
        """`O <- alpha O`. On a CPU the rows whose alpha is 1, soon nearly all, are left alone: nothing about them changes."""
        steps, moved = self._run.steps, (alpha != 1).squeeze(-1)
        if o.is_cpu and steps.noise is None and 4 * int(moved.sum()) < moved.numel():
            o[moved] = steps.rescale_output(o[moved], alpha[moved])
        else:
            steps.rescale_output(o, alpha)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The normalised rows, and their LSE."""
        steps, soft = self._run.steps, self._run.softmax
        steps.at(self._split, -1, self._first)
        out = self.o if soft.normalise is Normalise.EACH else steps.normalise(self.o, self.l)
        return out, steps.lse(self.m, self.l, soft.log_scale)
