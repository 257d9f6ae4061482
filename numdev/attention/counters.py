"""The events that a tiled run counts of itself: the mechanisms behind a deviation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev.attention.precision import Precision
from numdev.attention.softmax import OnlineSoftmax

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

    def __init__(self, rows: Tensor, softmax: OnlineSoftmax, precision: Precision) -> None:
        """`rows` is any tensor of shape [batch, ..., rows, 1] on the device."""
        self._events = torch.zeros(6, dtype=torch.float64, device=rows.device)
        self._ties = torch.zeros(rows.shape[:-1], dtype=rows.dtype, device=rows.device)
        self._largest = rows.new_full(rows.shape, float("-inf"))
        self._maximum_lags = maximum_lags(softmax)
        self._limit = precision.probabilities.largest
        self._can_saturate = can_saturate(precision, softmax)
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


def can_saturate(precision: Precision, softmax: OnlineSoftmax) -> bool:
    """Whether an entry of P, scaled, can be beyond the largest number of its format; also true where this is not known.

    Taken from a maximum that follows every score, `x = S - m <= 0`, so that `e^x <= 1`, and for a polynomial `2^floor(x) p(x -
    floor(x)) <= sum |c_i|`; the exponential's cast adds at most `2 u` of that. A lazy maximum has no such bound: the distance is
    rounded after it is compared, and a maximum of a tile that is NaN, as of a tie whose shift overflows, is not followed.
    """
    coefficients = softmax.exp.coefficients
    largest = math.fsum(map(abs, coefficients)) * (1 + 4 * precision.exponential.to.u) if coefficients else 1.0
    return softmax.rescale_threshold > 0 or softmax.p_scale * max(1.0, largest) > precision.probabilities.largest


def maximum_lags(softmax: OnlineSoftmax) -> bool:
    """Whether the maximum that exponentials are taken from can be another number than the largest score."""
    return softmax.rescale_threshold > 0 or softmax.tie_shift is not None
