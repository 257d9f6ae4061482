"""Tiled attention and its gradients as the papers draw them: a double loop over tiles of Q and tiles of K and V.

One batch entry and one head at a time, every step a line of the recurrence in DESIGN section 3, in either loop order:
queries outside (FlashAttention-2, Algorithm 1) or keys outside with the state of every Q tile kept (FlashAttention-1,
Algorithm 1); backward, each tile of Q meets each tile of K and V (Dao 2023, Algorithm 2, with its loops exchanged). The mask, the
order of tiles, the lazy and the tie-shifted maximum are stated anew, key by key; only casts, products and operations that round
once are numdev's, which have oracles of their own. Here every operation takes the careful way.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import format_of
from numdev.arithmetic.products import Dot, row_sums
from numdev.arithmetic.rounding import Cast
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Policy, Precision
from numdev.attention.softmax import DeltaForm, Exponential, Maximum, Normalise, OnlineSoftmax, Recompute, ScaleOn, SumOver, exp2
from numdev.attention.tiling import Order, Tiling

NEVER = float("-inf")


@dataclass
class State:
    """m, l and O of one tile of Q within one split."""

    m: Tensor
    l: Tensor  # noqa: E741  the paper's symbol
    o: Tensor


@dataclass(frozen=True)
class Event:
    """Values of the step in which one tile of Q meets one tile of K and V; rows that see no key of it are left out."""

    where: tuple[int, int, tuple[int, ...]]  # batch entry, head, rows
    seen: Tensor
    s: Tensor
    alpha: Tensor
    p: Tensor
    p_scaled: Tensor
    p_cast: Tensor
    l_old: Tensor
    additions: list[tuple[Tensor, Tensor, Tensor]]  # to running row sums: before, what is added, after


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


def tiles(size: int, length: int) -> list[range]:
    """The tiles of a dimension."""
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def tile_orders(tiling: Tiling, keys: int) -> list[list[range]]:
    """The KV tiles of each split in the order of their visit, as ranges of keys."""
    cut = tiles(tiling.bc, keys)
    ends = [round(i * len(cut) / tiling.splits) for i in range(tiling.splits + 1)]
    if tiling.split_size is not None:
        ends = sorted({*(i for i, tile in enumerate(cut) if tile.start % tiling.split_size == 0), len(cut)})
    return [reordered(cut[a:b], tiling, tiling.order) for a, b in itertools.pairwise(ends)]


def reordered(tiles: list[range], tiling: Tiling, order: Order) -> list[range]:
    left, visited = list(tiles), list[range]()
    if order is Order.REVERSE:
        left.reverse()
    if order is Order.RANDOM:
        random.Random(tiling.seed).shuffle(left)
    if order is Order.STRIDED:
        left.sort(key=lambda tile: (tiles.index(tile) % tiling.stride, tile.start))
    while order is Order.OUTSIDE_IN and left:
        visited.append(left.pop(0 if len(visited) % 2 == 0 else -1))
    return visited or left


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


def multiplied(policy: Policy, step: str, a: Tensor, b: Tensor) -> Tensor:
    """The product of a step, on tensor cores where it names them."""
    product: Tensor = getattr(policy, step)(a, b, unit=policy.units.get(step))
    return product


def once(operation: Operation, cast: Cast, x: Tensor, y: Tensor | float) -> Tensor:
    """`cast(x o y)`, one rounding, whatever the operands are."""
    left, right = torch.broadcast_tensors(x, torch.as_tensor(y, dtype=x.dtype))
    whole = format_of(x.dtype)
    return RoundedOnce(operation, cast, whole, whole, x.dtype)(left.clone(), right.clone())


def add(cast: Cast, x: Tensor, y: Tensor | float) -> Tensor:
    return once(Operation.ADD, cast, x, y)


def times(cast: Cast, x: Tensor, y: Tensor | float) -> Tensor:
    return once(Operation.MULTIPLY, cast, x, y)


def less(cast: Cast, x: Tensor, y: Tensor | float) -> Tensor:
    return once(Operation.SUBTRACT, cast, x, y)


def over(cast: Cast, x: Tensor, y: Tensor | float) -> Tensor:
    return once(Operation.DIVIDE, cast, x, y)


def decayed(cast: Cast, x: Tensor, m: Tensor, function: Exponential) -> Tensor:
    """`exp(x - m)`, 0 where x is no number."""
    number = x != NEVER
    difference = once(Operation.SUBTRACT, cast, torch.where(number, x, 0.0), torch.where(m == NEVER, 0.0, m))
    return torch.where(number, cast(exponential(difference, function)), 0.0)


def running_sum(dot: Dot, p: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """The row sums, and each addition behind them."""
    every, cast = dot.every or p.shape[1], dot.accumulate
    total, additions = cast(row_sums(p[:, :every])), []
    for start in range(every, p.shape[1], every):
        part = row_sums(p[:, start : start + every])
        before, total = total, add(cast, total, part)
        additions.append((before, part, total))
    return total, additions


def largest_of(scores: list[float], soft: OnlineSoftmax, cast: Cast, dtype: torch.dtype) -> float:
    """The maximum of one row's scores in a tile, shifted where it is tied."""
    largest = max(scores)
    if soft.tie_shift is not None and scores.count(largest) > 1 and math.isfinite(largest):
        return times(cast, torch.tensor([largest], dtype=dtype), soft.tie_shift).item() if largest > 0 else 0.0
    return largest


def new_maximum(m: float, largest: float, soft: OnlineSoftmax) -> float:
    """The maximum that one row goes on with, from the old one and the tile's."""
    if soft.rescale_threshold > 0:
        units = 1.0 if soft.exp.binary else math.log(2)
        return largest if largest - m > soft.rescale_threshold * units else m
    return max(m, largest) if not math.isnan(m) and not math.isnan(largest) else math.nan


@dataclass(frozen=True)
class DoubleLoop:
    """The oracle; call it like `Tiled`, with inputs already rounded. `keys_outside` is FlashAttention-1's order of the loops."""

    precision: Precision
    tiling: Tiling
    softmax: OnlineSoftmax = OnlineSoftmax()
    keys_outside: bool = False

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
        factor = scale * (math.log2(math.e) if self.softmax.exp.binary else 1.0)
        if self.softmax.scale_on is ScaleOn.QUERIES:
            inputs = self.precision.inputs
            cast = inputs if isinstance(inputs, Cast) else Cast(format_of(q.dtype))
            q, factor = times(cast, q.double(), factor).to(q.dtype), 1.0
        q_tiles = tiles(self.tiling.br, len(q))
        parts, joined = [], list[State]()
        for kv_tiles in tile_orders(self.tiling, len(k)):
            sizes = [(len(rows), 1) for rows in q_tiles]
            states = [State(q.new_full(size, NEVER), q.new_zeros(size), q.new_zeros(size[0], v.shape[1])) for size in sizes]
            pairs = list(itertools.product(range(len(q_tiles)), kv_tiles))
            for i, keys in sorted(pairs, key=lambda pair: kv_tiles.index(pair[1])) if self.keys_outside else pairs:
                rows, cut = q_tiles[i], slice(keys.start, keys.stop)
                tile_seen = seen[rows.start : rows.stop, cut]
                event = self._step(states[i], q[rows.start : rows.stop], k[cut], v[cut], tile_seen, factor)
                events.append(Event((*where, tuple(rows)), tile_seen, *event))
            if self.tiling.split_size is not None:
                joined = states = [self._join(*pair) for pair in zip(joined, states, strict=True)] if joined else states
            ends = [self._finish(state) for state in states]
            parts.append((torch.cat([out for out, _ in ends]), torch.cat([lse for _, lse in ends])))
        out, lse = parts[-1] if len(parts) == 1 or joined else self._combine(parts)
        return self.precision.output(out), lse[:, 0]

    def _step(self, state: State, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, factor: float) -> tuple[Any, ...]:
        """One pass through the body of the double loop."""
        step, soft = self.precision, self.softmax
        accumulate_s, accumulate_l, accumulate_v = (dot.accumulate for dot in (step.scores, step.row_sum, step.values))
        s = multiplied(step, "scores", q, k.T)
        s = times(accumulate_s, s, factor) if factor != 1.0 else s
        s = torch.where(seen, s, NEVER)
        largest = torch.tensor([[largest_of(scores, soft, accumulate_s, s.dtype)] for scores in s.tolist()], dtype=s.dtype)
        pairs = zip(state.m[:, 0].tolist(), largest[:, 0].tolist(), strict=True)
        m = torch.tensor([[new_maximum(old, new, soft)] for old, new in pairs], dtype=s.dtype)
        base = largest if soft.maximum is Maximum.LOCAL else m
        p = decayed(step.exponential, s, base, soft.exp)
        exact = Exponential(soft.exp.binary)  # polynomials stand in for exp2 in P only (FlashAttention-4, section 3)
        alpha = decayed(step.rescale, state.m, m, exact)
        tile_sum, additions = running_sum(step.row_sum, p)
        kept = times(accumulate_l, state.l, alpha)
        p_scaled = p * soft.p_scale
        entering = step.probabilities
        p_cast = times(entering, p, soft.p_scale) if isinstance(entering, Cast) else entering(p_scaled)
        if soft.sum_over is SumOver.PROBABILITIES:
            tile_sum, additions = running_sum(step.row_sum, p_cast)
            tile_sum = over(accumulate_l, tile_sum, soft.p_scale)
        product = over(accumulate_v, multiplied(step, "values", p_cast, v), soft.p_scale)
        if soft.maximum is Maximum.LOCAL:
            beta = decayed(step.rescale, largest, m, exact)
            tile_sum = times(accumulate_l, tile_sum, beta)
            product = times(step.accumulator, product, beta)
        new_l = add(accumulate_l, kept, tile_sum)
        additions.append((kept, tile_sum, new_l))
        if soft.normalise is Normalise.END:
            new_o = add(step.accumulator, times(step.accumulator, state.o, alpha), product)
        else:
            new_o = add(step.accumulator, times(step.accumulator, state.o, kept), product)
            new_o = over(step.accumulator, new_o, torch.where(new_l == 0, 1.0, new_l))
        event = (s, alpha, p, p_scaled, p_cast, state.l, additions)
        any_seen = seen.any(1, keepdim=True)
        state.m, state.l = torch.where(any_seen, m, state.m), torch.where(any_seen, new_l, state.l)
        state.o = torch.where(any_seen, new_o, state.o)
        return event

    def _finish(self, state: State) -> tuple[Tensor, Tensor]:
        out, cast = state.o, self.precision.row_sum.accumulate
        if self.softmax.normalise is Normalise.END:
            out = over(self.precision.accumulator, out, torch.where(state.l == 0, 1.0, state.l))
        m = torch.where(state.m == NEVER, 0.0, state.m)
        if self.softmax.exp.binary:
            m = over(cast, m, math.log2(math.e))
        return out, self._log_sum(m, state.l)

    def _join(self, a: State, b: State) -> State:
        """One state of two ranges of keys, each row by itself."""
        step, cast, exp = (
            self.precision,
            self.precision.row_sum.accumulate,
            replace(self.softmax.exp, coefficients=(), columns=()),
        )
        joined = State(a.m.clone(), a.l.clone(), a.o.clone())
        for i in range(len(a.m)):
            if b.m[i] == NEVER:
                continue
            joined.m[i] = torch.maximum(a.m[i], b.m[i])
            weights = [decayed(step.rescale, x.m[i : i + 1], joined.m[i : i + 1], exp) for x in (a, b)]
            sums = [times(cast, x.l[i : i + 1], w) for x, w in zip((a, b), weights, strict=True)]
            joined.l[i : i + 1] = add(cast, *sums)
            each = self.softmax.normalise is Normalise.EACH
            shares = [times(step.accumulator, x.o[i : i + 1], w) for x, w in zip((a, b), sums if each else weights, strict=True)]
            o = add(step.accumulator, *shares)
            divisor = torch.where(joined.l[i : i + 1] == 0, 1.0, joined.l[i : i + 1])
            joined.o[i : i + 1] = over(step.accumulator, o, divisor) if each else o
        return joined

    def _log_sum(self, m: Tensor, total: Tensor) -> Tensor:
        """`m + log l`, minus infinity where l is 0."""
        cast = self.precision.row_sum.accumulate
        log = cast(torch.log(torch.where(total == 0, 1.0, total)))
        return torch.where(total == 0, NEVER, add(cast, log, m))

    def _combine(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Flash-Decoding: LSE over the splits, then the mean of the results weighted by exp(LSE_s - LSE)."""
        step, cast = self.precision, self.precision.row_sum.accumulate
        largest = torch.stack([lse for _, lse in parts]).amax(0)
        total, out = torch.zeros_like(largest), torch.zeros_like(parts[0][0])
        for _, lse in parts:
            total = add(cast, total, decayed(step.rescale, lse, largest, Exponential.EXP))
        whole = self._log_sum(torch.where(largest == NEVER, 0.0, largest), total)
        for part, lse in parts:
            weight = decayed(step.rescale, lse, whole, Exponential.EXP)
            out = add(step.accumulator, out, times(step.accumulator, part, weight))
        return out, whole


def rows(x: Tensor, tile: range) -> Tensor:
    return x[tile.start : tile.stop]


@dataclass(frozen=True)
class Head:
    """One query head of a run: its own rows, and those of its KV head."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    out: Tensor
    lse: Tensor
    seen: Tensor


@dataclass(frozen=True)
class BackwardDoubleLoop:
    """The oracle of gradients; call it like `TiledBackward.backward`, with rounded inputs and what the forward pass saved."""

    precision: BackwardPrecision
    tiling: Tiling
    recompute: Recompute = Recompute()
    query_order: Order | None = None

    def __call__(
        self, inputs: tuple[Tensor, Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, mask: Mask, scale: float
    ) -> dict[str, Tensor]:
        """dq, dk, dv and delta, of the shapes of `Gradients`."""
        q, k, v, do = inputs
        made = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v), "delta": torch.zeros_like(lse)}
        group = q.shape[1] // k.shape[1]
        for b in range(q.shape[0]):
            seen = visibility(mask, b, q.shape[2], k.shape[2])
            for h in range(q.shape[1]):
                g = h // group
                head = Head(q[b, h], k[b, g], v[b, g], do[b, h], out[b, h], lse[b, h][:, None], seen)
                delta = self._delta(head, scale)
                made["delta"][b, h] = delta[:, 0]
                self._head(head, delta, scale, (made["dq"][b, h], made["dk"][b, g], made["dv"][b, g]))
        step = self.precision
        made["dq"] = step.output(times(step.dq_sum, made["dq"], scale))
        made["dk"] = step.output(times(step.dk_sum, made["dk"], scale))
        made["dv"] = step.output(made["dv"])
        return made

    def _key_tiles(self, head: Head) -> list[range]:
        return reordered(tiles(self.tiling.bc, len(head.k)), self.tiling, self.tiling.order)

    def _head(self, head: Head, delta: Tensor, scale: float, sums: tuple[Tensor, Tensor, Tensor]) -> None:
        """Adds one query head to dQ, and to dK and dV of its KV head: each tile of queries with each tile of keys."""
        queries = reordered(tiles(self.tiling.br, len(head.q)), self.tiling, self.query_order or self.tiling.order)
        for mine, keys in itertools.product(queries, self._key_tiles(head)):
            self._pair(head, mine, keys, delta, scale, sums)

    def _pair(
        self, head: Head, mine: range, keys: range, delta: Tensor, scale: float, sums: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        step, (dq, dk, dv) = self.precision, sums
        p, dp = self._recomputed(head, mine, keys, scale)
        difference = less(step.difference, dp, rows(delta, mine))
        ds = step.ds(times(step.difference, difference, p))
        p = step.probabilities(p)
        rows(dq, mine).copy_(add(step.dq_sum, rows(dq, mine), multiplied(step, "dq", ds, rows(head.k, keys))))
        rows(dk, keys).copy_(add(step.dk_sum, rows(dk, keys), multiplied(step, "dk", ds.T, rows(head.q, mine))))
        rows(dv, keys).copy_(add(step.dv_sum, rows(dv, keys), multiplied(step, "dv", p.T, rows(head.do, mine))))

    def _recomputed(self, head: Head, mine: range, keys: range, scale: float) -> tuple[Tensor, Tensor]:
        """P and dP of one pair of tiles, 0 where a row does not see a key."""
        step, kind = self.precision, self.recompute.exponential
        factor = scale * math.log2(math.e) if kind.binary else scale
        s = times(step.scores.accumulate, multiplied(step, "scores", rows(head.q, mine), rows(head.k, keys).T), factor)
        lse = rows(head.lse, mine)
        seen = rows(head.seen, mine)[:, keys.start : keys.stop] & (lse != NEVER)
        if kind.binary:
            lse = times(step.exponential, lse, math.log2(math.e))
        difference = less(step.exponential, torch.where(seen, s, 0.0), torch.where(lse == NEVER, 0.0, lse))
        p = torch.where(seen, step.exponential(exponential(difference, kind)), 0.0)
        return p, torch.where(seen, multiplied(step, "dp", rows(head.do, mine), rows(head.v, keys).T), 0.0)

    def _delta(self, head: Head, scale: float) -> Tensor:
        """`[queries, 1]`, 0 for a row that sees no key."""
        cast = self.precision.delta.accumulate
        if self.recompute.delta is DeltaForm.OUTPUT:
            delta = self.precision.delta.sum(times(cast, head.do, head.out))
        else:
            delta = torch.zeros_like(head.lse)
            for keys in self._key_tiles(head):
                p, dp = self._recomputed(head, range(len(head.q)), keys, scale)
                delta = add(cast, delta, self.precision.delta.sum(times(cast, dp, p)))
        return torch.where(head.lse == NEVER, 0.0, delta)
