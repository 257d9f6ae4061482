"""What a tiled run counts of itself: the mechanisms behind a deviation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev.arithmetic.microscale import Microscaled
from numdev.arithmetic.rounding import Cast
from numdev.attention.softmax import OnlineSoftmax


class Counters:
    """Events of one run, summed over tiles on the device; only `summaries` waits for it.

    A run over several replicates, whose batch entries follow one another, counts the events of each apart.
    """

    def __init__(self, rows: Tensor, softmax: OnlineSoftmax, probabilities: Cast | Microscaled, replicates: int = 1) -> None:
        """`rows` is any tensor of shape [batch, ..., rows, 1] on the device; each replicate has as many entries of the batch."""
        self._replicates = replicates
        self._events = torch.zeros(6, replicates, dtype=torch.float64, device=rows.device)
        self._ties = torch.zeros(rows.shape[:-1], dtype=torch.int64, device=rows.device)
        self._largest = torch.full_like(rows, float("-inf"))
        self._maximum_lags = maximum_lags(softmax)
        self._limit = probabilities.largest
        self._can_saturate = can_saturate(softmax, self._limit)
        self._lost = torch.zeros(replicates, dtype=torch.int64, device=rows.device)

    def scores(self, s: Tensor, m: Tensor, first: int) -> None:
        """How often the largest score so far occurs, in any split; the count starts over when it rises."""
        rows = slice(first, first + s.shape[-2])
        ties, before = self._ties[..., rows], self._largest[..., rows, :]
        largest = torch.maximum(before, s.amax(-1, keepdim=True) if self._maximum_lags else m)
        equal = (s == largest).sum(-1).masked_fill_((largest == float("-inf")).squeeze(-1), 0)
        ties.masked_fill_((largest > before).squeeze(-1), 0).add_(equal)
        before.copy_(largest)

    def row_sums(self, p: Tensor, alpha: Tensor, begun: Tensor) -> None:
        self._events[0] += self._count((alpha != 1) & begun)
        self._events[1] += self._count(p == 1)

    def addition(self, before: Tensor, added: Tensor, after: Tensor) -> None:
        """One addition to running row sums, within a tile or of a tile."""
        self._events[2] += self._count((after == before) & (added > 0) & (before > 0))

    def before_cast(self, p: Tensor, scale: float) -> None:
        if self._can_saturate:
            self._events[3] += self._count(p * scale > self._limit)

    def after_cast(self, p: Tensor, visible: Tensor | None) -> None:
        seen: Tensor | int = p.numel() // self._replicates
        if visible is not None:
            seen = self._count(visible.expand(len(p), *visible.shape[1:])) * (p[0].numel() // visible[0].numel())
        self._events[4] += seen - self._count(p)  # an entry that is masked is 0 and not seen
        self._events[5] += seen

    def add(self, events: Tensor, ties: Tensor) -> None:
        """The six events of a run over one replicate, and how often the largest score of each of its rows occurs.

        In the order of the methods: rescales, ones, stagnations, saturations, entries that are 0, and entries.
        """
        self._events += events.to(self._events)[:, None]
        self._ties.copy_(ties)

    def ended(self, lse: Tensor, sees: Tensor) -> None:
        """At the end: rows that see a key and have no sum, since every one of their scores or exponentials was lost."""
        self._lost += self._count((lse == float("-inf")).squeeze(-1) & sees)

    def summaries(self) -> list[dict[str, float]]:
        """The columns of `numdev.attention.events.COUNTERS`, of each replicate."""
        tied = (self._ties > 1).double().reshape(self._replicates, -1).mean(1)
        counted = zip(self._events.T.tolist(), tied.tolist(), self._lost.tolist(), strict=True)
        return [self._summary(events, tied, lost) for events, tied, lost in counted]

    def _count(self, x: Tensor) -> Tensor:
        """How many elements of each replicate are not 0."""
        if self._replicates == 1:
            return torch.count_nonzero(x)[None]
        return torch.count_nonzero(x.reshape(self._replicates, -1), 1)

    def _summary(self, events: list[float], tied: float, lost: int) -> dict[str, float]:
        rescales, ones, stagnated, saturated, flushed, entries = events
        rows = self._ties.numel() // self._replicates
        return {
            "rescales_per_row": rescales / rows,
            "tied_rows": tied,
            "p_one_per_row": ones / rows,
            "p_flushed": flushed / max(entries, 1),
            "p_saturated": saturated / max(entries, 1),
            "stagnated_per_row": stagnated / rows,
            "lost_rows": lost / rows,
        }


def maximum_lags(softmax: OnlineSoftmax) -> bool:
    """Whether the maximum that exponentials are taken from can be another number than the largest score."""
    return softmax.rescale_threshold > 0 or softmax.tie_shift is not None


def can_saturate(softmax: OnlineSoftmax, limit: float) -> bool:
    """Whether an entry of P, scaled, can be beyond the largest number of its format."""
    return softmax.p_scale * math.exp2(softmax.rescale_threshold) > limit
