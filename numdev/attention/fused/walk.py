"""A whole run by compiled passes: its blocks of rows, and the threads that take them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from numdev.arithmetic.products import ROWS, row_sums
from numdev.attention.fused import entry
from numdev.attention.fused import layout as at
from numdev.attention.fused.recipe import recipe
from numdev.attention.fused.rows import FusedRows, Planes
from numdev.attention.fused.threads import in_threads
from numdev.attention.mask import Mask
from numdev.attention.recurrence import Run, through
from numdev.attention.tiling import Tiling

_WORKSPACE = 1 << 17  # scores of a block: with its share of Q and O they stay in the L2 cache of a core


@dataclass(frozen=True)
class Block:
    """Rows of some of the matrices of a run: a matrix is what meets one K."""

    matrices: slice
    rows: slice


def attend(run: Run, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Output and LSE of every row, shaped as q; what is counted goes to the counters of the run."""
    flat = replace(run, **{name: getattr(run, name).flatten(0, 1)[None] for name in "qkv"}, counters=None)
    made = recipe(run.steps.precision, run.softmax, run.factor, count=run.counters is not None)
    ranges = key_ranges(run.mask, (*run.k.shape[:2], run.q.shape[-2], run.k.shape[-2]))
    out, lse = run.q.new_empty(*flat.q.shape[1:-1], run.v.shape[-1]), run.q.new_empty(*flat.q.shape[1:-1], 1)
    ties, events = torch.zeros(out.shape[:-1]), torch.zeros(6, dtype=torch.float64)
    splits = tiling.key_tiles(run.k.shape[-2])

    def work(block: Block) -> np.ndarray:
        planes = Planes.over(ranges[:, block.matrices, block.rows].repeat_interleave(out.shape[1], 1).contiguous())
        part = replace(flat, q=flat.q[:, block.matrices], k=flat.k[:, block.matrices], v=flat.v[:, block.matrices])
        first, last = block.rows.start, block.rows.stop
        done = through(part, splits, first, lambda split: FusedRows(part, first, last, made, planes))
        out[block.matrices, :, block.rows], lse[block.matrices, :, block.rows] = (x[0] for x in done)
        ties[block.matrices, :, block.rows] = planes.of_rows[at.TIES].view(-1, out.shape[1], last - first)
        return planes.events

    for found in in_threads(work, _blocks(flat, min(tiling.bc, run.k.shape[-2]))):
        events += torch.from_numpy(_as_counted(found))
    if run.counters is not None:
        run.counters.add(events, ties.view(run.q.shape[:-1]))
    return out.view(*run.q.shape[:-1], -1), lse.view(*run.q.shape[:-1], 1)


def _as_counted(events: np.ndarray) -> np.ndarray:
    """The events in the order of `Counters`."""
    zeros = events[at.VISIBLE] - events[at.NONZERO]
    return np.array([*events[[at.RESCALED, at.ONES, at.STAGNATED, at.SATURATED]], zeros, events[at.VISIBLE]], float)


def key_ranges(mask: Mask, sizes: tuple[int, int, int, int]) -> Tensor:
    """The half-open range of keys that each row of each KV head sees, `[2, batch * kv_heads, queries]`.

    `sizes` are batch entries, KV heads, queries and keys.
    """
    batch, heads, queries, keys = sizes
    rows = torch.arange(queries)
    found = torch.stack([torch.stack(mask.key_range(queries, keys, rows, length)) for length in mask.lengths(batch, keys)], 1)
    return found.repeat_interleave(heads, 1)


def _blocks(run: Run, columns: int) -> list[Block]:
    """Rows of one matrix where they fill the workspace, of several matrices where a matrix has too few."""
    matrices, group, queries = run.q.shape[1:4]
    threads = torch.get_num_threads()
    unit = ROWS[run.q.dtype.itemsize]
    rows = max(unit, _WORKSPACE // (columns * group) // unit * unit)
    together = max(1, min(_WORKSPACE // (columns * group * min(rows, queries)), math.ceil(matrices / threads)))
    parts = math.ceil(matrices / together)
    if parts < threads:  # a matrix alone, or few: both threads get rows of it
        rows = min(rows, max(unit, math.ceil(queries / (2 * threads) / unit) * unit))
    return [
        Block(slice(m, min(m + together, matrices)), slice(first, min(first + rows, queries)))
        for m in range(0, matrices, together)
        for first in range(0, queries, rows)
    ]


def sums_as_torch(length: int) -> bool:
    """Whether a row of so many numbers has the same sum here as torch gives it."""
    generator = torch.Generator().manual_seed(length)
    x = torch.ldexp(torch.rand(64, length, generator=generator), torch.randint(-16, 1, (64, length), generator=generator))
    sums = np.empty(len(x), np.float32)
    entry.sums(x.numpy(), sums)
    return row_sums(x).flatten().tolist() == sums.tolist()
