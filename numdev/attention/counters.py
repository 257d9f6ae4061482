"""The events that a tiled run counts of itself: the mechanisms behind a deviation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev.attention.precision import Precision
from numdev.attention.reach import maximum_lags, reach_of_one
from numdev.attention.softmax import OnlineSoftmax

COUNTERS = {
    "rescales_per_row": ("per row", "times that alpha differed from 1 on a row already begun, mean over rows"),
    "tied_rows": ("relative", "share of rows whose largest score occurs more than once"),
    "p_one_per_row": ("per row", "entries of P equal to 1, mean over rows"),
    "p_flushed": ("relative", "share of the visible entries of P that are 0 after the probabilities cast"),
    "p_saturated": ("relative", "share of the visible entries of P beyond the largest number of the probabilities format"),
    "stagnated_per_row": ("per row", "additions of something positive that left a running row sum as it was, mean over rows"),
    "lost_rows": (
        "relative",
        "share of rows that see a key and whose row sum is 0: their result is 0, their LSE -inf",
    ),
}
"""Unit and meaning of each event of a forward run."""

BACKWARD_COUNTERS = {
    "p_above_one": ("relative", "share of the visible entries of P, as it is recomputed, above 1: only rounding can make them"),
    "p_flushed": ("relative", "share of the visible entries of P that are 0 after the probabilities cast"),
    "ds_flushed": ("relative", "share of the visible entries of dS that are 0 after the ds cast"),
}
"""Of a backward run."""

_EXACTLY = 1 << 24  # ones that FP32 can add up without rounding


class Counters:
    """Events of one run, summed over tiles on the device; only `summaries` waits for it.

    A run over several replicates, whose batch entries follow one another, counts the events of each apart.
    """

    def __init__(
        self, rows: Tensor, softmax: OnlineSoftmax, precision: Precision, replicates: int = 1, *, keeps_every: bool = False
    ) -> None:
        """`rows` is any tensor of shape [batch, ..., rows, 1] on the device; each replicate has as many entries of the batch.

        `keeps_every` says that no entry of P that a row sees can be 0, so that none is looked for.
        """
        self._replicates = replicates
        self._events = torch.zeros(6, replicates, dtype=torch.float64, device=rows.device)
        self._ties = torch.zeros(rows.shape[:-1], dtype=rows.dtype, device=rows.device)
        self._largest = rows.new_full(rows.shape, float("-inf"))
        self._maximum_lags = maximum_lags(softmax)
        self._limit = precision.probabilities.largest
        self._can_saturate = can_saturate(precision, softmax)
        self._lost = torch.zeros(replicates, dtype=torch.int64, device=rows.device)
        self._scratch = rows.new_empty(0)
        self._reach = reach_of_one(precision, softmax)
        self._near: Tensor | None = None
        self._keeps_every = keeps_every

    def scores(self, s: Tensor, top: Tensor, m: Tensor, first: int) -> None:
        """How often the largest score so far occurs, in any split; the count starts over when it rises.

        `top` is the largest score of each row of the tile, or what stands for it, and `m` the new running maximum.
        """
        self._near = self._rows_near(top, m)
        if self._near is not None:
            self._ties_of(self._near, s, m, first)
            return
        rows = slice(first, first + s.shape[-2])
        ties, before = self._ties[..., rows], self._largest[..., rows, :]
        largest = torch.maximum(before, s.amax(-1, keepdim=True) if self._maximum_lags else m)
        equal = self._equal(s, largest).masked_fill_((largest == float("-inf")).squeeze(-1), 0)
        ties.masked_fill_((largest > before).squeeze(-1), 0).add_(equal)
        before.copy_(largest)

    def _ties_of(self, near: Tensor, s: Tensor, m: Tensor, first: int) -> None:
        """The same where only some rows of the tile can have the maximum; in all others neither it nor its count changes."""
        height, total = s.shape[-2], self._ties.shape[-1]
        place = near if height == total else near // height * total + near % height + first
        ties, before = self._ties.view(-1), self._largest.view(-1)
        met = before[place]
        largest = torch.maximum(met, m.reshape(-1).index_select(0, near))  # that of another split can be larger
        kept = ties[place].masked_fill_(largest > met, 0)
        equal = _equal_in_rows(_rows(s, near), largest[:, None]).masked_fill_(largest == float("-inf"), 0)
        ties[place] = kept.add_(equal)
        before[place] = largest

    def row_sums(self, p: Tensor, alpha: Tensor, l_old: Tensor) -> None:
        """P of a tile, the rescale of the sums of its rows, and these before it."""
        near = self._near  # where the maximum rose, among others
        if near is None:
            self._events[0] += self._count((alpha != 1) & (l_old > 0))
            self._events[1] += self._sum(self._equal(p, 1.0))
            return
        rescaled = _rows(alpha, near).ne_(1.0).mul_(_rows(l_old, near).gt_(0.0))
        self._events[0] += self._sum_of(near, rescaled.squeeze(-1), l_old.numel())
        self._events[1] += self._sum_of(near, _equal_in_rows(_rows(p, near), 1.0), l_old.numel())

    def addition(self, before: Tensor, added: Tensor, after: Tensor) -> None:
        """One addition to running row sums, within a tile or of a tile."""
        stagnated = torch.minimum(before, added).gt_(0.0).mul_(torch.eq(after, before, out=torch.empty_like(after)))
        self._events[2] += self._sum(stagnated)

    def before_cast(self, p: Tensor, scale: float) -> None:
        if self._can_saturate:
            self._events[3] += self._sum(torch.mul(p, scale, out=self._like(p)).gt_(self._limit))

    def after_cast(self, p: Tensor, visible: Tensor | None) -> None:
        seen: Tensor | int = p.numel() // self._replicates
        if visible is not None:
            seen = self._count(visible.expand(len(p), *visible.shape[1:])) * (p[0].numel() // visible[0].numel())
        if not self._keeps_every:
            self._events[4] += seen - self._nonzero(p)  # an entry that is masked is 0 and not seen
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
        """The columns of `COUNTERS`, of each replicate."""
        tied = (self._ties > 1).double().reshape(self._replicates, -1).mean(1)
        counted = zip(self._events.T.tolist(), tied.tolist(), self._lost.tolist(), strict=True)
        return [self._summary(events, tied, lost) for events, tied, lost in counted]

    def _count(self, x: Tensor) -> Tensor:
        """How many elements of each replicate are not 0."""
        if self._replicates == 1:
            return torch.count_nonzero(x)[None]
        return torch.count_nonzero(x.reshape(self._replicates, -1), 1)

    def _nonzero(self, p: Tensor) -> Tensor | int:
        """The same of a tile, whose smallest number is cheaper to find than its zeros are to count, but for the wait on a GPU."""
        if p.is_cpu and bool(p.amin() > 0):
            return p.numel() // self._replicates
        return self._sum(torch.ne(p, 0.0, out=self._like(p)))

    def _rows_near(self, top: Tensor, m: Tensor) -> Tensor | None:
        """The rows of a tile in which a score may equal the maximum, or an entry of P be 1; None for all.

        On a CPU, where they are soon few: most maxima were met in earlier tiles.
        """
        if self._reach is None or not m.is_cpu:
            return None
        rows = (top < m - self._reach).logical_not_().flatten().nonzero().flatten()  # with those that hold NaN
        return rows if 2 * len(rows) < m.numel() else None

    def _equal(self, x: Tensor, value: Tensor | float) -> Tensor:
        """How many numbers of each row of a tile equal a number, or that of the row."""
        return torch.eq(x, value, out=self._like(x)) @ x.new_ones(x.shape[-1])

    def _sum_of(self, near: Tensor, counts: Tensor, rows: int) -> Tensor:
        """The sum over each replicate of what is counted in some rows of a tile, which has so many."""
        if self._replicates == 1:
            return counts.sum(dtype=torch.float64)[None]
        found = counts.new_zeros(self._replicates, dtype=torch.float64)
        return found.index_add_(0, near // (rows // self._replicates), counts.double())

    def _like(self, x: Tensor) -> Tensor:
        """Memory for a comparison's 0 and 1 as numbers of the carrier, which torch writes several times as fast as booleans."""
        if self._scratch.numel() < x.numel():
            self._scratch = x.new_empty(x.numel())
        return self._scratch[: x.numel()].view(x.shape)

    def _sum(self, found: Tensor) -> Tensor:
        """How many comparisons of each replicate hold."""
        each = found.view(self._replicates, -1)
        return each.sum(1) if each.shape[1] <= _EXACTLY else each.sum(1, dtype=torch.float64)

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

    def add(self, events: Tensor, entries: float) -> None:
        """The three events of a run, entries that are 0 for the latter two, and how many entries are visible."""
        self._events += events.to(self._events)
        self._entries += entries

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


def _equal_in_rows(rows: Tensor, value: Tensor | float) -> Tensor:
    """How many numbers of each row equal a number, or that of the row; the rows are lost."""
    return rows.eq_(value) @ rows.new_ones(rows.shape[-1])


def _rows(x: Tensor, near: Tensor) -> Tensor:
    """Some rows of a tile, in memory of their own."""
    return x.reshape(-1, x.shape[-1]).index_select(0, near)
