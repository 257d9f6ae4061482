"""Attention in Triton, forward and backward, with faults that a constant switches on; a CPU runs it in Triton's interpreter.

Products are of FP32 numbers that BF16 holds, since the interpreter multiplies the bits of BF16 as integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from numdev.attention.mask import Mask

Gradients = tuple[Tensor, Tensor, Tensor]


Fault = IntEnum(
    "Fault",
    "NONE SCORES_BF16 SUM_BF16 OUT_BF16 ALPHA_BF16 EXP_BF16 RESCALE_MISSED LIMIT LSE_BASE_2 PADDING_SUMMED "
    "DQ_BF16 DK_BF16 DELTA_BF16 DP_BF16 DK_UNSCALED DELTA_LEFT_OUT QUERIES_LOST",
    start=0,
)
"""What a kernel does wrongly."""
_SCORES_BF16, _SUM_BF16, _OUT_BF16, _ALPHA_BF16, _EXP_BF16, _RESCALE_MISSED, _LIMIT, _LSE_BASE_2, _PADDING_SUMMED = (
    tl.constexpr(int(Fault(number))) for number in range(1, 10)
)
_DQ_BF16, _DK_BF16, _DELTA_BF16, _DP_BF16, _DK_UNSCALED, _DELTA_LEFT_OUT, _QUERIES_LOST = (
    tl.constexpr(int(Fault(number))) for number in range(10, 17)
)
_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _bf16(x):
    """FP32 rounded to BF16, in FP32. On its bits, since the interpreter's own conversion truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return up.to(tl.float32, bitcast=True)


@triton.jit
def _seen(i, j, shift, length, nk, CAUSAL, WINDOW, FAULT):
    """Whether query i sees key j; a ragged tile that sums its padding does not look."""
    seen = (j < length)[None, :] if FAULT != _PADDING_SUMMED or length < nk else (j >= 0)[None, :]
    seen = seen & (i >= 0)[:, None]
    p = i[:, None] + shift
    if CAUSAL:
        seen = seen & (j[None, :] <= p + (1 if FAULT == _LIMIT else 0))
    if WINDOW > 0:
        seen = seen & (tl.abs(p - j[None, :]) < WINDOW)
    return seen


@triton.jit
def _forward(
    q_, k_, v_, out_, lse_, lengths_, scale, heads, group, nq, nk,
    D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """Rows `[BR, D]` of one head against tiles of BC keys; all tensors are contiguous `[batch, heads, tokens, D]`."""
    head = tl.program_id(1)
    kv = (head // heads) * (heads // group) + (head % heads) // group
    i, d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, D)
    length = tl.load(lengths_ + head // heads)
    rows = (head * nq + i)[:, None] * D + d[None, :]
    q = tl.load(q_ + rows, mask=(i < nq)[:, None], other=0.0).to(tl.float32)
    m = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    o = tl.zeros([BR, D], tl.float32)
    for start in range(0, nk, BC):
        j = start + tl.arange(0, BC)
        cells = (kv * nk + j)[:, None] * D + d[None, :]
        exists = (j < length)[:, None]
        k = tl.load(k_ + cells, mask=exists, other=0.0).to(tl.float32)
        v = tl.load(v_ + cells, mask=exists, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2E)
        if FAULT == _SCORES_BF16:
            s = _bf16(s)
        s = tl.where(_seen(i, j, nk - nq, length, nk, CAUSAL, WINDOW, FAULT), s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - shift[:, None])
        if FAULT == _EXP_BF16:
            p = _bf16(tl.exp2(_bf16(s - shift[:, None])))
        alpha = tl.exp2(m - shift)
        if FAULT == _ALPHA_BF16:
            alpha = _bf16(alpha)
        total = total * alpha + tl.sum(p, 1)
        if FAULT == _SUM_BF16:
            total = _bf16(total)
        if FAULT != _RESCALE_MISSED or start != BC:
            o = o * alpha[:, None]
        o += tl.dot(_bf16(p), v, input_precision="ieee")
        if FAULT == _OUT_BF16:
            o = _bf16(o)
        m = top
    o = o / tl.where(total == 0, 1.0, total)[:, None]
    lse = tl.where(total == 0, float("-inf"), m + tl.log2(total))
    if FAULT != _LSE_BASE_2:
        lse = lse / _LOG2E
    tl.store(out_ + rows, _bf16(o).to(out_.dtype.element_ty), mask=(i < nq)[:, None])
    tl.store(lse_ + head * nq + i, lse, mask=i < nq)


@triton.jit
def _backward(
    q_, k_, v_, do_, lse_, delta_, dq_, dk_, dv_, lengths_, scale, heads, group, nq, nk,
    D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FAULT: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Of each head of q, in FP32: dk and dv of a tile of keys from all tiles of queries if KEYS, else dq of a tile of queries."""
    head, d = tl.program_id(1), tl.arange(0, D)
    kv = (head // heads) * (heads // group) + (head % heads) // group
    length = tl.load(lengths_ + head // heads)
    dq, dk, dv = tl.zeros([BR, D], tl.float32), tl.zeros([BC, D], tl.float32), tl.zeros([BC, D], tl.float32)
    own, side, over = tl.program_id(0), BR if KEYS else BC, nq if KEYS else nk
    if KEYS and FAULT == _QUERIES_LOST:
        over = (nq - 1) // BR * BR
    for start in range(0, over, side):
        i = (start if KEYS else own * BR) + tl.arange(0, BR)
        j = (own * BC if KEYS else start) + tl.arange(0, BC)
        rows, cells = (head * nq + i)[:, None] * D + d[None, :], (kv * nk + j)[:, None] * D + d[None, :]
        q = tl.load(q_ + rows, mask=(i < nq)[:, None], other=0.0).to(tl.float32)
        do = tl.load(do_ + rows, mask=(i < nq)[:, None], other=0.0).to(tl.float32)
        k = tl.load(k_ + cells, mask=(j < length)[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ + cells, mask=(j < length)[:, None], other=0.0).to(tl.float32)
        lse = tl.load(lse_ + head * nq + i, mask=i < nq, other=float("-inf"))
        delta = tl.load(delta_ + head * nq + i, mask=i < nq, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if FAULT == _SCORES_BF16:
            s = _bf16(s)
        seen = _seen(i, j, nk - nq, length, nk, CAUSAL, WINDOW, FAULT) & (lse > float("-inf"))[:, None]
        p = tl.where(seen, tl.exp2((s - lse[:, None]) * _LOG2E), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        if FAULT == _DP_BF16:
            dp = _bf16(dp)
        if FAULT != _DELTA_LEFT_OUT:
            dp -= delta[:, None]
        ds = _bf16(p * dp)
        if KEYS:
            dv += tl.dot(tl.trans(_bf16(p)), do, input_precision="ieee")
            dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
            if FAULT == _DK_BF16:
                dk = _bf16(dk)
        else:
            dq += tl.dot(ds, k, input_precision="ieee")
            if FAULT == _DQ_BF16:
                dq = _bf16(dq)
    if KEYS:
        j = own * BC + tl.arange(0, BC)
        cells = (head * nk + j)[:, None] * D + d[None, :]
        tl.store(dk_ + cells, dk if FAULT == _DK_UNSCALED else dk * scale, mask=(j < nk)[:, None])
        tl.store(dv_ + cells, dv, mask=(j < nk)[:, None])
    else:
        i = own * BR + tl.arange(0, BR)
        tl.store(dq_ + (head * nq + i)[:, None] * D + d[None, :], dq * scale, mask=(i < nq)[:, None])


def _shared(q: Tensor, k: Tensor, mask: Mask, scale: float) -> tuple[Any, ...]:
    """The arguments of both passes after their tensors."""
    lengths = torch.tensor(mask.lengths(q.shape[0], k.shape[2]), dtype=torch.int32, device=q.device)
    return lengths, scale, q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2]


@dataclass(frozen=True)
class TritonForward:
    """The forward pass, of heads whose dimension is a power of two."""

    fault: Fault = Fault.NONE
    br: int = 32
    bc: int = 64

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        grid = triton.cdiv(q.shape[2], self.br), q.shape[0] * q.shape[1]
        constants = q.shape[3], self.br, self.bc, mask.causal, mask.window or 0, int(self.fault)
        _forward[grid](q, k, v, out, lse, *_shared(q, k, mask, scale), *constants)
        return out, lse


@dataclass(frozen=True)
class TritonBackward:
    """The backward pass: delta, then dk and dv, then dq."""

    fault: Fault = Fault.NONE
    br: int = 32
    bc: int = 64

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, *, mask: Mask, scale: float
    ) -> Gradients:
        q, k, v, do, lse = (x.contiguous() for x in (q, k, v, do, lse))
        delta = (out.float() * do.float()).sum(-1)
        delta = delta.bfloat16().float() if self.fault is Fault.DELTA_BF16 else delta
        many = (*q.shape[:2], *k.shape[2:])
        dq, dk, dv = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in (q.shape, many, many))
        shared = _shared(q, k, mask, scale)
        constants = q.shape[3], self.br, self.bc, mask.causal, mask.window or 0, int(self.fault)
        for keys, count in ((True, triton.cdiv(k.shape[2], self.bc)), (False, triton.cdiv(q.shape[2], self.br))):
            _backward[count, q.shape[0] * q.shape[1]](q, k, v, do, lse, delta, dq, dk, dv, *shared, *constants, keys)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
