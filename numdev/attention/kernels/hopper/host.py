"""Launching the Hopper kernels of both passes."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from numdev.attention.kernels.hopper import backward
from numdev.attention.kernels.hopper import forward as forward_kernel
from numdev.attention.kernels.hopper.launch import (
    BACKWARD,
    QUERIES,
    REGISTERS,
    ROWS,
    SHAPES,
    STAGES,
    Work,
    heads_in_cache,
    hidden_queries,
    is_unaligned,
    pinned_br,
    schedule,
)
from numdev.attention.kernels.hopper.order import TILE, group_of
from numdev.attention.kernels.launch import TABLES, device_of
from numdev.attention.kernels.portable import Gradients, Inputs, view
from numdev.attention.mask import Mask
from numdev.attention.tiling import KernelLaunch

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def _descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a tensor `[batch, heads, tokens, dim]` to the copy engine, in blocks of `rows` tokens and `columns` of dim."""
    block = [1, 1, rows, columns]
    # A dimension of size 1 may have any stride in torch; the copy engine still requires a multiple of 16 bytes.
    strides = [s if n > 1 else tensor.shape[-1] for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block, _layout(rows, columns, tensor.dtype))


@lru_cache(maxsize=32)
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _DTYPES[dtype])


def _row_descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Describe one number per row, `[batch, heads, queries]` in FP32, in blocks of `rows`."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows], layout)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, br: int | None) -> tuple[Tensor, Tensor, KernelLaunch]:
    """`out` in the dtype of q, LSE in FP32, and what ran, for requests that `launch.refusal` accepts."""
    (batch, heads, queries, head_dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    br = br or pinned_br(head_dim, mask, queries, keys)
    shape = SHAPES[head_dim, br]
    bc, group = shape.bc, heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    lengths = mask.lengths(batch, keys)
    work = Work(heads, group, queries, keys, br, mask.causal, lengths, device_of(q.device).multiprocessors, bc)
    tiles = TABLES.of((work, head_dim), q.device, lambda: schedule(work, head_dim))  # [rounds, programs, 5]
    ragged = [length for length in lengths if length % bc or not length]
    masked = mask.causal or bool(ragged)
    padded = any(length < keys for length in ragged)
    unaligned = mask.causal and is_unaligned(queries, keys)
    sizes = (bc, head_dim, shape.groups, shape.stages, _DTYPES[q.dtype])
    code = forward_kernel.Code(*sizes, mask.causal, unaligned, masked, padded, shape.registers)
    columns = head_dim // 2 if head_dim > 128 else head_dim  # `Setting.parts` of O
    sides = ((q, ROWS, head_dim), (k, bc, head_dim), (v, bc, head_dim), (out, ROWS, columns))
    with torch.cuda.device(q.device):
        forward_kernel.attention[(tiles.shape[1],)](
            *(_descriptor(*side) for side in sides),
            lse, tiles, scale * math.log2(math.e), heads, group, queries, keys - queries, code,
            num_warps=4,
        )  # fmt: skip
    return out, lse, KernelLaunch("numdev hopper", br, bc, stages=shape.stages)


def gradients(inputs: Inputs, mask: Mask, scale: float) -> tuple[Gradients, KernelLaunch]:
    """dQ, dK and dV in the dtype of q, delta in FP32, and what ran, for requests that `launch.refusal` accepts."""
    q, k, v, do, out, lse = inputs
    hidden = hidden_queries(q.shape[2], k.shape[2], mask)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    seeing = Inputs(q[:, :, hidden:], k, v, do[:, :, hidden:], out[:, :, hidden:], lse[:, :, hidden:])
    with torch.cuda.device(q.device):
        delta = _gradients(seeing, dq[:, :, hidden:], dk, dv, mask, scale)
    if hidden:
        dq[:, :, :hidden].zero_()
        delta = torch.nn.functional.pad(delta, (hidden, 0))
    return (dq, dk, dv, delta), KernelLaunch(BACKWARD, QUERIES[q.shape[-1]], TILE, stages=STAGES)


def _gradients(inputs: Inputs, dq: Tensor, dk: Tensor, dv: Tensor, mask: Mask, scale: float) -> Tensor:
    """Write the gradients and return delta. Every query sees a key, except in batch entries without keys.

    The second and the third kernel may start before their predecessor ends, and wait for what they read.
    """
    q, k, v, do, out, lse = inputs
    (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    group, shift, br, device = heads // kv_heads, keys - queries, QUERIES[dim], q.device
    tiles, units = math.ceil(keys / TILE), math.ceil(queries / TILE)
    rows = units * TILE
    lengths = mask.lengths(batch, keys)
    masked = any(length % TILE for length in lengths) or min(lengths) < keys
    padded = any(length % TILE and length < keys for length in lengths)
    on_device = TABLES.of(lengths, device, lambda: torch.tensor(lengths, dtype=torch.int32))
    lse2, delta = torch.empty(2, batch, heads, rows, dtype=torch.float32, device=device)
    turns = torch.empty(batch * heads * rows // ROWS, dtype=torch.int32, device=device)
    total = torch.empty(batch, heads, rows, dim, dtype=torch.float32, device=device)
    backward.preprocess[(turns.numel(),)](
        view(out), view(do), view(lse[..., None]), lse2, delta, turns, queries, rows, heads, dim, ROWS, ROWS, num_warps=4
    )
    blocks = ((q, br, dim), (k, ROWS, dim), (v, ROWS, dim), (do, br, dim))
    code = backward.Code(br, dim, STAGES, _DTYPES[q.dtype], mask.causal, masked, padded, group > 1, REGISTERS)
    together = _together(batch * kv_heads, queries * group, dim) if mask.causal else 1
    backward.gradients[(tiles * kv_heads * batch,)](
        *(_descriptor(*block) for block in blocks),
        _row_descriptor(lse2, br),
        _row_descriptor(delta, br),
        *(_descriptor(*block) for block in ((dk, ROWS, dim), (dv, ROWS, dim), (total, 64, 64))),
        turns, on_device, scale * math.log2(math.e), scale,
        tiles, units, keys, shift, heads, group, together, group_of(units),
        code,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    backward.convert[(turns.numel(),)](
        total, view(dq), on_device, turns, scale, queries, rows, heads, shift, dim, ROWS, br, mask.causal,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return delta[..., :queries]


def _together(heads: int, tokens: int, head_dim: int) -> int:
    """How many heads start together under a causal limit: a divisor of all heads.

    All programs of a head begin at its last unit and wait for their turns there: with more heads at a time, fewer programs wait.
    Since the programs advance in step, the cache holds only a part of each head. On an H200 the fastest were 4 heads of 16,384
    tokens and 8 heads of 4,096 at d = 128; 8 and 16 heads at d = 64. Without a causal limit one head starts at a time, since the
    programs of a group wait for each other, and must not be displaced by other heads.
    """
    in_step = int(65536 / (head_dim * math.sqrt(tokens)))
    most = min(heads, max(in_step, heads_in_cache(tokens, head_dim)))
    return next(n for n in range(most, 0, -1) if heads % n == 0)
