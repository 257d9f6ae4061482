"""The backward pass over pairs of a query tile and a KV tile, every operation in its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from numdev.attention.backward.counters import BackwardCounters
from numdev.attention.backward.meetings import Meeting, Range
from numdev.attention.backward.recompute import Recompute
from numdev.attention.backward.steps import DELTA, LOG2_E, TILES, BackwardSteps
from numdev.attention.commonsteps import NEVER
from numdev.attention.mask import Mask


@dataclass(frozen=True)
class Run:
    """What stays the same for all tiles of a run. All tensors are in the carrier, with heads grouped.

    Attributes:
        lse: in the units of the scores.
        factor: softmax scale.
        meetings: of tiles, in the order in which they are added.
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

    def recomputed(self, index: int) -> Recomputed | None:
        """P and dP of the meeting of an index; None where no row may see a key."""
        meeting = self.meetings[index]
        met = self.met(meeting)
        if not met:
            return None
        rows = min(start for start, _ in met), max(stop for _, stop in met)
        steps, here, there = self.steps, (..., slice(*meeting.heads), slice(*rows), slice(None)), slice(*meeting.keys)
        steps.at(TILES, index, rows[0])
        exponential = self.recompute.exponential
        factor = self.factor * LOG2_E if exponential.is_binary else self.factor
        s = steps.scores(self.q[here], self.k[..., there, :].mT, factor)
        visible = self.mask.visible(self.q.shape[-2], self.k.shape[-2], rows, meeting.keys, s.device)
        lse = self.lse[here]
        s.masked_fill_(lse == NEVER, NEVER)
        if visible is not None:
            visible = visible[:, :, None]
            s.masked_fill_(~visible, NEVER)
        p = steps.exponential(s, lse, exponential)
        dp = steps.dp(self.do[here], self.v[..., there, :])
        return Recomputed(_seen(p, visible), _seen(dp, visible), visible, here, there, met)

    def delta(self) -> Tensor:
        """`rowsum(dP * P)`, summed over the KV tiles in the order of dQ: a pass of its own."""
        delta = torch.zeros_like(self.lse)
        for index in range(len(self.meetings)):
            found = self.recomputed(index)
            if found is not None:
                self.steps.at(DELTA, index, found.met_first)
                self.steps.add_delta(delta[found.here], self.steps.delta_of_tile(found.dp, found.p))
        return delta

    def gradients(self, delta: Tensor, counters: BackwardCounters | None) -> tuple[Tensor, Tensor, Tensor]:
        """The running sums of dQ, dK and dV after all meetings: dQ over KV tiles, dK and dV over heads, then query tiles."""
        dq = torch.zeros_like(self.q)
        dk, dv = torch.zeros_like(self.k.squeeze(2)), torch.zeros_like(self.v.squeeze(2))
        for index in range(len(self.meetings)):
            found = self.recomputed(index)
            if found is None:
                continue
            ds = self.steps.ds(found.dp, found.p, delta[found.here])
            ds = _seen(ds, found.visible)
            p = self.steps.probabilities(found.p)
            if counters is not None:
                counters.tile(found.p, p, ds, found.visible)
            self.steps.add_dq(dq[found.here], self.steps.dq(ds, self.k[..., found.there, :], found.visible))
            self._add_to_keys(dk[..., found.there, :], dv[..., found.there, :], ds, p, found)
        return dq, dk, dv

    def _add_to_keys(self, dk: Tensor, dv: Tensor, ds: Tensor, p: Tensor, found: Recomputed) -> None:
        """dK and dV of one KV tile, summed over the heads of the meeting and, within a head, over the query tiles."""
        q, do = self.q[found.here], self.do[found.here]
        for head in range(q.shape[2]):
            for start, stop in found.met:
                part = slice(start - found.met_first, stop - found.met_first)
                seen = None if found.visible is None else found.visible[:, :, 0, part]
                self.steps.add_dk(dk, self.steps.dk(ds[:, :, head, part], q[:, :, head, part], seen))
                self.steps.add_dv(dv, self.steps.dv(p[:, :, head, part], do[:, :, head, part], seen))


@dataclass(frozen=True)
class Recomputed:
    """P and dP of the rows and the KV tile of a meeting, 0 where a row does not see a key.

    Attributes:
        visible: what rows see; None for all.
        here, there: the place of the rows, with their heads, and of the keys.
        met: the tiles of queries, in their order.
    """

    p: Float[Tensor, "batch kv_heads heads rows columns"]
    dp: Float[Tensor, "batch kv_heads heads rows columns"]
    visible: Bool[Tensor, "batch_or_1 1 1 rows columns"] | None
    here: tuple[Any, ...]
    there: slice
    met: list[Range]

    @property
    def met_first(self) -> int:
        """The first of the rows."""
        return min(start for start, _ in self.met)


def _seen(x: Tensor, visible: Tensor | None) -> Tensor:
    """0 in the places of keys that a row does not see, whatever came to stand there."""
    return x if visible is None else x.masked_fill_(~visible, 0.0)
