"""Launching the Hopper backward kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from numdev.attention.kernel_launch import KernelLaunch
from numdev.attention.kernels import hopper_backward, hopper_backward_keys, hopper_backward_passes, hopper_backward_queries
from numdev.attention.kernels.arguments import View
from numdev.attention.kernels.backward_host import Found, Given
from numdev.attention.kernels.hopper_backward_launch import (
    FUSED,
    NAMES,
    ROWS,
    SPLIT,
    Design,
    KeysShape,
    choose,
    hidden_queries,
    queries_shape,
)
from numdev.attention.kernels.hopper_backward_order import TILE, group_of
from numdev.attention.kernels.hopper_backward_parts import Code
from numdev.attention.kernels.hopper_tensors import DTYPES, descriptor, heads_in_cache, row_descriptor
from numdev.attention.kernels.runtime import multiprocessors
from numdev.attention.kernels.tables import Tables
from numdev.attention.mask import Mask

REGISTERS = 240  # of a thread of two computing warp groups


def gradients(given: Given, mask: Mask, scale: float, design: Design | None = None, spins: int = 0) -> tuple[Found, KernelLaunch]:
    """Gradients in the format of q, delta in FP32, and what ran; for requests that `hopper_backward_launch.refusal` accepts.

    With `spins`, the one-kernel design gives up after that many reads of a counter instead of waiting indefinitely.

    Raises:
        Unsupported: for the one-kernel design, where its programs could wait for programs that are not running.
    """
    q, k, v, do, out, lse = given
    queries, keys = q.shape[2], k.shape[2]
    hidden = hidden_queries(queries, keys, mask)
    chosen = choose(queries - hidden, mask, multiprocessors(q.device), design)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    seeing = Given(q[:, :, hidden:], k, v, do[:, :, hidden:], out[:, :, hidden:], lse[:, :, hidden:])
    call = _Call(seeing, dq[:, :, hidden:], dk, dv, mask, scale, spins)
    with torch.cuda.device(q.device):
        call.preprocess()
        ran = call.fused() if chosen is Design.FUSED else call.split()
    delta = call.delta
    if hidden:
        dq[:, :, :hidden].zero_()
        delta = torch.nn.functional.pad(delta, (hidden, 0))
    return Found(dq, dk, dv, delta), ran


_LENGTHS = Tables(64)


@dataclass
class _Call:
    """The launches of one request. Every query sees a key, except in batch entries without keys."""

    given: Given
    dq: Tensor
    dk: Tensor
    dv: Tensor
    mask: Mask
    scale: float
    spins: int

    def __post_init__(self) -> None:
        self.batch, self.heads, self.queries, self.dim = self.given.q.shape
        self.kv_heads, self.keys = self.given.k.shape[1:3]
        self.group = self.heads // self.kv_heads
        self.units = math.ceil(self.queries / TILE)
        self.rows = self.units * TILE
        self.tiles = math.ceil(self.keys / TILE)
        self.shift = self.keys - self.queries
        device, lengths = self.given.q.device, self.mask.lengths(self.batch, self.keys)
        self.masked = any(length % TILE for length in lengths) or min(lengths) < self.keys
        self.padded = any(length % TILE and length < self.keys for length in lengths)
        self.lengths = _LENGTHS.get(lengths, device, lambda: torch.tensor(lengths, dtype=torch.int32))
        # A tile of 192 rows may read up to 128 rows beyond those of the last head; their results go nowhere.
        rows = self.batch * self.heads * self.rows
        self.statistics = torch.empty(2, rows + TILE, dtype=torch.float32, device=device)
        self.turns = torch.empty(rows // ROWS, dtype=torch.int32, device=device)

    @property
    def delta(self) -> Tensor:
        """`[batch, heads, queries]`."""
        return self._of_rows(1)[..., : self.queries]

    def _of_rows(self, which: int) -> Tensor:
        """LSE in units of log 2, or delta: `[batch, heads, rows]`."""
        return self.statistics[which, :-TILE].view(self.batch, self.heads, self.rows)

    def preprocess(self) -> None:
        """delta, LSE in units of log 2, and counters."""
        views = (_view(self.given.out), _view(self.given.do), _view(self.given.lse[..., None]))
        lse2, delta = self.statistics
        sizes = (self.queries, self.rows, self.heads)
        hopper_backward_passes.preprocess[(self.turns.numel(),)](
            *views, lse2, delta, self.turns, *sizes, self.dim, ROWS, ROWS, num_warps=4
        )

    def fused(self) -> KernelLaunch:
        """One kernel, and the conversion of dQ. Each may start before its predecessor ends, and waits for what it reads."""
        shape = FUSED[self.dim]
        total = torch.empty(self.batch, self.heads, self.rows, self.dim, dtype=torch.float32, device=self.given.q.device)
        hopper_backward.gradients[self._keys_grid](
            *self._keys_tensors(shape),
            descriptor(total, 64, 64),
            self.turns,
            *self._keys_numbers(least=_in_step(self.queries * self.group, self.dim)),
            self._keys_code(shape),
            num_warps=4,
            launch_pdl=True,
        )
        sizes = (self.queries, self.rows, self.heads, self.shift)
        constants = (self.dim, ROWS, shape.br, self.mask.causal)
        hopper_backward_passes.convert[(self.turns.numel(),)](
            total, _view(self.dq), self.lengths, self.turns, self.scale, *sizes, *constants, num_warps=4, launch_pdl=True
        )
        return KernelLaunch(NAMES[Design.FUSED], shape.br, TILE, stages=shape.stages)

    def split(self) -> KernelLaunch:
        """A kernel for dK and dV, and one for dQ."""
        shape = SPLIT[self.dim]
        hopper_backward_keys.gradients_of_keys[self._keys_grid](
            *self._keys_tensors(shape), *self._keys_numbers(), self._keys_code(shape), num_warps=4
        )
        bc = self._of_queries()
        return KernelLaunch(NAMES[Design.SPLIT], shape.br, bc, stages=shape.stages)

    @property
    def _keys_grid(self) -> tuple[int]:
        return (self.tiles * self.kv_heads * self.batch,)

    def _keys_tensors(self, shape: KeysShape) -> tuple[TensorDescriptor, ...]:
        q, k, v, do, *_ = self.given
        br = shape.br
        tiles = tuple(descriptor(t, rows, self.dim) for t, rows in ((q, br), (k, ROWS), (v, ROWS), (do, br)))
        outputs = tuple(descriptor(t, ROWS, self.dim) for t in (self.dk, self.dv))
        return (*tiles, row_descriptor(self._of_rows(0), br), row_descriptor(self._of_rows(1), br), *outputs)

    def _keys_numbers(self, least: int = 1) -> tuple[Any, ...]:
        together = self._together(self.batch * self.kv_heads, self.queries * self.group, least)
        sizes = (self.tiles, self.units, self.keys, self.shift, self.heads, self.group, together, group_of(self.units))
        return self.lengths, self.scale * math.log2(math.e), self.scale, *sizes

    def _keys_code(self, shape: KeysShape) -> Code:
        tile = (shape.br, self.dim, shape.stages, DTYPES[self.given.q.dtype])
        keys = (self.mask.causal, self.masked, self.padded, self.group > 1)
        return Code(*tile, *keys, shape.skewed, shape.pingpong, REGISTERS, self.spins)

    def _of_queries(self) -> int:
        """The kernel for dQ, and how many keys a block of it has."""
        shape, (q, k, v, do, *_) = queries_shape(self.dim, self.queries), self.given
        tiles = math.ceil(self.queries / (ROWS * shape.groups))
        together = self._together(self.batch * self.heads, self.keys)
        sizes = (tiles, self.rows, self.keys, self.shift, self.heads, self.group, together)
        sides = ((q, ROWS), (k, shape.bc), (v, shape.bc), (do, ROWS), (self.dq, ROWS))
        tile = (shape.bc, self.dim, shape.groups, shape.stages, DTYPES[q.dtype])
        code = hopper_backward_queries.Code(*tile, self.mask.causal, self.masked, self.padded, shape.registers)
        lse2, delta = self.statistics
        hopper_backward_queries.gradients_of_queries[(tiles * self.heads * self.batch,)](
            *(descriptor(t, rows, self.dim) for t, rows in sides),
            lse2,
            delta,
            self.lengths,
            self.scale * math.log2(math.e),
            self.scale,
            *sizes,
            code,
            num_warps=4,
        )
        return shape.bc

    def _together(self, heads: int, tokens: int, least: int = 1) -> int:
        """How many heads start together: under a causal limit as many as fit into the cache, or `least`; a divisor of all heads.

        Without a causal limit it is one: the programs of a group wait for each other, and must not be displaced by other heads.
        """
        if not self.mask.causal:
            return 1
        fit = min(heads, max(least, heads_in_cache(tokens, self.dim)))
        return next(n for n in range(fit, 0, -1) if heads % n == 0)


def _in_step(tokens: int, head_dim: int) -> int:
    """The least number of heads that the one kernel starts together, under a causal limit.

    All programs of a head begin at its last unit and wait for their turns there: with more heads at a time, fewer programs wait.
    Since the programs advance in step, the cache holds only a part of each head. On an H200 the fastest were 4 heads of 16,384
    tokens and 8 heads of 4,096 at d = 128; 8 and 16 heads at d = 64.
    """
    return int(65536 / (head_dim * math.sqrt(tokens)))


def _view(tensor: Tensor) -> View:
    return View(tensor, *tensor.stride())
