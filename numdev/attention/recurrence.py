"""The recurrences of tiled attention, one tile at a time, every operation in its format, and the events that a run counts.

Forward, the online softmax of a block of rows over tiles of keys; backward, gradients over pairs of a query tile and a KV tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.softmax import Maximum, Normalise, OnlineSoftmax, Recompute, SumOver
from numdev.attention.steps import DELTA, LOG2_E, NEVER, TILES, BackwardSteps, Steps, slope
from numdev.attention.tile_schedule import Meeting, Range

COUNTERS = {
    "rescales_per_row": ("per row", "times that alpha differed from 1 on a row already begun, mean over rows"),
    "tied_rows": ("relative", "share of rows whose largest score occurs more than once"),
    "p_one_per_row": ("per row", "entries of P equal to 1, mean over rows"),
    "p_flushed": ("relative", "share of the visible entries of P that are 0 after the probabilities cast"),
    "p_saturated": ("relative", "share of the visible entries of P beyond the largest number of the probabilities format"),
    "stagnated_per_row": ("per row", "additions of something positive that left a running row sum as it was, mean over rows"),
    "lost_rows": ("relative", "share of rows that see a key and whose row sum is 0: their result is 0, their LSE -inf"),
}
"""Unit and meaning of each event of a forward run."""

BACKWARD_COUNTERS = {
    "p_above_one": ("relative", "share of the visible entries of P, as it is recomputed, above 1: only rounding can make them"),
    "p_flushed": ("relative", "share of the visible entries of P that are 0 after the probabilities cast"),
    "ds_flushed": ("relative", "share of the visible entries of dS that are 0 after the ds cast"),
}
"""Of a backward run."""


class Counters:
    """Events of one run, summed over tiles on the device; only `summary` waits for it."""

    def __init__(self, rows: Tensor, softmax: OnlineSoftmax, precision: Precision, keep_scale: float = 1.0) -> None:
        """`rows` is any tensor of shape [batch, ..., rows, 1] on the device; `keep_scale` is dropout's factor of P."""
        self._events = torch.zeros(6, dtype=torch.float64, device=rows.device)
        self._ties = torch.zeros(rows.shape[:-1], dtype=rows.dtype, device=rows.device)
        self._largest = rows.new_full(rows.shape, float("-inf"))
        # Whether the maximum that exponentials are taken from can be another number than the largest score.
        self._maximum_lags = softmax.rescale_threshold > 0 or softmax.tie_shift is not None
        self._limit = precision.probabilities.largest
        self._can_saturate = can_saturate(precision, softmax, keep_scale)
        self._lost = torch.zeros((), dtype=torch.int64, device=rows.device)
        self._scratch = rows.new_empty(0)

    def scores(self, s: Tensor, m: Tensor, first: int) -> None:
        """How often the largest score so far occurs, in any split; the count starts over when it rises.

        `m` is the new running maximum of each row of the tile.
        """
        rows = slice(first, first + s.shape[-2])
        ties, before = self._ties[..., rows], self._largest[..., rows, :]
        largest = torch.maximum(before, s.amax(-1, keepdim=True) if self._maximum_lags else m)
        equal = self._equal(s, largest).masked_fill_((largest == float("-inf")).squeeze(-1), 0)
        ties.masked_fill_((largest > before).squeeze(-1), 0).add_(equal)
        before.copy_(largest)

    def row_sums(self, p: Tensor, alpha: Tensor, l_old: Tensor) -> None:
        """P of a tile, the rescale of the sums of its rows, and these before it."""
        self._events[0] += torch.count_nonzero((alpha != 1) & (l_old > 0))
        self._events[1] += self._equal(p, 1.0).sum(dtype=torch.float64)

    def addition(self, before: Tensor, added: Tensor, after: Tensor) -> None:
        """One addition to running row sums, within a tile or of a tile."""
        stagnated = torch.minimum(before, added).gt_(0.0).mul_(torch.eq(after, before, out=torch.empty_like(after)))
        self._events[2] += stagnated.sum(dtype=torch.float64)

    def before_cast(self, p: Tensor, scale: float) -> None:
        if self._can_saturate:
            self._events[3] += torch.mul(p, scale, out=self._like(p)).gt_(self._limit).sum(dtype=torch.float64)

    def after_cast(self, p: Tensor, visible: Tensor | None) -> None:
        seen: Tensor | int = p.numel()
        if visible is not None:
            seen = torch.count_nonzero(visible.expand(len(p), *visible.shape[1:])) * (p[0].numel() // visible[0].numel())
        nonzero = torch.ne(p, 0.0, out=self._like(p)).sum(dtype=torch.float64)
        self._events[4] += seen - nonzero  # an entry that is masked is 0 and not seen
        self._events[5] += seen

    def ended(self, lse: Tensor, sees: Tensor) -> None:
        """At the end: rows that see a key and have no sum, since every one of their scores or exponentials was lost."""
        self._lost += torch.count_nonzero((lse == float("-inf")).squeeze(-1) & sees)

    def summary(self) -> dict[str, float]:
        """The columns of `COUNTERS`."""
        rescales, ones, stagnated, saturated, flushed, entries = self._events.tolist()
        rows, entries, tied = self._ties.numel(), max(entries, 1), (self._ties > 1).double().mean().item()
        of_rows, lost = (rescales / rows, tied, ones / rows), self._lost.item() / rows
        return dict(zip(COUNTERS, (*of_rows, flushed / entries, saturated / entries, stagnated / rows, lost), strict=True))

    def _equal(self, x: Tensor, value: Tensor | float) -> Tensor:
        """How many numbers of each row of a tile equal a number, or that of the row."""
        return torch.eq(x, value, out=self._like(x)) @ x.new_ones(x.shape[-1])

    def _like(self, x: Tensor) -> Tensor:
        """Memory for a comparison's 0 and 1 as numbers of the carrier, which torch writes several times as fast as booleans."""
        if self._scratch.numel() < x.numel():
            self._scratch = x.new_empty(x.numel())
        return self._scratch[: x.numel()].view(x.shape)


class BackwardCounters:
    """Events of one backward run, summed over tiles on the device; only `summary` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._events = torch.zeros(len(BACKWARD_COUNTERS), dtype=torch.float64, device=device)
        self._entries = torch.zeros((), dtype=torch.float64, device=device)

    def tile(self, p: Tensor, entering: Tensor, ds: Tensor, visible: Tensor | None) -> None:
        """Count one tile: P as recomputed and as it enters its product, and dS as it enters its products; 0 where masked."""
        seen = p.numel() if visible is None else visible.sum() * (p.numel() // visible.numel())
        self._entries += seen
        self._events[0] += torch.count_nonzero(p > 1)
        self._events[1] += seen - torch.count_nonzero(entering)
        self._events[2] += seen - torch.count_nonzero(ds)

    def summary(self) -> dict[str, float]:
        """The columns of `BACKWARD_COUNTERS`."""
        entries = max(self._entries.item(), 1.0)
        return {name: count / entries for name, count in zip(BACKWARD_COUNTERS, self._events.tolist(), strict=True)}


def can_saturate(precision: Precision, softmax: OnlineSoftmax, keep_scale: float = 1.0) -> bool:
    """Whether an entry of P, scaled, can be beyond the largest number of its format; also true where this is not known.

    Taken from a maximum that follows every score, `x = S - m <= 0`, so that `e^x <= 1`, and for a polynomial `2^floor(x) p(x -
    floor(x)) <= sum |c_i|`; the exponential's cast adds at most `2 u` of that. A lazy maximum has no such bound: the distance is
    rounded after it is compared, and a maximum of a tile that is NaN, as of a tie whose shift overflows, is not followed.
    """
    coefficients = softmax.exp.coefficients
    largest = math.fsum(map(abs, coefficients)) * (1 + 4 * precision.exponential.to.u) if coefficients else 1.0
    return softmax.rescale_threshold > 0 or keep_scale * softmax.p_scale * max(1.0, largest) > precision.probabilities.largest


@dataclass(frozen=True)
class Run:
    """The part of a forward run that is the same for all rows and tiles. q, k and v are in the carrier, with heads grouped."""

    steps: Steps
    softmax: OnlineSoftmax
    q: Float[Tensor, "batch kv_heads group queries dim"]
    k: Float[Tensor, "batch kv_heads 1 keys dim"]
    v: Float[Tensor, "batch kv_heads 1 keys values"]
    mask: Mask
    factor: float
    counters: Counters | None
    tiles_per_promotion: int = 1
    joins: bool = False  # whether splits are joined one after the other, and not combined by their LSE
    # In FP32 those of q `[..., queries, 1]` and k `[..., 1, keys]`, and of v `[..., keys, 1]`, where these are codes
    scales: tuple[Tensor, Tensor] | None = None
    v_scale: Tensor | None = None

    def rows(self, splits: list[list[Range]], first: int, last: int) -> tuple[Tensor, Tensor]:
        """Output and LSE of the rows `[first, last)` after every tile of every split of the keys."""
        parts, whole = list[tuple[Tensor, Tensor]](), Rows(self, first, last, len(splits)) if self.joins else None
        for split, tiles in enumerate(splits):
            rows = Rows(self, first, last, split)
            for index, tile in enumerate(tiles):
                rows.meet(index, tile)
            if whole is None:
                parts.append(rows.finish())
            else:
                whole.join(rows)
        if whole is not None:
            parts = [whole.finish()]
        out, lse = parts[0] if len(parts) == 1 else self.steps.combine(parts, first)
        return self.steps.output(out), lse


class Rows:
    """The rows `[first, last)` of the queries, and their running `m`, `l` and `O` over one split of the keys."""

    def __init__(self, run: Run, first: int, last: int, split: int) -> None:
        self._run = run
        self._first, self._last, self._split = first, last, split
        rows = run.q[..., first:last, :]
        self.m = rows.new_full((*rows.shape[:-1], 1), NEVER)
        self.l = torch.zeros_like(self.m)
        self.o = rows.new_zeros(*rows.shape[:-1], run.v.shape[-1])
        # P V, times the scale of P, that stays in the tensor cores over tiles until it is promoted; and the tiles that a row met.
        self._pending = torch.zeros_like(self.o) if run.tiles_per_promotion > 1 else None
        self._tiles = torch.zeros_like(self.l)
        # The scale of the codes of V of the tile, and that in whose unit each row's sum in the tensor cores is.
        self._v_scale: Tensor | None = None
        self._unit = torch.ones_like(self.l)

    def meet(self, index: int, tile: tuple[int, int]) -> None:
        """The KV tile that stands at `index` of the order, for every row that sees a key of it; the others keep their state."""
        run = self._run
        queries, keys = run.q.shape[-2], run.k.shape[-2]
        first, last = run.mask.query_range(queries, keys, *tile)
        first, last = max(first, self._first), min(last, self._last)
        if first >= last:
            return
        run.steps.at(self._split, index, first)
        q, k = run.q[..., first:last, :], run.k[..., slice(*tile), :]
        bias = run.mask.added((first, last), tile, q)
        factor: float | Tensor = run.factor
        if run.scales is not None:
            factor = factor * run.scales[0][..., first:last, :] * run.scales[1][..., slice(*tile)]
        log_scale = run.softmax.log_scale
        cap = None if run.mask.softcap is None else run.mask.softcap * log_scale
        s = run.steps.raised(run.steps.scores(q, k.mT, factor, cap), cap, bias, log_scale)
        visible = run.mask.seen(queries, keys, (first, last), tile, s.device, k.shape[1])
        if visible is not None:
            s.masked_fill_(~visible, NEVER)
        self._v_scale = None if run.v_scale is None else run.v_scale[..., tile[0] : tile[0] + 1, :]
        dropped = run.mask.dropped((first, last), tile, q)
        self._update(slice(first - self._first, last - self._first), s, run.v[..., slice(*tile), :], (visible, dropped), first)

    def _update(self, here: slice, s: Tensor, v: Tensor, masks: tuple[Tensor | None, Tensor | None], first: int) -> None:
        """`m, l, O -> m', l', O'` for the rows `here` of the block."""
        run, steps, soft, (visible, dropped) = self._run, self._run.steps, self._run.softmax, masks
        m_old, l_old = self.m[..., here, :], self.l[..., here, :]
        largest = soft.largest(s, steps.shift_tied(soft.tie_shift))
        m = soft.running(m_old, largest)
        if run.counters is not None:
            run.counters.scores(s, m, first)
        local = soft.maximum is Maximum.LOCAL
        p = steps.exponential(s, largest if local else m, soft.exp)
        # alpha is no entry of P: kernels compute it by the exact exponential also where P is by a polynomial (FA4, section 3).
        alpha = steps.rescale(m_old, m, soft.exp.exact)
        beta = steps.rescale(largest, m, soft.exp.exact) if local else None
        watch = None if run.counters is None else run.counters.addition
        rounded = self._round(p.clone(), visible) if soft.sum_over is SumOver.PROBABILITIES else None
        tile_sum = steps.row_sum(p, 1.0, watch) if rounded is None else steps.row_sum(rounded, soft.p_scale, watch)
        if beta is not None:
            tile_sum = steps.do("weigh sum", tile_sum.clone(), beta)
        kept = steps.do("weigh sum", l_old.clone(), alpha)
        row_sum = steps.do("add sums", kept.clone(), tile_sum)
        if run.counters is not None:
            run.counters.row_sums(p, alpha, l_old)
            run.counters.addition(kept, tile_sum, row_sum)
        if rounded is None or dropped is not None:
            rounded = self._round(p, visible, dropped)
        product = self._product(rounded, v, visible, here, alpha)
        if visible is None or bool((seen := visible.any(-1, keepdim=True)).all()):
            self._accumulate_(self.o[..., here, :], alpha, beta, kept, row_sum, product)
        else:
            o = self.o[..., here, :]
            o.copy_(torch.where(seen, self._accumulate_(o.clone(), alpha, beta, kept, row_sum, product), o))
            row_sum = torch.where(seen, row_sum, l_old)
        m_old.copy_(m)
        l_old.copy_(row_sum)

    def _round(self, p: Tensor, visible: Tensor | None, dropped: Tensor | None = None) -> Tensor:
        """P times its scale, and with dropout times Z, in the format that enters the second product, in place."""
        scale, counters = self._run.softmax.p_scale, self._run.counters
        if dropped is not None:
            p, scale = p.masked_fill_(dropped, 0.0), scale * self._run.mask.keep_scale
        if counters is not None:
            counters.before_cast(p, scale)
        p = self._run.steps.probabilities(p, scale)
        if counters is not None:
            counters.after_cast(p, visible if dropped is None else ~dropped if visible is None else visible & ~dropped)
        return p

    def _product(self, p: Tensor, v: Tensor, visible: Tensor | None, here: slice, alpha: Tensor) -> Tensor:
        """`P V`, the scale of P taken out of it; of rows whose sum stays in the tensor cores 0, until it is promoted."""
        steps = self._run.steps
        if self._pending is None:
            return self._unscale(steps.values(p, v, visible), self._v_scale)
        pending, tiles = self._pending[..., here, :], self._tiles[..., here, :]
        tiles += 1 if visible is None else visible.any(-1, keepdim=True)
        start = steps.do("rescale output", pending, alpha)
        if self._v_scale is not None:
            unit = self._unit[..., here, :]
            start = steps.unscaled("values", start, unit / self._v_scale)
            unit.copy_(self._v_scale.expand_as(unit))
        total = steps.values(p, v, visible, start)
        is_due = tiles % self._run.tiles_per_promotion == 0
        pending.copy_(total.masked_fill(is_due, 0.0))
        return self._unscale(total.masked_fill_(~is_due, 0.0), self._v_scale)

    def _unscale(self, product: Tensor, v_scale: Tensor | None) -> Tensor:
        """The product of P and V without the scale of P, and times that of V, if this is in codes."""
        steps, scale = self._run.steps, self._run.softmax.p_scale
        if v_scale is not None:
            product = steps.unscaled("values", product, v_scale)
        return product if scale == 1.0 else steps.do("unscale values", product, scale)

    def _accumulate_(
        self, o: Tensor, alpha: Tensor, beta: Tensor | None, kept: Tensor, row_sum: Tensor, product: Tensor
    ) -> Tensor:
        """`O <- alpha O + P V`, or with `Normalise.EACH` `O <- (alpha l O + P V) / l'` (FlashAttention-1, line 12).

        With `Maximum.LOCAL` the product is weighed by `beta = exp(rowmax S - m')`.
        """
        steps = self._run.steps
        each = self._run.softmax.normalise is Normalise.EACH
        if each:
            steps.do("weigh output", o, kept)
        else:
            self._rescale_(o, alpha)
        if beta is None:
            steps.do("accumulate", o, product)
        else:
            steps.do("accumulate weighed", o, steps.do("weigh values", product, beta))
        return steps.normalise(o, row_sum) if each else o

    def _rescale_(self, o: Tensor, alpha: Tensor) -> None:
        """`O <- alpha O`. On a CPU the rows whose alpha is 1, soon nearly all, are left alone: nothing about them changes."""
        steps, moved = self._run.steps, (alpha != 1).squeeze(-1)
        if o.is_cpu and steps.noise is None and 4 * int(moved.sum()) < moved.numel():
            o[moved] = steps.do("rescale output", o[moved], alpha[moved])
        else:
            steps.do("rescale output", o, alpha)

    def join(self, split: Rows) -> None:
        """A split after these, as a tile under `Maximum.LOCAL`; a row that sees no key of it keeps its state."""
        steps, soft = self._run.steps, self._run.softmax
        split._settle()
        m = torch.maximum(self.m, split.m)
        alpha, beta = (steps.rescale(each.m, m, soft.exp.exact) for each in (self, split))
        kept, own = steps.do("weigh sum", self.l.clone(), alpha), steps.do("weigh sum", split.l, beta)
        row_sum = steps.do("add sums", kept.clone(), own)
        each = soft.normalise is Normalise.EACH
        name, left, right = ("weigh output", kept, own) if each else ("rescale output", alpha, beta)
        o = steps.do("accumulate weighed", steps.do(name, self.o.clone(), left), steps.do(name, split.o, right))
        o = steps.normalise(o, row_sum) if each else o
        seen = split.m != NEVER
        self.m, self.l, self.o = m, torch.where(seen, row_sum, self.l), torch.where(seen, o, self.o)

    def _settle(self) -> None:
        """Begin the rounding events that follow all tiles; what is pending is promoted."""
        self._run.steps.at(self._split, -1, self._first)
        if self._pending is not None:
            unit = None if self._v_scale is None else self._unit
            self._run.steps.do("accumulate", self.o, self._unscale(self._pending, unit))

    def finish(self) -> tuple[Tensor, Tensor]:
        """The normalised rows, and their LSE."""
        steps, soft = self._run.steps, self._run.softmax
        self._settle()
        out = self.o if soft.normalise is Normalise.EACH else steps.normalise(self.o, self.l)
        return out, steps.lse(self.m, self.l, soft.log_scale)


@dataclass(frozen=True)
class BackwardRun:
    """The part of a backward run that is the same for all tiles. All tensors are in the carrier, with heads grouped.

    LSE is in the units of the scores, `factor` the softmax scale, and meetings of tiles are in the order of their sums.
    """

    steps: BackwardSteps
    recompute: Recompute
    q: Float[Tensor, "batch kv_heads group queries dim"]
    k: Float[Tensor, "batch kv_heads 1 keys dim"]
    v: Float[Tensor, "batch kv_heads 1 keys values"]
    do: Float[Tensor, "batch kv_heads group queries values"]
    lse: Float[Tensor, "batch kv_heads group queries 1"]
    mask: Mask
    factor: float
    meetings: list[Meeting]

    def met(self, meeting: Meeting) -> list[Range]:
        """The tiles of queries of a meeting in which a row may see a key: a contiguous range of rows, empty where none is."""
        first, last = self.mask.query_range(self.q.shape[-2], self.k.shape[-2], *meeting.keys)
        return [(start, stop) for start, stop in meeting.queries if start < last and stop > first]

    def delta(self) -> Tensor:
        """`rowsum(dP * P)`, summed over the KV tiles in the order of dQ: a pass of its own."""
        delta = torch.zeros_like(self.lse)
        for index in range(len(self.meetings)):
            tile = self._recompute(index)
            if tile is not None:
                self.steps.at(DELTA, index, tile.first)
                self.steps.do("add delta", delta[tile.here], self.steps.delta("weigh dp", tile.dp, tile.p))
        return delta

    def gradients(
        self, delta: Tensor, counters: BackwardCounters | None, slopes: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The running sums of dQ, dK and dV after all meetings: dQ over KV tiles, dK and dV over heads, then query tiles.

        `slopes [batch, kv_heads, group, queries, keys]` takes up dS, where it is given.
        """
        steps, dq = self.steps, torch.zeros_like(self.q)
        dk, dv = torch.zeros_like(self.k.squeeze(2)), torch.zeros_like(self.v.squeeze(2))
        for index in range(len(self.meetings)):
            tile = self._recompute(index)
            if tile is None:
                continue
            dp = tile.dp.clone() if slopes is not None and tile.slope is not None else None  # a bias is added after the cap
            ds = _seen(steps.ds(tile.dp, tile.p, delta[tile.here], tile.slope), tile.visible)
            if slopes is not None:
                uncapped = ds if dp is None else _seen(steps.ds(dp, tile.p, delta[tile.here]), tile.visible)
                slopes[tile.here][..., tile.there] = uncapped
            p = steps.probabilities(tile.p, tile.dropped, self.mask.keep_scale)
            if counters is not None:
                entering = p if tile.dropped is None else torch.where(tile.dropped, tile.p, p)  # a dropped P is not flushed
                counters.tile(tile.p, entering, ds, tile.visible)
            steps.add("dq", dq[tile.here], ds, self.k[..., tile.there, :], tile.visible)
            self._add_to_keys(dk[..., tile.there, :], dv[..., tile.there, :], ds, p, tile)
        return dq, dk, dv

    def _recompute(self, index: int) -> Recomputed | None:
        """P and dP of the meeting of an index; None where no row may see a key."""
        meeting = self.meetings[index]
        met = self.met(meeting)
        if not met:
            return None
        rows = min(start for start, _ in met), max(stop for _, stop in met)
        steps, here, there = self.steps, (..., slice(*meeting.heads), slice(*rows), slice(None)), slice(*meeting.keys)
        steps.at(TILES, index, rows[0])
        exponential = self.recompute.exponential
        log_scale = LOG2_E if exponential.binary else 1.0
        bias, dropped = (_of_heads(of(rows, meeting.keys, self.q), meeting.heads) for of in (self.mask.added, self.mask.dropped))
        cap = None if self.mask.softcap is None else self.mask.softcap * log_scale
        s = steps.scores(self.q[here], self.k[..., there, :].mT, self.factor * log_scale, cap)
        tanh_slope = slope(s, cap)
        s = steps.raised(s, cap, bias, log_scale)
        kv_heads = self.k.shape[1]
        visible = self.mask.seen(self.q.shape[-2], self.k.shape[-2], rows, meeting.keys, s.device, kv_heads)
        visible = _of_heads(visible, meeting.heads)
        lse = self.lse[here]
        s.masked_fill_(lse == NEVER, NEVER)
        if visible is not None:
            s.masked_fill_(~visible, NEVER)
        p = steps.exponential(s, lse, exponential)
        dp = steps.dp(self.do[here], self.v[..., there, :], dropped, self.mask.keep_scale)
        return Recomputed(_seen(p, visible), _seen(dp, visible), visible, here, there, met, tanh_slope, dropped)

    def _add_to_keys(self, dk: Tensor, dv: Tensor, ds: Tensor, p: Tensor, tile: Recomputed) -> None:
        """dK and dV of one KV tile, summed over the heads of the meeting and, within a head, over the query tiles."""
        q, do = self.q[tile.here], self.do[tile.here]
        for head in range(q.shape[2]):
            for start, stop in tile.met:
                part = slice(start - tile.first, stop - tile.first)
                seen = None if tile.visible is None else tile.visible[:, :, head % tile.visible.shape[2], part].mT
                self.steps.add("dk", dk, ds[:, :, head, part].mT, q[:, :, head, part], seen)
                self.steps.add("dv", dv, p[:, :, head, part].mT, do[:, :, head, part], seen)


@dataclass(frozen=True)
class Recomputed:
    """P and dP of the rows and the KV tile of a meeting, 0 where a row does not see a key.

    `here` and `there` are the places of the rows, with their heads, and of the keys; `met` the tiles of queries in their order.
    """

    p: Float[Tensor, "batch kv_heads heads rows columns"]
    dp: Float[Tensor, "batch kv_heads heads rows columns"]
    visible: Bool[Tensor, "batch_or_1 kv_heads_or_1 heads_or_1 rows columns"] | None
    here: tuple[Any, ...]
    there: slice
    met: list[Range]
    slope: Tensor | None  # of a softcap
    dropped: Tensor | None  # by dropout

    @property
    def first(self) -> int:
        """The first of the rows."""
        return min(start for start, _ in self.met)


def _of_heads(x: Tensor | None, heads: Range) -> Tensor | None:
    """What belongs to some heads of each group, of what may be the same for all."""
    return x if x is None or x.shape[2] == 1 else x[:, :, slice(*heads)]


def _seen(x: Tensor, visible: Tensor | None) -> Tensor:
    """0 in the places of keys that a row does not see, whatever came to stand there."""
    return x if visible is None else x.masked_fill_(~visible, 0.0)
