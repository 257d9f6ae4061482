"""The tiled backward pass as the papers draw it: a double loop over tiles, number by number.

One batch entry at a time; for each query head, each tile of Q meets each tile of K and V (Dao 2023, Algorithm 2, with its loops
exchanged). Sums, differences and products of two numbers are exact fractions that `round_exactly` rounds once; of numdev only
the products of matrices, the casts and the exponential are used, which have oracles of their own. The mask and the order of
tiles are stated anew, as in `double_loop`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from numdev.arithmetic.formats import format_of
from numdev.arithmetic.rounding import Cast
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision
from numdev.attention.softmax import DeltaForm, Recompute
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiling import Order, Tiling
from tests.oracles.double_loop import NEVER, exponential, reordered, visibility
from tests.oracles.table import round_exactly

Binary = Callable[[Fraction, Fraction], Fraction]


def add(cast: Cast, x: Tensor, y: Tensor | float) -> Tensor:
    return each(cast, x, y, lambda a, b: a + b)


def less(cast: Cast, x: Tensor, y: Tensor | float) -> Tensor:
    return each(cast, x, y, lambda a, b: a - b)


def times(cast: Cast, x: Tensor, y: Tensor | float) -> Tensor:
    return each(cast, x, y, lambda a, b: a * b)


def each(cast: Cast, x: Tensor, y: Tensor | float, operation: Binary) -> Tensor:
    """`cast(x o y)` for each pair of numbers, one rounding of the exact result; in FP32 and FP64 the result is the carrier's."""
    left, right = torch.broadcast_tensors(x, torch.as_tensor(y, dtype=x.dtype))
    done = [once(cast, a, b, operation, x.dtype) for a, b in zip(left.flatten().tolist(), right.flatten().tolist(), strict=True)]
    return torch.tensor(done, dtype=torch.float64).to(x.dtype).reshape(left.shape)


def once(cast: Cast, a: float, b: float, operation: Binary, carrier: torch.dtype) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        plain = operation(a, b)  # type: ignore[arg-type]  # the rules of IEEE 754, which Python's numbers follow
        return float(cast(torch.tensor(plain, dtype=carrier)))
    assert cast.overflow is not None
    whole = format_of(carrier)
    to, mode = (whole, cast.rounding) if cast.to.covers(whole) else (cast.to, cast.rounding)
    return round_exactly(operation(Fraction(a), Fraction(b)), to, mode, cast.overflow)


def tiles(size: int, length: int, tiling: Tiling, order: Order) -> list[range]:
    """The tiles of a dimension in an order."""
    cut = [range(start, min(start + size, length)) for start in range(0, length, size)]
    return reordered(cut, replace(tiling, order=order))


def rows(x: Tensor, tile: range) -> Tensor:
    return x[tile.start : tile.stop]


@dataclass(frozen=True)
class Head:
    """What one query head sees of a run: its own rows, and those of its KV head."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    out: Tensor
    lse: Tensor
    seen: Tensor


@dataclass(frozen=True)
class BackwardDoubleLoop:
    """The oracle; call it like `TiledBackward.backward`, with inputs already rounded, and what the forward pass saved."""

    precision: BackwardPrecision
    tiling: Tiling
    recompute: Recompute = Recompute()
    query_order: Order | None = None

    def __call__(
        self, inputs: tuple[Tensor, Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, mask: Mask, scale: float
    ) -> dict[str, Tensor]:
        """dq, dk, dv and delta, of the shapes of `Gradients`."""
        q, k, v, do = inputs
        found = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v), "delta": torch.zeros_like(lse)}
        group = q.shape[1] // k.shape[1]
        for b in range(q.shape[0]):
            seen = visibility(mask, b, q.shape[2], k.shape[2])
            for h in range(q.shape[1]):
                g = h // group
                head = Head(q[b, h], k[b, g], v[b, g], do[b, h], out[b, h], lse[b, h][:, None], seen)
                delta = self._delta(head, scale)
                found["delta"][b, h] = delta[:, 0]
                self._head(head, delta, scale, (found["dq"][b, h], found["dk"][b, g], found["dv"][b, g]))
        step = self.precision
        found["dq"] = step.output(times(step.dq_sum, found["dq"], scale))
        found["dk"] = step.output(times(step.dk_sum, found["dk"], scale))
        found["dv"] = step.output(found["dv"])
        return found

    def _key_tiles(self, head: Head) -> list[range]:
        return tiles(self.tiling.bc, len(head.k), self.tiling, self.tiling.order)

    def _head(self, head: Head, delta: Tensor, scale: float, sums: tuple[Tensor, Tensor, Tensor]) -> None:
        """Adds one query head to dQ, and to dK and dV of its KV head."""
        for mine, keys in self._pairs(head):
            self._pair(head, mine, keys, delta, scale, sums)

    def _pairs(self, head: Head) -> list[tuple[range, range]]:
        """Each tile of queries with each tile of keys."""
        order = self.tiling.order if self.query_order is None else self.query_order
        queries = tiles(self.tiling.br, len(head.q), self.tiling, order)
        return [(mine, keys) for mine in queries for keys in self._key_tiles(head)]

    def _pair(
        self, head: Head, mine: range, keys: range, delta: Tensor, scale: float, sums: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        step, (dq, dk, dv) = self.precision, sums
        p, dp = self._recomputed(head, mine, keys, scale)
        difference = less(step.difference, dp, rows(delta, mine))
        ds = step.ds(times(step.difference, difference, p))
        p = step.probabilities(p)
        rows(dq, mine).copy_(add(step.dq_sum, rows(dq, mine), step.dq(ds, rows(head.k, keys))))
        rows(dk, keys).copy_(add(step.dk_sum, rows(dk, keys), step.dk(ds.T, rows(head.q, mine))))
        rows(dv, keys).copy_(add(step.dv_sum, rows(dv, keys), step.dv(p.T, rows(head.do, mine))))

    def _recomputed(self, head: Head, mine: range, keys: range, scale: float) -> tuple[Tensor, Tensor]:
        """P and dP of one pair of tiles, 0 where a row does not see a key."""
        step, kind = self.precision, self.recompute.exponential
        factor = scale * math.log2(math.e) if kind.binary else scale
        s = times(step.scores.accumulate, step.scores(rows(head.q, mine), rows(head.k, keys).T), factor)
        lse = rows(head.lse, mine)
        seen = rows(head.seen, mine)[:, keys.start : keys.stop] & (lse != NEVER)
        if kind.binary:
            lse = times(step.exponential, lse, math.log2(math.e))
        difference = less(step.exponential, torch.where(seen, s, 0.0), torch.where(lse == NEVER, 0.0, lse))
        p = torch.where(seen, step.exponential(exponential(difference, kind)), 0.0)
        return p, torch.where(seen, step.dp(rows(head.do, mine), rows(head.v, keys).T), 0.0)

    def _delta(self, head: Head, scale: float) -> Tensor:
        """`[queries, 1]`, 0 for a row that sees no key."""
        cast = self.precision.delta.accumulate
        if self.recompute.delta is DeltaForm.OUTPUT:
            found = self.precision.delta.sum(times(cast, head.do, head.out))
        else:
            found = torch.zeros_like(head.lse)
            for keys in self._key_tiles(head):
                p, dp = self._recomputed(head, range(len(head.q)), keys, scale)
                found = add(cast, found, self.precision.delta.sum(times(cast, dp, p)))
        return torch.where(head.lse == NEVER, 0.0, found)


@dataclass(frozen=True)
class WalkingLoop(BackwardDoubleLoop):
    """The same where every program owns keys, and pairs come as a clock has them: all programs of a group make a step at once.

    For rows that all see a key.
    """

    turns: Turns = Turns(None)

    def _pairs(self, head: Head) -> list[tuple[range, range]]:
        keys = [range(j, min(j + self.tiling.bc, len(head.k))) for j in range(0, len(head.k), self.tiling.bc)]
        units = math.ceil(len(head.q) / self.turns.unit)
        clock = []
        for tile in keys:
            owner = tile.start // self.turns.tile
            together = self.turns.together or len(head.k)
            for unit in range(units):
                arrival = units - 1 - unit if self.turns.together is None else (unit - owner % together) % units
                start, end = unit * self.turns.unit, min((unit + 1) * self.turns.unit, len(head.q))
                parts = [range(i, min(i + self.tiling.br, end)) for i in range(start, end, self.tiling.br)]
                place = (owner // together, arrival, tile.start)
                clock += [((*place, part.start), part, tile) for part in parts]
        return [(mine, tile) for _, mine, tile in sorted(clock, key=lambda one: one[0])]
