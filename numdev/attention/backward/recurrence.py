"""The backward pass over pairs of a query tile and a KV tile, every operation in its format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from numdev.attention.backward.counters import BackwardCounters
from numdev.attention.backward.recompute import Recompute
from numdev.attention.backward.steps import DELTA, LOG2_E, TILES, BackwardSteps
from numdev.attention.commonsteps import NEVER
from numdev.attention.mask import Mask

Range = tuple[int, int]


@dataclass(frozen=True)
class Run:
    """What stays the same for all tiles of a run. All tensors are in the carrier, with heads grouped.

    Attributes:
        lse: in the units of the scores.
        factor: softmax scale.
        query_tiles, key_tiles: in the order in which they are added.
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
    query_tiles: list[Range]
    key_tiles: list[Range]

    def rows_of(self, tile: Range) -> Range:
        """The rows of the query tiles in which a row may see a key of the tile: a contiguous range, empty where none is."""
        queries, keys = self.q.shape[-2], self.k.shape[-2]
        first, last = self.mask.query_range(queries, keys, *tile)
        met = [(start, stop) for start, stop in self.query_tiles if start < last and stop > first]
        return min((start for start, _ in met), default=0), max((stop for _, stop in met), default=0)

    def recomputed(self, index: int, tile: Range, rows: Range) -> Recomputed:
        """P and dP of a block of rows at the KV tile that stands at `index` of the order."""
        steps, here, there = self.steps, slice(*rows), slice(*tile)
        steps.at(TILES, index, rows[0])
        exponential = self.recompute.exponential
        factor = self.factor * LOG2_E if exponential.is_binary else self.factor
        s = steps.scores(self.q[..., here, :], self.k[..., there, :].mT, factor)
        visible = self.mask.visible(self.q.shape[-2], self.k.shape[-2], rows, tile, s.device)
        lse = self.lse[..., here, :]
        s.masked_fill_(lse == NEVER, NEVER)
        if visible is not None:
            visible = visible[:, :, None]
            s.masked_fill_(~visible, NEVER)
        p = steps.exponential(s, lse, exponential)
        dp = steps.dp(self.do[..., here, :], self.v[..., there, :])
        return Recomputed(_seen(p, visible), _seen(dp, visible), visible)

    def delta(self) -> Tensor:
        """`rowsum(dP * P)`, summed over the KV tiles in their order: a pass of its own."""
        delta = torch.zeros_like(self.lse)
        for index, tile in enumerate(self.key_tiles):
            rows = self.rows_of(tile)
            if rows[0] < rows[1]:
                found = self.recomputed(index, tile, rows)
                self.steps.at(DELTA, index, rows[0])
                self.steps.add_delta(delta[..., slice(*rows), :], self.steps.delta_of_tile(found.dp, found.p))
        return delta

    def gradients(self, delta: Tensor, counters: BackwardCounters | None) -> tuple[Tensor, Tensor, Tensor]:
        """The running sums of dQ, dK and dV after all pairs: dQ over KV tiles, dK and dV over heads, then query tiles."""
        dq = torch.zeros_like(self.q)
        dk, dv = torch.zeros_like(self.k.squeeze(2)), torch.zeros_like(self.v.squeeze(2))
        for index, tile in enumerate(self.key_tiles):
            rows, there = self.rows_of(tile), slice(*tile)
            if rows[0] == rows[1]:
                continue
            found, here = self.recomputed(index, tile, rows), slice(*rows)
            ds = self.steps.ds(found.dp, found.p, delta[..., here, :])
            ds = _seen(ds, found.visible)
            p = self.steps.probabilities(found.p)
            if counters is not None:
                counters.tile(found.p, p, ds, found.visible)
            self.steps.add_dq(dq[..., here, :], self.steps.dq(ds, self.k[..., there, :], found.visible))
            self._add_to_keys(dk[..., there, :], dv[..., there, :], ds, p, rows, found.visible)
        return dq, dk, dv

    def _add_to_keys(self, dk: Tensor, dv: Tensor, ds: Tensor, p: Tensor, rows: Range, visible: Tensor | None) -> None:
        """dK and dV of one KV tile, which take up head after head of the group, query tile after query tile."""
        for head in range(self.q.shape[2]):
            for start, stop in self.query_tiles:
                if not rows[0] <= start < rows[1]:
                    continue
                part, whole = slice(start - rows[0], stop - rows[0]), slice(start, stop)
                seen = None if visible is None else visible[:, :, 0, part]
                q, do = self.q[:, :, head, whole], self.do[:, :, head, whole]
                self.steps.add_dk(dk, self.steps.dk(ds[:, :, head, part], q, seen))
                self.steps.add_dv(dv, self.steps.dv(p[:, :, head, part], do, seen))


@dataclass(frozen=True)
class Recomputed:
    """P and dP of a block of rows and a KV tile, 0 where a row does not see a key, and what it sees; None for all."""

    p: Float[Tensor, "batch kv_heads group rows columns"]
    dp: Float[Tensor, "batch kv_heads group rows columns"]
    visible: Bool[Tensor, "batch_or_1 1 1 rows columns"] | None


def _seen(x: Tensor, visible: Tensor | None) -> Tensor:
    """0 in the places of keys that a row does not see, whatever came to stand there."""
    return x if visible is None else x.masked_fill_(~visible, 0.0)
