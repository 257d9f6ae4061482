"""A whole run by compiled passes, both passes of attention: what the passes read, and the threads that take blocks of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import FP32
from numdev.arithmetic.products import ROWS, product
from numdev.arithmetic.rounding import Cast
from numdev.attention.compiled import passes as at
from numdev.attention.counters import BackwardCounters, can_saturate
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.recurrence import BackwardRun, Rows, Run, through
from numdev.attention.softmax import Normalise, OnlineSoftmax
from numdev.attention.steps import LOG2_E, NEVER
from numdev.attention.tile_schedule import Meeting
from numdev.attention.tiling import Tiling

_WORKSPACE = 1 << 17  # scores of a block: with its share of Q and O they stay in the L2 cache of a core
Part = TypeVar("Part")
Result = TypeVar("Result")

# Of each pass the operations by their places, and the steps whose products are rounded by a pass over a tile.
_FORWARD = (
    {
        **dict(
            enumerate(("scale scores", "shift scores", "weigh sum", "add sums", "rescale output", "weigh output"), at.SCALE_S)
        ),
        **{at.ACCUMULATE: "accumulate", at.NORMALISE: "normalise"},
    },
    {at.ROUND_S: "scores", at.ROUND_V: "values"},
)
_BACKWARD = (
    {
        **{at.SCALE_S: "scale scores", at.SHIFT_S: "shift scores", at.SHIFT_DP: "shift dp"},
        **{at.WEIGH_DIFFERENCE: "weigh difference", at.ADD_DQ: "add dq", at.ADD_DK: "add dk", at.ADD_DV: "add dv"},
    },
    {at.ROUND_S: "scores", at.ROUND_DP: "dp", at.ROUND_DQ: "dq", at.ROUND_DK: "dk", at.ROUND_DV: "dv"},
)


@dataclass(frozen=True)
class Recipe:
    """Arrays that the passes of a run in an FP32 carrier read: a cast for each operation, and settings."""

    operations: np.ndarray
    settings: np.ndarray


def encode(cast: Cast, *, careful: bool = False) -> np.ndarray:
    """A cast to nearest even as a row of int32, from its format and from what it makes of numbers beyond its largest.

    `careful` where the operation before it must be corrected, so that both round once.
    """
    row = np.zeros(at.FIELDS, np.int32)
    row[at.CAREFUL] = careful
    to = cast.to
    if cast.is_identity_on(torch.float32):
        return row
    row[at.KIND] = at.ON_BITS if to.emin == FP32.emin else at.BY_ADDER
    row[at.SHIFT] = FP32.mantissa_bits - to.mantissa_bits
    row[at.LOW], row[at.HIGH] = (_bits(2.0 ** min(exponent, FP32.emax)) for exponent in (to.emin, to.emax + 1))
    row[at.TOP], row[at.ABOVE] = _bits(to.max), _bits(float(cast(torch.tensor([FP32.max]))))
    return row


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


@lru_cache(maxsize=16)
def recipe(precision: Precision | BackwardPrecision, softmax: OnlineSoftmax | None, factor: float, *, count: bool) -> Recipe:
    """The arrays of a run, forward with the recurrence `softmax`; `factor` is that of the scores in the exponential's units."""
    rows, settings = np.zeros((at.OPERATIONS, at.FIELDS), np.int32), np.zeros(at.SETTINGS)
    assert isinstance(precision.probabilities, Cast), "a microscaled P is left to tensor operations"
    operations, products = _FORWARD if isinstance(precision, Precision) else _BACKWARD
    for place, name in operations.items():
        once = precision.operation(name, torch.float32, factor if place == at.SCALE_S else 1.0)
        rows[place] = encode(once.cast, careful=not once.is_harmless)
    for place, step in products.items():
        dot: Dot = getattr(precision, step)
        if dot.every is None:  # otherwise it is rounded within a tile, and so comes rounded
            rows[place] = encode(dot.accumulate)
    rows[at.ROUND_E] = encode(precision.exponential)
    if precision.probabilities != precision.exponential:
        rows[at.ROUND_P] = encode(precision.probabilities)
    if isinstance(precision, BackwardPrecision) and precision.ds != precision.difference:
        rows[at.ROUND_DS] = encode(precision.ds)
    settings[at.FACTOR], settings[at.COUNT], settings[at.KEEPS] = factor, count, precision.exponential.keeps_minus_infinity
    if isinstance(precision, Precision) and softmax is not None:
        settings[at.LIMIT], settings[at.EACH] = precision.probabilities.largest, softmax.normalise is Normalise.EACH
        settings[at.SATURATES] = can_saturate(precision, softmax)
    return Recipe(rows, settings)


def multiply(dot: Dot, a: Tensor, b: Tensor) -> Tensor:
    """`a b`, not rounded yet unless it is within the tile."""
    b = b if b.ndim == a.ndim else b.expand(*[1] * (a.ndim - b.ndim), *b.shape)
    return (product(a, b) if dot.every is None else dot(a, b)).contiguous()


def in_threads(work: Callable[[Part], Result], parts: Sequence[Part]) -> Iterator[Result]:
    """The result of each part, in their order, by as many threads as torch has; in each of them torch has one thread."""
    threads = torch.get_num_threads()
    if min(threads, len(parts)) == 1:
        yield from map(work, parts)
        return
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(work, parts)
    finally:
        torch.set_num_threads(threads)  # for threads that begin later: the last call counts for them


def key_ranges(mask: Mask, sizes: tuple[int, int, int, int]) -> Tensor:
    """The half-open range of keys that each row of each KV head sees, `[2, batch * kv_heads, queries]`.

    `sizes` are batch entries, KV heads, queries and keys.
    """
    batch, heads, queries, keys = sizes
    rows = torch.arange(queries)
    ranges = torch.stack([torch.stack(mask.key_range(queries, keys, rows, length)) for length in mask.lengths(batch, keys)], 1)
    return ranges.repeat_interleave(heads, 1)


def attend(run: Run, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Output and LSE of every row, shaped as q; what is counted goes to the counters of the run."""
    flat = replace(run, **{name: getattr(run, name).flatten(0, 1)[None] for name in "qkv"}, counters=None)
    made = recipe(run.steps.precision, run.softmax, run.factor, count=run.counters is not None)
    ranges = key_ranges(run.mask, (*run.k.shape[:2], run.q.shape[-2], run.k.shape[-2]))
    out, lse = run.q.new_empty(*flat.q.shape[1:-1], run.v.shape[-1]), run.q.new_empty(*flat.q.shape[1:-1], 1)
    ties, counted = torch.zeros(out.shape[:-1]), np.zeros(at.EVENTS, np.int64)
    splits = tiling.key_tiles(run.k.shape[-2])

    def work(block: tuple[slice, slice]) -> np.ndarray:
        matrices, rows = block
        visible = ranges[:, matrices, rows].repeat_interleave(out.shape[1], 1).contiguous()
        shared = Shared(torch.zeros(at.PLANES, *visible.shape[1:]), visible.numpy(), np.zeros(at.EVENTS, np.int64))
        shared.planes[at.LARGEST] = NEVER
        part = replace(flat, q=flat.q[:, matrices], k=flat.k[:, matrices], v=flat.v[:, matrices])
        done = through(part, splits, rows.start, lambda split: CompiledRows(part, rows, made, shared))
        out[matrices, :, rows], lse[matrices, :, rows] = (x[0] for x in done)
        ties[matrices, :, rows] = shared.planes[at.TIES].view(-1, out.shape[1], rows.stop - rows.start)
        return shared.events

    for events in in_threads(work, _blocks(flat, min(tiling.bc, run.k.shape[-2]))):
        counted += events
    if run.counters is not None:
        zeros = counted[at.VISIBLE] - counted[at.NONZERO]
        in_order = [*counted[[at.RESCALED, at.ONES, at.STAGNATED, at.SATURATED]], zeros, counted[at.VISIBLE]]
        run.counters.add(torch.tensor(in_order, dtype=torch.float64), ties.view(run.q.shape[:-1]))
    return out.view(*run.q.shape[:-1], -1), lse.view(*run.q.shape[:-1], 1)


def _blocks(run: Run, columns: int) -> list[tuple[slice, slice]]:
    """Matrices, each of which meets one K, and rows of them: as many as fill the workspace, and some for each thread."""
    matrices, group, queries = run.q.shape[1:4]
    threads, unit = torch.get_num_threads(), ROWS[run.q.dtype.itemsize]
    rows = max(unit, _WORKSPACE // (columns * group) // unit * unit)
    at_once = max(1, min(_WORKSPACE // (columns * group * min(rows, queries)), math.ceil(matrices / threads)))
    if math.ceil(matrices / at_once) < threads:  # a matrix alone, or few: each thread gets rows of it
        rows = min(rows, max(unit, math.ceil(queries / (2 * threads) / unit) * unit))
    return [
        (slice(m, min(m + at_once, matrices)), slice(first, min(first + rows, queries)))
        for m in range(0, matrices, at_once)
        for first in range(0, queries, rows)
    ]


@dataclass(frozen=True)
class Shared:
    """Numbers that all splits of a block of rows share.

    Attributes:
        planes: numbers of every row, `[planes, matrices, rows]`.
        ranges: the first key that each row sees, and the one behind the last, `[2, matrices, rows]`.
        events: counts.
    """

    planes: Tensor
    ranges: np.ndarray
    events: np.ndarray


class CompiledRows(Rows):
    """`Rows` whose tiles are worked on by compiled passes, with the same bits."""

    def __init__(self, run: Run, rows: slice, recipe: Recipe, shared: Shared) -> None:
        super().__init__(run, rows.start, rows.stop, 0)
        self._recipe, self._shared = recipe, shared
        shared.planes[at.M], shared.planes[at.L] = NEVER, 0.0
        self.m, self.l = (shared.planes[plane].view(self.m.shape) for plane in (at.M, at.L))
        self._flat_o = self.o.view(-1, *self.o.shape[-2:]).numpy()

    def meet(self, index: int, tile: tuple[int, int]) -> None:
        run, precision, shared = self._run, self._run.steps.precision, self._shared
        first, last = run.mask.query_range(run.q.shape[-2], run.k.shape[-2], *tile)
        first, last = max(first, self._first), min(last, self._last)
        if first >= last:
            return
        place, here = np.array([first - self._first, tile[0]]), slice(first - self._first, last - self._first)
        planes, ops, settings = shared.planes.numpy(), self._recipe.operations, self._recipe.settings
        s = multiply(precision.scores, run.q[..., first:last, :], run.k[..., slice(*tile), :].mT)
        p = s.view(-1, *s.shape[-2:])
        at.begin(p.numpy(), planes, shared.ranges, place, ops, settings)
        p.copy_(run.softmax.exp(p))
        alpha, m = (shared.planes[plane][:, here, None] for plane in (at.ALPHA, at.M))
        alpha.copy_(run.steps.rescale(alpha, m, run.softmax.exp.exact))  # from the maximum before
        at.round_exponentials(p.numpy(), shared.events, ops, settings)
        shared.planes[at.SUM][:, here] = precision.row_sum.sum(p, watch=self._watch).squeeze(-1)
        at.finish(p.numpy(), planes, shared.events, place, ops, settings)
        values = multiply(precision.values, s, run.v[..., slice(*tile), :])
        at.add(self._flat_o, values.view(-1, *values.shape[-2:]).numpy(), planes, place, ops, settings)

    def _watch(self, before: Tensor, added: Tensor, after: Tensor) -> None:
        """Count additions within the sum of a row that leave it as it was."""
        self._shared.events[at.STAGNATED] += int(((after == before) & (torch.minimum(before, added) > 0)).sum())


def gradients(run: BackwardRun, delta: Tensor, counters: BackwardCounters | None) -> tuple[Tensor, Tensor, Tensor]:
    """See `numdev.attention.recurrence.BackwardRun.gradients`, whose bits these are."""
    factor = run.factor * LOG2_E if run.recompute.exponential.binary else run.factor
    made = recipe(run.steps.precision, None, factor, count=counters is not None)
    batch, kv_heads = run.k.shape[:2]
    ranges = key_ranges(run.mask, (batch, kv_heads, run.q.shape[-2], run.k.shape[-2])).numpy()

    def work(head: int) -> KVHead:
        entry, of_entry = divmod(head, kv_heads)
        here = slice(entry, entry + 1), slice(of_entry, of_entry + 1)
        part = replace(run, **{name: getattr(run, name)[here] for name in ("q", "k", "v", "do", "lse")})
        sums = KVHead(part, delta[here], ranges[:, head], made)
        for meeting in run.meetings:
            sums.meet(meeting)
        return sums

    heads = list(in_threads(work, range(batch * kv_heads)))
    if counters is not None:
        above, p, ds, visible = np.stack([head.events for head in heads]).sum(0).tolist()
        counters.add(torch.tensor([above, visible - p, visible - ds], dtype=torch.float64), float(visible))
    sums = zip(*((head.dq, head.dk, head.dv) for head in heads), strict=True)
    dq, dk, dv = (torch.stack(each).unflatten(0, (batch, kv_heads)) for each in sums)
    return dq, dk, dv


class KVHead:
    """The running sums of dQ of the query heads that share a KV head, and of its dK and dV."""

    def __init__(self, run: BackwardRun, delta: Tensor, ranges: np.ndarray, recipe: Recipe) -> None:
        """`run` has one batch entry and one KV head; `ranges` are the keys that each row sees, `[2, queries]`."""
        self._run, self._ranges, self._recipe = run, ranges, recipe
        self._q, self._do = run.q[0, 0], run.do[0, 0]
        self._k, self._v = run.k[0, 0, 0], run.v[0, 0, 0]
        self._planes = torch.stack([run.lse[0, 0, ..., 0], delta[0, 0, ..., 0]]).numpy()
        sums = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (self._q, self._k, self._v))
        self.dq, self.dk, self.dv = sums
        self.events = np.zeros(at.BACKWARD_EVENTS, np.int64)

    def meet(self, meeting: Meeting) -> None:
        """Add the shares of a meeting."""
        met = self._run.met(meeting)
        if not met:
            return
        precision, ops, settings = self._run.steps.precision, self._recipe.operations, self._recipe.settings
        first, last = min(start for start, _ in met), max(stop for _, stop in met)
        place = np.array([meeting.heads[0], first, meeting.keys[0]])
        here, there = (slice(*meeting.heads), slice(first, last)), slice(*meeting.keys)
        q, do, k, v = self._q[here], self._do[here], self._k[there], self._v[there]
        p = multiply(precision.scores, q, k.mT)
        at.recompute(p.numpy(), self._planes, self._ranges, place, ops, settings)
        p.copy_(self._run.recompute.exponential(p))
        ds = multiply(precision.dp, do, v.mT)
        at.differ(p.numpy(), ds.numpy(), self._planes, self._ranges, self.events, place, ops, settings)
        at.add_dq(self.dq.numpy(), multiply(precision.dq, ds, k).numpy(), place, ops)
        height = min(met)[1] - first
        in_order = np.array([(start - first) // height for start, _ in met])
        turns = (np.arange(len(q))[:, None] * len(met) + in_order).ravel()
        at.add_in_turn(self.dk[there].numpy(), _products(precision.dk, ds, q, height), turns, ops[at.ROUND_DK], ops[at.ADD_DK])
        at.add_in_turn(self.dv[there].numpy(), _products(precision.dv, p, do, height), turns, ops[at.ROUND_DV], ops[at.ADD_DV])


def _products(dot: Dot, p: Tensor, x: Tensor, height: int) -> np.ndarray:
    """`P^T X` of each tile of rows, the last of which may be shorter, not rounded yet unless it is within the tile.

    The shape is `[heads * tiles, columns, dim]`.
    """
    whole = p.shape[1] // height * height
    left, right = (t[:, :whole].unflatten(1, (-1, height)) for t in (p, x))
    shares = multiply(dot, left.mT, right)
    if whole < p.shape[1]:
        last = multiply(dot, p[:, whole:].mT, x[:, whole:])
        shares = torch.cat([shares, last[:, None]], 1)
    return shares.flatten(0, 1).numpy()
