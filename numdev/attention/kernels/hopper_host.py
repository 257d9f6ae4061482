"""Launching the Hopper kernel: which requests it can run, the list of tiles of each program, and the arguments."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.attention.accepts import ALL, BINARY, Accepts, of
from numdev.attention.kernel_launch import KernelLaunch
from numdev.attention.kernels import hopper
from numdev.attention.kernels.alignment import misalignment
from numdev.attention.kernels.hopper_parts import Code
from numdev.attention.kernels.hopper_tensors import DTYPES, descriptor, heads_in_cache
from numdev.attention.kernels.launch import hopper_bc
from numdev.attention.kernels.runtime import multiprocessors
from numdev.attention.kernels.tables import Tables
from numdev.attention.mask import Mask
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiling import Order

_ROWS = 64  # of one warp group
_TILE_COST = 1.0  # cost of beginning and ending a tile, in blocks of keys; an estimate, since the lists hardly depend on it


@dataclass(frozen=True)
class Shape:
    """Computing warp groups, buffers for K and V, registers of a computing thread, and keys of a block."""

    groups: int
    stages: int
    registers: int
    bc: int = 128

    @property
    def br(self) -> int:
        return _ROWS * self.groups


# By head_dim and Br; `python -m benchmarks.hopper` compares others. Three groups overlap exponentials and products best,
# but do not fit into the registers at d = 128. At d = 256, O takes 128 registers per thread, and blocks of 64 keys the rest.
SHAPES = {
    (64, 128): Shape(2, 2, 240),
    (64, 192): Shape(3, 2, 160),
    (128, 128): Shape(2, 2, 240),
    (256, 128): Shape(2, 2, 240, hopper_bc(256)),
}
_SHORT = 4096  # keys: below this, causal tiles of 192 rows waste more on the diagonal than the third group gains


def pinned_br(head_dim: int, mask: Mask, queries: int, keys: int) -> int:
    """`Br` if none is given: 192 at d = 64, but 128 for short or unaligned causal problems and at larger d."""
    slow_causal = mask.causal and (keys < _SHORT or is_unaligned(queries, keys))
    return 192 if head_dim == 64 and not slow_causal else 128


def is_unaligned(queries: int, keys: int) -> bool:
    """Whether a causal limit crosses more than one block of keys in the rows of a warp group.

    That needs a second loop, which costs three groups an eighth of their speed even if it never iterates: with their few
    registers, the compiler then moves halves of P between registers in both loops (seen with triton 3.6).
    """
    return (keys - queries) % _ROWS != 0


def refusal(q: Tensor, k: Tensor, v: Tensor, mask: Mask, settings: Any) -> str | None:
    """Why this kernel cannot run a request; None if it can. `settings` is a `numdev.Triton`."""
    head_dim = q.shape[-1]
    checks = (
        (q.dtype not in (torch.bfloat16, torch.float16), f"it takes fp16 and bf16, not {settings.fmt.name}"),
        (head_dim not in (64, 128, 256), f"it takes head_dim 64, 128 and 256, not {head_dim}"),
        (v.shape[-1] != head_dim, f"it has one head_dim for q, k and v, and v has {v.shape[-1]}, q {head_dim}"),
        (settings.bc not in (None, bc := hopper_bc(head_dim)), f"its Bc is {bc} at d = {head_dim}, not {settings.bc}"),
        ((head_dim, settings.br or 128) not in SHAPES, f"its Br is 128, or 192 at d = 64, not {settings.br}"),
    )
    for refused, reason in checks:
        if refused:
            return reason
    found = _ACCEPTS.refusal(settings) or _MASK.refusal(mask)
    return misalignment(q=q, k=k, v=v) if found is None else str(found)


# Of a `Triton`, whose products are of FP32 alone. Keys are visited from the last to the first; scores have a folded log2(e).
_ACCEPTS = Accepts(
    object,
    "tiling",
    fmt=BINARY,
    order=(None, Order.REVERSE),
    splits=(None, 1),
    softmax=Accepts(OnlineSoftmax, "softmax", exp=Accepts(Exponential, binary=(True,))),
    **of("br bc products kernel", ALL),
)
_MASK = Accepts(Mask, "problem", **of("causal key_lengths", ALL))


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, settings: Any) -> tuple[Tensor, Tensor, KernelLaunch]:
    """`out` in the dtype of q, LSE in FP32, and what ran."""
    (batch, heads, queries, head_dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    br = settings.br or pinned_br(head_dim, mask, queries, keys)
    shape = SHAPES[head_dim, br]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    lengths = mask.lengths(batch, keys)
    work = Work(heads, group, queries, keys, br, mask.causal, lengths, multiprocessors(q.device), bc := shape.bc)
    tiles = _TABLES.get((work, head_dim), q.device, lambda: schedule(work, head_dim))  # [rounds, programs, 5]
    ragged = [length for length in lengths if length % bc or not length]
    masked = mask.causal or bool(ragged)
    padded = any(length < keys for length in ragged)
    unaligned = mask.causal and is_unaligned(queries, keys)
    code = Code(
        bc, head_dim, shape.groups, shape.stages, DTYPES[q.dtype], mask.causal, unaligned, masked, padded, shape.registers
    )
    columns = head_dim // 2 if head_dim > 128 else head_dim  # `Setting.parts` of O
    sides = ((q, _ROWS, head_dim), (k, bc, head_dim), (v, bc, head_dim), (out, _ROWS, columns))
    with torch.cuda.device(q.device):
        hopper.attention[(tiles.shape[1],)](
            *(descriptor(*side) for side in sides),
            lse,
            tiles,
            scale * math.log2(math.e),
            heads,
            group,
            queries,
            keys - queries,
            code,
            num_warps=4,
        )
    return out, lse, KernelLaunch("numdev hopper", br, bc, stages=shape.stages)


_TABLES = Tables(64)


@dataclass(frozen=True)
class Work:
    """What the list of tiles depends on; `lengths` are the keys of each batch entry."""

    heads: int
    group: int
    queries: int
    keys: int
    br: int
    causal: bool
    lengths: tuple[int, ...]
    programs: int
    bc: int

    def blocks(self, row: int, length: int) -> int:
        """How many blocks of keys the tile with first row `row` visits: at least one, whose keys may all be masked."""
        count = math.ceil(length / self.bc)
        if self.causal:
            last = row + self.br - 1 + self.keys - self.queries
            count = min(count, last // self.bc + 1)
        return max(count, 1)


def schedule(work: Work, head_dim: int) -> Tensor:
    """Lists of tiles `[round, program, (row, batch entry, head, blocks, keys)]`.

    Each tile is assigned to the program that becomes free first. Without a causal limit the tiles of a head follow one another,
    so that its K and V stay in the L2 cache; with one, the longest tiles of as many heads as fit into that cache come first.
    """
    pairs = [(b, h) for b in range(len(work.lengths)) for h in range(work.heads)]
    rows = range(0, work.queries, work.br)
    if work.causal:
        together = work.group * heads_in_cache(work.keys, head_dim)
        parts = [pairs[i : i + together] for i in range(0, len(pairs), together)]
        order = [(row, b, h) for part in parts for row in reversed(rows) for b, h in part]
    else:
        order = [(row, b, h) for b, h in pairs for row in rows]
    grid = min(work.programs, len(order))
    lists: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(grid)]
    free = [(0.0, program) for program in range(grid)]
    for row, b, h in order:
        time, program = heapq.heappop(free)
        count = work.blocks(row, work.lengths[b])
        lists[program].append((row, b, h, count, work.lengths[b]))
        heapq.heappush(free, (time + count + _TILE_COST, program))
    rounds = max(map(len, lists)) + 2  # a program looks one tile ahead, also from the end of its list
    table = torch.zeros(rounds, grid, 5, dtype=torch.int32)
    for program, tiles in enumerate(lists):
        table[: len(tiles), program] = torch.tensor(tiles, dtype=torch.int32)
    return table
