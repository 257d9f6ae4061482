"""Which requests the Hopper kernels can run, their pinned launch settings, and the list of tiles of each forward program.

Triton is not imported here.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, FP16
from numdev.arithmetic.quantise import Quantised, Scale
from numdev.arithmetic.rounding import Cast
from numdev.attention.accepts import ALL, BINARY, RECOMPUTE, Accepts, of
from numdev.attention.mask import Mask
from numdev.attention.softmax import DeltaForm, Exponential, OnlineSoftmax
from numdev.attention.tiling import Order

ROWS = 64  # of one computing warp group
_ALIGNED = 16  # bytes of which every address and stride is a multiple (CUDA C++ Programming Guide, tensor maps)
_L2_BYTES = 24e6  # half of the L2 cache of an H100: what the heads that are processed together may read
_TILE_COST = 1.0  # cost of beginning and ending a tile, in blocks of keys; an estimate, since the lists hardly depend on it
_SHORT = 4096  # keys: below this, causal tiles of 192 rows waste more on the diagonal than the third group gains

BACKWARD = "numdev hopper backward, one kernel"
"""The name of the backward kernel in `KernelLaunch`."""
WIDE = "numdev hopper backward, three kernels"
"""That of the kernels at d = 256."""
QUERIES = {64: 128, 128: 64, 256: 64}
"""Queries in a tile of the backward kernel, by head_dim: the fastest of those tried on an H200 that spill no matrix to memory."""
RESIDENT = 128  # programs of the backward kernel that run at once: about the multiprocessors of an H100 or H200
STAGES, REGISTERS = 2, 240  # of the backward kernel: buffers for Q and for dO, and registers of a computing thread


@dataclass(frozen=True)
class Shape:
    """Computing warp groups, buffers for K and V, registers of a computing thread, and keys of a block."""

    groups: int
    stages: int
    registers: int
    bc: int = 128

    @property
    def br(self) -> int:
        return ROWS * self.groups


# By head_dim and Br; `python -m benchmarks.hopper` compares others. Three groups overlap exponentials and products best,
# but do not fit into the registers at d = 128. At d = 256, O takes 128 registers per thread, and blocks of 64 keys the rest.
SHAPES = {
    (64, 128): Shape(2, 2, 240),
    (64, 192): Shape(3, 2, 160),
    (128, 128): Shape(2, 2, 240),
    (256, 128): Shape(2, 2, 240, 64),
}


# For E4M3; at d = 256 there are no registers for a promoted sum beside that of the tensor cores.
NARROW = SHAPES | {(256, 128): Shape(2, 3, 240, 64)}


def keys_of_block(head_dim: int) -> int:
    """The Bc of the forward kernel, which leaves registers for O and shared memory for two blocks each of K and V."""
    return SHAPES[head_dim, 128].bc if head_dim in (64, 128, 256) else 128


def pinned_br(head_dim: int, mask: Mask, queries: int, keys: int) -> int:
    """`Br` if none is set: 192 at d = 64, but 128 for short or unaligned causal problems, and at larger d."""
    limits = Limits.of(mask, queries, keys)
    slow = limits.limited and (keys < _SHORT or limits.is_unaligned)
    return 192 if head_dim == 64 and not slow else 128


@dataclass(frozen=True)
class Limits:
    """Which keys a query sees: the last is `i + shift`, if there is a limit, and in a window of `span` keys the first follows."""

    limited: bool
    shift: int
    span: int = 0

    @staticmethod
    def of(mask: Mask, queries: int, keys: int) -> Limits:
        """A window without a causal limit is a later limit, with a window up to there."""
        shift, window = keys - queries, mask.window
        if window is None:
            return Limits(mask.causal, shift)
        ahead = 0 if mask.causal else window - 1
        return Limits(True, shift + ahead, window + ahead)

    @property
    def is_unaligned(self) -> bool:
        """Whether they cross more than one block of keys in the rows of a warp group.

        That needs a second loop, which costs three groups an eighth of their speed even if it never iterates: with their few
        registers, the compiler then moves halves of P between registers in both loops (seen with triton 3.6).
        """
        return self.limited and (self.span > 0 or self.shift % ROWS != 0)


_BINARY = Accepts(Exponential, binary=(True,))
_MASK = Accepts(Mask, "problem", **of("causal key_lengths window", ALL))
_NO_WINDOW = _MASK.but(window=(None,))
# Of a `Triton`, whose products are of FP32 alone. Keys are visited from the last to the first; scores have a folded log2(e).
_FORWARD = Accepts(
    object,
    "tiling",
    fmt=BINARY,
    order=(None, Order.REVERSE),
    splits=(None, 1),
    split_size=ALL,
    softmax=(_SOFTMAX := Accepts(OnlineSoftmax, "softmax", exp=_BINARY, rescale_threshold=ALL)),
    **of("br bc products kernel promotion", ALL),
)
_E4M3 = Accepts(Cast, to=(E4M3FN,), overflow=ALL)  # a number divided by its scale is never beyond the largest
_SCALES = (Scale.TENSOR, Scale.HEAD, Scale.BLOCK)
QUANTISED = Accepts(
    Quantised,
    "precision.quantise",
    to=_E4M3,
    scale=_SCALES,
    block=(64, 128),
    block_q=(None, 64, 128),
    values=(None, _E4M3),
    values_scale=(None, *_SCALES),
    **of("hadamard seed", ALL),
)
_NARROW = _FORWARD.but(
    softmax=_SOFTMAX.but(p_scale=tuple(2.0**n for n in range(-8, 9))),
    quantise=(None, QUANTISED),
    output=(FP16, BF16),
    split_size=(None,),
)
# Of a `TritonBackward`: tiles and their order are the kernel's own, and only products of FP32 can be in TF32.
_BACKWARD = Accepts(
    object,
    "tiling",
    fmt=BINARY,
    recompute=RECOMPUTE.but(delta=(DeltaForm.OUTPUT,), exponential=_BINARY),
    **of("forward tf32 kernel", ALL),
)


def refusal(settings: Any, mask: Mask, **tensors: Tensor) -> str | None:
    """Why the Hopper kernels cannot run a request; None if they can.

    `settings` is a `numdev.Triton`, or with the tensor `do` a `numdev.TritonBackward`; the tensors have their names.
    """
    q, v, backward = tensors["q"], tensors["v"], "do" in tensors
    head_dim, dims = q.shape[-1], tuple(QUERIES) if backward else (64, 128, 256)
    inputs = None if backward else settings.quantise
    narrow = not backward and (q.dtype == torch.float8_e4m3fn or inputs is not None)
    if q.dtype not in (torch.bfloat16, torch.float16) and not narrow:
        return f"it takes {'fp16 and bf16' if backward else 'fp16, bf16 and e4m3fn'}, not {settings.fmt.name}"
    if head_dim not in dims:
        return f"it takes head_dim {', '.join(map(str, dims[:-1]))} and {dims[-1]}, not {head_dim}"
    if v.shape[-1] != head_dim:
        return f"it has one head_dim for q, k and v, and v has {v.shape[-1]}, q {head_dim}"
    for name, x in tensors.items():
        if x.dtype != q.dtype:
            return f"{name} is {x.dtype} and q {q.dtype}"
    if not backward and (why := _tile_refusal(settings, mask, head_dim, narrow)):
        return why
    accepts = _BACKWARD if backward else _NARROW if narrow else _FORWARD
    limited = _NO_WINDOW if narrow else _MASK
    listed = accepts.refusal(settings) or limited.refusal(mask)
    if refused := listed or (None if inputs is None else _scales_refusal(inputs, keys_of_block(head_dim))):
        return str(refused)
    keys = tensors["k"].shape[2]
    if backward and head_dim == 256 and min(mask.lengths(len(q), keys)) < keys:
        return "at d = 256 it takes no key lengths"
    read = {} if inputs else {"q": q} if narrow else tensors  # k and v of 8 bits are laid out anew where they have to be
    unread = next((name for name, x in read.items() if not _is_aligned(x)), None)
    return unread and f"the copy engine needs {unread} and its rows aligned to {_ALIGNED} bytes, and a contiguous head_dim"


def _tile_refusal(settings: Any, mask: Mask, head_dim: int, narrow: bool) -> str | None:
    bc, br, size = keys_of_block(head_dim), settings.br or 128, settings.split_size
    null = "give tiling.split_size=null"
    reasons = {
        f"its Bc is {bc} at d = {head_dim}, not {settings.bc}": settings.bc not in (None, bc),
        f"its Br is 128, or 192 at d = 64, not {br} at {head_dim}": (head_dim, br) not in SHAPES,
        f"at d = 256 it has no registers to promote sums; give attention.promotion=0, not {settings.promotion}": (
            narrow and head_dim == 256 and settings.promotion
        ),
        f"in e4m3fn it has no splits of a fixed size; {null}": size and narrow,
        f"it has splits of a fixed size at d = 64 and 128, not 256; {null}": size and head_dim == 256,
        f"with splits of a fixed size it has no window; {null}, or problem.window=null": size and mask.window is not None,
        f"its splits are multiples of {bc} keys, not {size}": size and size % bc,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _scales_refusal(inputs: Quantised, bc: int) -> str | None:
    if inputs.shared_by(of_v=True) is None:
        return "v of a format of its own needs a scale; give precision.quantise.values_scale"
    if inputs.block % bc and Scale.BLOCK in (inputs.scale, inputs.values_scale):
        return f"a tile of {bc} keys has one scale; give precision.quantise.block=128, not {inputs.block}"
    return None


def _is_aligned(x: Tensor) -> bool:
    """Whether the copy engine (TMA) can read a tensor."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1][:-1]
    starts = all(s > 0 and s * x.element_size() % _ALIGNED == 0 for s in strides)
    return x.stride(-1) == 1 and not x.data_ptr() % _ALIGNED and starts


def heads_in_cache(tokens: int, head_dim: int) -> int:
    """How many pairs of tensors `[tokens, head_dim]` of 16 bits share half of the cache; at least one."""
    return max(1, int(_L2_BYTES / (4 * tokens * head_dim)))


def hidden_queries(queries: int, keys: int, mask: Mask) -> int:
    """How many of the first queries see no key, which no program of the backward kernel visits."""
    limits = Limits.of(mask, queries, keys)
    return max(0, -limits.shift) if limits.limited else 0


@dataclass(frozen=True)
class Work:
    """The problem and launch of the forward kernel that decide its list of tiles.

    Attributes:
        lengths: keys of each batch entry.
        split: blocks of a split of the keys; 0 for one split.
        parts: whether each split of a tile may have another program, and not one all of them in order.
    """

    heads: int
    group: int
    queries: int
    keys: int
    br: int
    limits: Limits
    lengths: tuple[int, ...]
    programs: int
    bc: int
    split: int = 0
    parts: bool = False

    def ranges(self, row: int, length: int) -> list[tuple[int, int]]:
        """The blocks of keys that the tile with first row `row` visits, in one range, or in one for each split.

        No range is empty: the keys of its only block may all be masked. Of `parts` all tiles have as many ranges.
        """
        limits, stop = self.limits, math.ceil(length / self.bc)
        if limits.limited:
            stop = min(stop, (row + self.br - 1 + limits.shift) // self.bc + 1)
        stop = max(stop, 1)
        if self.split:
            end = math.ceil(self.keys / self.bc) if self.parts else stop
            return [(first, max(min(first + self.split, stop), first + 1)) for first in range(0, end, self.split)]
        first = max(row + limits.shift - limits.span + 1, 0) // self.bc if limits.span else 0
        return [(min(first, stop - 1), stop)]

    def cost(self, ranges: list[tuple[int, int]]) -> float:
        """Of a tile that visits these, in blocks of keys."""
        return sum(stop - first + _TILE_COST for first, stop in ranges)


def schedule(work: Work, head_dim: int) -> Tensor:
    """Lists of tiles `[round, program, (row, batch entry, head, block behind the last, keys, first block)]`.

    Each tile is assigned to the program that becomes free first. Without a causal limit the tiles of a head follow one another,
    so that its K and V stay in the L2 cache; with one, the longest tiles of about as many heads as fit into that cache come
    first: of parts of one size, since the tiles of a small last part do not occupy all programs.
    """
    pairs = [(b, h) for b in range(len(work.lengths)) for h in range(work.heads)]
    rows = range(0, work.queries, work.br)
    if work.limits.limited:
        parts = max(1, round(len(pairs) / (work.group * heads_in_cache(work.keys, head_dim))))
        bounds = [len(pairs) * i // parts for i in range(parts + 1)]
        order = [(row, b, h) for i, j in pairwise(bounds) for row in reversed(rows) for b, h in pairs[i:j]]
    else:
        order = [(row, b, h) for b, h in pairs for row in rows]
    tiles = [(place, work.ranges(place[0], work.lengths[place[1]])) for place in order]
    if work.parts:
        tiles = [(place, [each]) for place, ranges in tiles for each in ranges]
    grid = min(work.programs, len(tiles))
    lists: list[list[tuple[int, ...]]] = [[] for _ in range(grid)]
    free = [(0.0, program) for program in range(grid)]
    for place, ranges in tiles:
        time, program = heapq.heappop(free)
        lists[program] += [(*place, stop, work.lengths[place[1]], first) for first, stop in ranges]
        heapq.heappush(free, (time + work.cost(ranges), program))
    rounds = max(map(len, lists)) + 2  # a program looks one tile ahead, also from the end of its list
    table = torch.zeros(rounds, grid, 6, dtype=torch.int32)
    for program, entries in enumerate(lists):
        table[: len(entries), program] = torch.tensor(entries, dtype=torch.int32)
    return table
