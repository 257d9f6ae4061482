"""Launching the Hopper backward kernels: what they can run, in which of two designs, and the arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from numdev.attention.kernels import hopper_backward, hopper_backward_keys, hopper_backward_passes, hopper_backward_queries
from numdev.attention.kernels.arguments import View
from numdev.attention.kernels.hopper_backward_order import TILE, group_of
from numdev.attention.kernels.hopper_backward_parts import Code
from numdev.attention.kernels.runtime import multiprocessors
from numdev.attention.kernels.tables import Tables
from numdev.attention.mask import Mask
from numdev.attention.ran import Ran
from numdev.errors import Unsupported

_ROWS = 64  # of one warp group
_L2_BYTES = 24e6  # half of the second-level cache of an H100: what the heads that are worked on together may read
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_PASS_ROWS = 64  # of a program of the passes before and after
_LONG = 4096  # queries: from here on, three warp groups make dQ faster than two at d = 64


class Design(Enum):
    """How the additions to dQ are kept in one order."""

    SPLIT = "split"  # two kernels, and none adds to global memory
    FUSED = "fused"  # one kernel, whose programs take turns


class Gradients(NamedTuple):
    """Of q, k and v in their formats, `delta [batch, heads, queries]` in FP32, and what ran."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor
    ran: Ran


@dataclass(frozen=True)
class KeysShape:
    """A kernel that owns keys: queries of a tile, buffers for Q and for dO, skewed loop, turns."""

    br: int
    stages: int
    skewed: bool = False
    pingpong: bool = False


@dataclass(frozen=True)
class QueriesShape:
    """The kernel that owns queries: keys of a block, computing warp groups, buffers for K and for V, registers of a thread."""

    bc: int
    groups: int
    stages: int
    registers: int


# By head_dim. Each was the fastest that does not move registers to memory, of those tried on an H200.
FUSED = {64: KeysShape(128, 2), 128: KeysShape(64, 2)}
SPLIT = {64: KeysShape(64, 3, skewed=True), 128: KeysShape(64, 2, pingpong=True)}
QUERIES = {64: QueriesShape(128, 2, 2, 240), 128: QueriesShape(128, 2, 2, 240)}
LONG_QUERIES = {64: QueriesShape(64, 3, 3, 160), 128: QUERIES[128]}


def refusal(q: Tensor, k: Tensor, v: Tensor, do: Tensor, out: Tensor, mask: Mask) -> str | None:
    """Why these kernels cannot run a request; None if they can."""
    head_dim = q.shape[-1]
    checks = (
        (q.dtype not in _DTYPES, f"it takes fp16 and bf16, not {q.dtype}"),
        (head_dim not in FUSED, f"it takes head_dim 64 and 128, not {head_dim}"),
        (v.shape[-1] != head_dim, f"it has one head_dim for q, k and v, and v has {v.shape[-1]}, q {head_dim}"),
        (mask.window is not None, "it has no sliding window"),
    )
    for refused, reason in checks:
        if refused:
            return reason
    for name, tensor in (("q", q), ("k", k), ("v", v), ("do", do)):
        if tensor.dtype != q.dtype:
            return f"{name} is {tensor.dtype} and q {q.dtype}"
        if not _loads(tensor):
            return f"the copy engine needs 16-byte alignment of {name}, of its rows too, and a contiguous head_dim"
    return None


def _loads(tensor: Tensor) -> bool:
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    inner = tensor.stride(-1) == 1
    return inner and tensor.data_ptr() % 16 == 0 and all(s > 0 and s * tensor.element_size() % 16 == 0 for s in strides[:-1])


def waiting(queries: int, mask: Mask) -> int:
    """Programs of the one-kernel design that may wait for each other, and so must all be running."""
    return 1 if mask.causal else group_of(math.ceil(queries / TILE))


def choose(queries: int, mask: Mask, processors: int, design: Design | None = None) -> Design:
    """The design of a request: the one kernel, unless more programs wait for each other than the device runs at once.

    Raises:
        Unsupported: if the one kernel is asked for where its turns could not be awaited.
    """
    needed = waiting(queries, mask)
    if needed <= processors:
        return design or Design.FUSED
    if design is Design.FUSED:
        why = f"{needed} programs wait for each other and the device runs {processors} at once; ask for the split design"
        raise Unsupported("design", why)
    return Design.SPLIT


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scale: float,
    design: Design | None = None,
    spins: int = 0,
) -> Gradients:
    """dQ, dK, dV and delta of `out = softmax(scale Q K^T) V`, whose LSE (natural logarithm) the forward pass has saved.

    Shapes are `[batch, heads, tokens, head_dim]`; k and v may have fewer heads, each for a group of query heads. With `spins`, the one
    kernel gives up after as many looks at a counter instead of waiting for ever.

    Raises:
        Unsupported: for what the kernels, or the design that was asked for, cannot run.
    """
    reason = refusal(q, k, v, do, out, mask)
    if reason:
        raise Unsupported("attention", reason)
    (batch, _, queries, _), keys = q.shape, k.shape[2]
    hidden = max(0, queries - keys) if mask.causal else 0  # the first queries, which see no key
    chosen = choose(queries - hidden, mask, multiprocessors(q.device), design)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    seeing = tuple(t[:, :, hidden:] for t in (q, do, out, lse, dq))
    call = _Call(seeing[0], k, v, *seeing[1:], dk, dv, mask, scale, spins)
    with torch.cuda.device(q.device):
        call.preprocess()
        ran = call.fused() if chosen is Design.FUSED else call.split()
    delta = call.delta()
    if hidden:
        dq[:, :, :hidden].zero_()
        delta = torch.nn.functional.pad(delta, (hidden, 0))
    return Gradients(dq, dk, dv, delta, ran)


_TABLES = Tables(64)


@dataclass
class _Call:
    """The launches of one request, whose queries all see a key but in batch entries without any."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    mask: Mask
    scale: float
    spins: int

    def __post_init__(self) -> None:
        self.batch, self.heads, self.queries, self.dim = self.q.shape
        self.kv_heads, self.keys = self.k.shape[1:3]
        self.units = math.ceil(self.queries / TILE)
        self.rows = self.units * TILE
        self.shift = self.keys - self.queries
        lengths = self.mask.lengths(self.batch, self.keys)
        self.masked = any(length % TILE for length in lengths) or min(lengths) < self.keys
        self.padded = any(length % TILE and length < self.keys for length in lengths)
        key = ("lengths", lengths)
        self.lengths = _TABLES.get(key, self.q.device, lambda: torch.tensor(lengths, dtype=torch.int32))
        # A tile of 192 rows may read up to 64 rows beyond those of the last head; their results go nowhere.
        rows = self.batch * self.heads * self.rows
        self.statistics = torch.empty(2, rows + _ROWS, dtype=torch.float32, device=self.q.device)
        self.turns = torch.empty(rows // _PASS_ROWS, dtype=torch.int32, device=self.q.device)

    def preprocess(self) -> None:
        """delta, LSE in units of log 2, and counters."""
        lse2, delta = self.statistics
        views = (_view(self.out), _view(self.do), _view(self.lse[..., None]))
        hopper_backward_passes.preprocess[(self.turns.numel(),)](
            *views, lse2, delta, self.turns, self.queries, self.rows, self.heads, self.dim, _PASS_ROWS, _PASS_ROWS, num_warps=4
        )

    def delta(self) -> Tensor:
        """`[batch, heads, queries]`."""
        return self._statistic(1)[..., : self.queries]

    def _statistic(self, which: int) -> Tensor:
        rows = self.batch * self.heads * self.rows
        return self.statistics[which, :rows].view(self.batch, self.heads, self.rows)

    def fused(self) -> Ran:
        """One kernel, and the conversion of dQ."""
        shape = FUSED[self.dim]
        total = torch.empty(self.batch, self.heads, self.rows, self.dim, dtype=torch.float32, device=self.q.device)
        arguments = (*self._keys_descriptors(shape), _descriptor(total, 64, 64), self.turns, *self._keys_arguments())
        # A kernel with launch_pdl may start before the one before it ends, and waits for what it reads.
        hopper_backward.gradients[(self._keys_grid(),)](*arguments, self._keys_code(shape), num_warps=4, launch_pdl=True)
        hopper_backward_passes.convert[(self.turns.numel(),)](
            total,
            _view(self.dq),
            self.lengths,
            self.turns,
            self.scale,
            self.queries,
            self.rows,
            self.heads,
            self.shift,
            self.dim,
            _PASS_ROWS,
            shape.br,
            self.mask.causal,
            num_warps=4,
            launch_pdl=True,
        )
        return Ran("numdev hopper backward, one kernel", shape.br, TILE, stages=shape.stages)

    def split(self) -> Ran:
        """A kernel for dK and dV, and one for dQ."""
        shape = SPLIT[self.dim]
        hopper_backward_keys.gradients_of_keys[(self._keys_grid(),)](
            *self._keys_descriptors(shape), *self._keys_arguments(), self._keys_code(shape), num_warps=4
        )
        self._queries(LONG_QUERIES[self.dim] if self.queries >= _LONG else QUERIES[self.dim])
        return Ran("numdev hopper backward, two kernels", shape.br, TILE, stages=shape.stages)

    def _keys_grid(self) -> int:
        return math.ceil(self.keys / TILE) * self.kv_heads * self.batch

    def _keys_descriptors(self, shape: KeysShape) -> tuple[TensorDescriptor, ...]:
        br = shape.br
        tiles = ((self.q, br), (self.k, _ROWS), (self.v, _ROWS), (self.do, br))
        outputs = ((self.dk, _ROWS), (self.dv, _ROWS))
        rows = (_row_descriptor(self._statistic(0), br), _row_descriptor(self._statistic(1), br))
        inner = self.dim
        return (*(_descriptor(t, n, inner) for t, n in tiles), *rows, *(_descriptor(t, n, inner) for t, n in outputs))

    def _keys_arguments(self) -> tuple[Any, ...]:
        tiles = math.ceil(self.keys / TILE)
        group = self.heads // self.kv_heads
        together = _together(self.batch * self.kv_heads, self.queries * group, self.dim, self.mask.causal)
        walkers = group_of(self.units)
        sizes = (tiles, self.units, self.keys, self.shift, self.heads, group, together, walkers)
        return self.lengths, self.scale * math.log2(math.e), self.scale, *sizes

    def _keys_code(self, shape: KeysShape) -> Code:
        return Code(
            shape.br,
            self.dim,
            shape.stages,
            _DTYPES[self.q.dtype],
            self.mask.causal,
            self.masked,
            self.padded,
            self.heads != self.kv_heads,
            shape.skewed,
            shape.pingpong,
            240,
            self.spins,
        )

    def _queries(self, shape: QueriesShape) -> None:
        tiles = math.ceil(self.queries / (_ROWS * shape.groups))
        group = self.heads // self.kv_heads
        together = _together(self.batch * self.heads, self.keys, self.dim, self.mask.causal)
        sizes = (tiles, self.rows, self.keys, self.shift, self.heads, group, together)
        sides = ((self.q, _ROWS), (self.k, shape.bc), (self.v, shape.bc), (self.do, _ROWS), (self.dq, _ROWS))
        causal, dtype = self.mask.causal, _DTYPES[self.q.dtype]
        code = hopper_backward_queries.Code(
            shape.bc, self.dim, shape.groups, shape.stages, dtype, causal, self.masked, self.padded, shape.registers
        )
        lse2, delta = self.statistics
        hopper_backward_queries.gradients_of_queries[(tiles * self.heads * self.batch,)](
            *(_descriptor(t, rows, self.dim) for t, rows in sides),
            lse2,
            delta,
            self.lengths,
            self.scale * math.log2(math.e),
            self.scale,
            *sizes,
            code,
            num_warps=4,
        )


def _together(heads: int, tokens: int, head_dim: int, causal: bool) -> int:
    """How many heads start side by side: under a causal limit as many as share half of the second-level cache, and divide all."""
    if not causal:
        return 1
    fit = min(heads, max(1, int(_L2_BYTES / (4 * tokens * head_dim))))
    return next(n for n in range(fit, 0, -1) if heads % n == 0)


def _view(tensor: Tensor) -> View:
    return View(tensor, *tensor.stride())


def _descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    block = [1, 1, rows, columns]
    # A dimension of size 1 may have any stride in torch; the copy engine wants a multiple of 16 bytes all the same.
    strides = [s if n > 1 else tensor.shape[-1] for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block, _layout(rows, columns, tensor.dtype))


@lru_cache(maxsize=32)
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = _DTYPES.get(dtype, gl.float32)
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], kind)


def _row_descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows], layout)
