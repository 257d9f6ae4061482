"""A whole backward run by compiled passes: KV head by KV head, in threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.products import product
from numdev.attention.counters import BackwardCounters
from numdev.attention.fused import backward_entry as entry
from numdev.attention.fused import backward_layout as at
from numdev.attention.fused.backward_recipe import BackwardRecipe, backward_recipe
from numdev.attention.fused.threads import in_threads
from numdev.attention.fused.walk import key_ranges
from numdev.attention.recurrence import BackwardRun
from numdev.attention.steps import LOG2_E
from numdev.attention.tile_schedule import Meeting, Range


def gradients(run: BackwardRun, delta: Tensor, counters: BackwardCounters | None) -> tuple[Tensor, Tensor, Tensor]:
    """See `numdev.attention.recurrence.BackwardRun.gradients`, whose bits these are."""
    exponential = run.recompute.exponential
    factor = run.factor * LOG2_E if exponential.is_binary else run.factor
    made = backward_recipe(run.steps.precision, exponential, factor, count=counters is not None)
    batch, kv_heads = run.k.shape[:2]
    ranges = key_ranges(run.mask, (batch, kv_heads, run.q.shape[-2], run.k.shape[-2])).numpy()

    def work(head: int) -> KVHead:
        entry_of, of_entry = divmod(head, kv_heads)
        here = slice(entry_of, entry_of + 1), slice(of_entry, of_entry + 1)
        part = replace(run, **{name: getattr(run, name)[here] for name in ("q", "k", "v", "do", "lse")})
        found = KVHead(part, delta[here], ranges[:, head], made)
        for meeting in run.meetings:
            found.meet(meeting)
        return found

    heads = list(in_threads(work, range(batch * kv_heads)))
    if counters is not None:
        above, p, ds, visible = np.stack([head.events for head in heads]).sum(0).tolist()
        counters.add(torch.tensor([above, visible - p, visible - ds], dtype=torch.float64), float(visible))
    sums = zip(*((head.dq, head.dk, head.dv) for head in heads), strict=True)
    dq, dk, dv = (torch.stack(each).unflatten(0, (batch, kv_heads)) for each in sums)
    return dq, dk, dv


class KVHead:
    """The running sums of dQ of the query heads that share a KV head, and of its dK and dV."""

    def __init__(self, run: BackwardRun, delta: Tensor, ranges: np.ndarray, recipe: BackwardRecipe) -> None:
        """`run` has one batch entry and one KV head; `ranges` are the keys that each row sees, `[2, queries]`."""
        self._run, self._ranges, self._recipe = run, ranges, recipe
        self._q, self._do = run.q[0, 0], run.do[0, 0]
        self._k, self._v = run.k[0, 0, 0], run.v[0, 0, 0]
        self._planes = torch.stack([run.lse[0, 0, ..., 0], delta[0, 0, ..., 0]]).numpy()
        self.dq, self.dk, self.dv = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (self._q, self._k, self._v)
        )
        self.events = np.zeros(at.EVENTS, np.int64)

    def meet(self, meeting: Meeting) -> None:
        """Add the shares of a meeting."""
        met = self._run.met(meeting)
        if not met:
            return
        made, precision = self._recipe, self._run.steps.precision
        first, last = min(start for start, _ in met), max(stop for _, stop in met)
        place = np.array([meeting.heads[0], first, meeting.keys[0]])
        here, there = (slice(*meeting.heads), slice(first, last)), slice(*meeting.keys)
        q, do, k, v = self._q[here], self._do[here], self._k[there], self._v[there]
        p = _product(precision.scores, q, k.mT)
        table = made.exponential.values
        entry.recompute(p.numpy(), self._planes, self._ranges, place, made.operations, made.settings, table)
        if not table.size:
            p.copy_(self._run.recompute.exponential(p))
        ds = _product(precision.dp, do, v.mT)
        entry.differ(p.numpy(), ds.numpy(), self._planes, self._ranges, self.events, place, made.operations, made.settings)
        entry.add(self.dq.numpy(), _product(precision.dq, ds, k).numpy(), place, made.operations)
        tiles = _Tiles(met, len(q))
        ops = made.operations
        shares = tiles.products(precision.dk, ds, q)
        entry.add_in_turn(self.dk[there].numpy(), shares, tiles.turns, ops[at.ROUND_DK], ops[at.ADD_DK])
        shares = tiles.products(precision.dv, p, do)
        entry.add_in_turn(self.dv[there].numpy(), shares, tiles.turns, ops[at.ROUND_DV], ops[at.ADD_DV])


class _Tiles:
    """The tiles of queries of a meeting in the order of their rows, and the turns in which they are added."""

    def __init__(self, met: list[Range], heads: int) -> None:
        ordered = sorted(met)
        place = {tile: i for i, tile in enumerate(ordered)}
        turns = np.array([place[tile] for tile in met])
        self.turns = (np.arange(heads)[:, None] * len(met) + turns).ravel()
        self._height = ordered[0][1] - ordered[0][0]
        self._whole = sum(stop - start == self._height for start, stop in ordered)
        self._count = len(met)

    def products(self, dot: Dot, p: Tensor, x: Tensor) -> np.ndarray:
        """`P^T X` of each tile, not rounded yet unless it is within the tile, `[heads * tiles, columns, dim]`."""
        rows = self._whole * self._height
        left, right = (t[:, :rows].unflatten(1, (self._whole, self._height)) for t in (p, x))
        found = _product(dot, left.mT, right)
        if self._whole < self._count:
            last = _product(dot, p[:, rows:].mT, x[:, rows:])
            found = torch.cat([found, last[:, None]], 1)
        return found.flatten(0, 1).numpy()


def _product(dot: Dot, a: Tensor, b: Tensor) -> Tensor:
    """`a b`, not rounded yet unless it is within the tile."""
    b = b if b.ndim == a.ndim else b.expand(*[1] * (a.ndim - b.ndim), *b.shape)
    return (product(a, b) if dot.every is None else dot(a, b)).contiguous()
