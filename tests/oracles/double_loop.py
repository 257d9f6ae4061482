"""Tiled attention as the papers draw it: a double loop over tiles of Q and tiles of K and V, one matmul per pair.

One batch entry and one head at a time, every step a line of the recurrence in DESIGN section 3, in either loop order:
queries outside (FlashAttention-2, Algorithm 1) or keys outside with the state of every Q tile kept (FlashAttention-1,
Algorithm 1). The mask, the order of tiles, the lazy and the tie-shifted maximum are stated anew, key by key; only casts
and products are numdev's, which have oracles of their own.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from numdev.mask import Mask
from numdev.precision import Precision
from numdev.rounding import Cast
from numdev.softmax import Exponential, Normalise, OnlineSoftmax, ScaleOn, SumOver, exp2
from numdev.tiling import Loop, Order, Tiling

NEVER = float("-inf")


@dataclass
class State:
    """m, l and O of one tile of Q within one split."""

    m: Tensor
    l: Tensor  # noqa: E741  the paper's symbol
    o: Tensor


@dataclass(frozen=True)
class Event:
    """What happened when one tile of Q met one tile of K and V; rows that see no key of it are left out."""

    where: tuple[int, int, tuple[int, ...]]  # batch entry, head, rows
    seen: Tensor
    s: Tensor
    m_old: Tensor
    alpha: Tensor
    p: Tensor
    p_scaled: Tensor
    p_cast: Tensor
    l_old: Tensor
    l_kept: Tensor
    l_new: Tensor


def sees(mask: Mask, batch: int, query: int, key: int, queries: int, keys: int) -> bool:
    """Whether one query sees one key: the bottom-right aligned conjunction of the three limits."""
    position = query + keys - queries
    return not (
        (mask.causal and key > position)
        or (mask.window is not None and abs(position - key) >= mask.window)
        or (mask.key_lengths is not None and key >= mask.key_lengths[batch])
    )


def visibility(mask: Mask, batch: int, queries: int, keys: int) -> Tensor:
    """`sees` for every query and key of one batch entry."""
    return torch.tensor([[sees(mask, batch, i, j, queries, keys) for j in range(keys)] for i in range(queries)])


def is_fully_masked(mask: Mask, batch: int, queries: int, keys: int) -> Tensor:
    """`[batch, queries]`, true where the row sees no key."""
    return torch.stack([~visibility(mask, b, queries, keys).any(-1) for b in range(batch)])


def tile_orders(tiling: Tiling, keys: int) -> list[list[range]]:
    """The KV tiles of each split in the order of their visit, as ranges of keys."""
    tiles = [range(start, min(start + tiling.bc, keys)) for start in range(0, keys, tiling.bc)]
    cuts = [round(i * len(tiles) / tiling.splits) for i in range(tiling.splits + 1)]
    return [reordered(tiles[a:b], tiling) for a, b in pairwise(cuts)]


def reordered(tiles: list[range], tiling: Tiling) -> list[range]:
    left = list(tiles)
    if tiling.order is Order.FORWARD:
        return left
    if tiling.order is Order.REVERSE:
        return list(reversed(left))
    if tiling.order is Order.RANDOM:
        random.Random(tiling.seed).shuffle(left)
        return left
    if tiling.order is Order.STRIDED:
        return sorted(left, key=lambda tile: (tiles.index(tile) % tiling.stride, tile.start))
    visited: list[range] = []
    while left:
        visited.append(left.pop(0 if len(visited) % 2 == 0 else -1))
    return visited


def exponential(x: Tensor, kind: Exponential) -> Tensor:
    """Column by column of the tile, each by the polynomial or exactly."""
    exact = exp2 if kind.binary else torch.exp
    columns = [by_polynomial(x[:, c], kind) if c % kind.period in kind.columns else exact(x[:, c]) for c in range(x.shape[1])]
    return torch.stack(columns, 1)


def by_polynomial(x: Tensor, kind: Exponential) -> Tensor:
    whole = torch.floor(x)
    fraction = torch.where(torch.isneginf(x), torch.zeros_like(x), x - whole)
    value = torch.zeros_like(x)
    for coefficient in reversed(kind.coefficients):
        value = value * fraction + coefficient
    return value * torch.exp2(whole)


def exact_twin(kind: Exponential) -> Exponential:
    """The exponential of alpha: the polynomials stand in for exp2 in P only (FlashAttention-4, section 3)."""
    return Exponential(kind.binary)


def new_maximum(m: float, scores: list[float], soft: OnlineSoftmax) -> float:
    """The maximum that one row goes on with, from the old one and the row's scores in a tile."""
    largest = max(scores)
    if soft.tie_shift is not None and scores.count(largest) > 1 and math.isfinite(largest):
        largest = largest * soft.tie_shift if largest > 0 else 0.0
    if soft.rescale_threshold > 0:
        units = 1.0 if soft.exp.is_binary else math.log(2)
        return largest if largest - m > soft.rescale_threshold * units else m
    return max(m, largest)


@dataclass(frozen=True)
class DoubleLoop:
    """The oracle; call it like `Tiled`, with inputs already rounded."""

    precision: Precision
    tiling: Tiling
    softmax: OnlineSoftmax = OnlineSoftmax()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, events: list[Event] | None = None
    ) -> tuple[Tensor, Tensor]:
        """out `[batch, heads, queries, dim]` and LSE `[batch, heads, queries]`; appends to `events` if given."""
        batch, heads, queries, _ = q.shape
        out, lse = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype), torch.zeros(*q.shape[:-1], dtype=q.dtype)
        for b in range(batch):
            seen = visibility(mask, b, queries, k.shape[2])
            for h in range(heads):
                g = h // (heads // k.shape[1])
                found = [] if events is None else events
                out[b, h], lse[b, h] = self._head(q[b, h], k[b, g], v[b, g], seen, scale, (b, h), found)
        return out, lse

    def _head(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, where: tuple[int, int], events: list[Event]
    ) -> tuple[Tensor, Tensor]:
        factor = scale * (math.log2(math.e) if self.softmax.exp.is_binary else 1.0)
        if self.softmax.scale_on is ScaleOn.QUERIES:
            q, factor = q * factor, 1.0
            q = self.precision.inputs(q) if isinstance(self.precision.inputs, Cast) else q
        q_tiles = [range(i, min(i + self.tiling.br, len(q))) for i in range(0, len(q), self.tiling.br)]
        parts = []
        for kv_tiles in tile_orders(self.tiling, len(k)):
            states = [self._start(q[rows.start : rows.stop], v) for rows in q_tiles]
            if self.tiling.loop is Loop.QUERIES:
                pairs = [(i, keys) for i in range(len(q_tiles)) for keys in kv_tiles]
            else:
                pairs = [(i, keys) for keys in kv_tiles for i in range(len(q_tiles))]
            for i, keys in pairs:
                rows, cut = q_tiles[i], slice(keys.start, keys.stop)
                tile_seen = seen[rows.start : rows.stop, cut]
                event = self._step(states[i], q[rows.start : rows.stop], k[cut], v[cut], tile_seen, factor)
                events.append(Event((*where, tuple(rows)), tile_seen, *event))
            ends = [self._finish(state) for state in states]
            parts.append((torch.cat([out for out, _ in ends]), torch.cat([lse for _, lse in ends])))
        out, lse = parts[0] if len(parts) == 1 else self._combine(parts)
        return self.precision.output(out), lse[:, 0]

    @staticmethod
    def _start(q: Tensor, v: Tensor) -> State:
        return State(q.new_full((len(q), 1), NEVER), q.new_zeros(len(q), 1), q.new_zeros(len(q), v.shape[1]))

    def _step(self, state: State, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, factor: float) -> tuple[Tensor, ...]:
        """One pass through the body of the double loop."""
        step, soft = self.precision, self.softmax
        accumulate_l, accumulate_v = step.row_sum.accumulate, step.values.accumulate
        s = step.scores(q, k.T)
        s = step.scores.accumulate(s * factor)
        s = torch.where(seen, s, NEVER)
        rows = zip(state.m.tolist(), s.tolist(), strict=True)
        m = torch.tensor([[new_maximum(old, scores, soft)] for (old,), scores in rows], dtype=s.dtype)
        shift = torch.where(m == NEVER, 0.0, m)  # a row that has seen nothing has no maximum to subtract
        p = step.exponential(exponential(step.exponential(s - shift), soft.exp))
        alpha = step.rescale(exponential(step.rescale(state.m - shift), exact_twin(soft.exp)))
        kept = accumulate_l(alpha * state.l)
        p_scaled = p * soft.p_scale
        p_cast = step.probabilities(p_scaled)
        summed = step.row_sum.sum(p)
        if soft.sum_over is SumOver.PROBABILITIES:
            summed = accumulate_l(step.row_sum.sum(p_cast) / soft.p_scale)
        new_l = accumulate_l(kept + summed)
        product = accumulate_v(step.values(p_cast, v) / soft.p_scale)
        if soft.normalise is Normalise.END:
            new_o = step.accumulator(step.accumulator(alpha * state.o) + product)
        else:
            new_o = step.accumulator(step.accumulator(kept * state.o) + product)
            new_o = step.accumulator(new_o / torch.where(new_l == 0, 1.0, new_l))
        event = (s, state.m, alpha, p, p_scaled, p_cast, state.l, kept, new_l)
        any_seen = seen.any(1, keepdim=True)
        state.m, state.l = torch.where(any_seen, m, state.m), torch.where(any_seen, new_l, state.l)
        state.o = torch.where(any_seen, new_o, state.o)
        return event

    def _finish(self, state: State) -> tuple[Tensor, Tensor]:
        out, cast = state.o, self.precision.row_sum.accumulate
        if self.softmax.normalise is Normalise.END:
            out = self.precision.accumulator(out / torch.where(state.l == 0, 1.0, state.l))
        m = torch.where(state.m == NEVER, 0.0, state.m)
        if self.softmax.exp.is_binary:
            m = cast(m / math.log2(math.e))
        return out, cast(m + cast(torch.log(state.l)))

    def _combine(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Flash-Decoding: LSE over the splits, then the mean of the results weighted by exp(LSE_s - LSE)."""
        step, cast = self.precision, self.precision.row_sum.accumulate
        largest = torch.stack([lse for _, lse in parts]).amax(0)
        largest = torch.where(largest == NEVER, 0.0, largest)
        total, out = torch.zeros_like(largest), torch.zeros_like(parts[0][0])
        for _, lse in parts:
            total = cast(total + step.rescale(torch.exp(step.rescale(lse - largest))))
        whole = cast(largest + cast(torch.log(total)))
        for part, lse in parts:
            weight = step.rescale(torch.exp(step.rescale(lse - torch.where(whole == NEVER, 0.0, whole))))
            out = step.accumulator(out + step.accumulator(weight * part))
        return out, whole
