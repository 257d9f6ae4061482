"""Backward passes as their authors write them, right ones and ones with a fault that such kernels have shipped with.

The loop is that of FlashAttention-2: tiles of keys outside, of queries inside; P again from the LSE; delta from dO and O. What is
in `forward_kernels` serves here too; nothing is shared with numdev's emulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from numdev.attention.mask import Mask
from tests.certification.forward_kernels import (
    LOG2E,
    Step,
    bf16,
    e4m3,
    e5m2,
    exp_of_degree,
    fp16,
    groups,
    of,
    of_lengths,
    per_head,
    same,
    scaled,
    spans,
    truncated,
    visible,
    without_padding,
)

Gradients = tuple[Tensor, Tensor, Tensor]


def grouped(x: Tensor, kv_heads: int) -> Tensor:
    """The sum over the heads of q that read one head of k and v."""
    return x.unflatten(1, (kv_heads, -1)).sum(2)


@dataclass(frozen=True)
class FlashGradients:
    """dq, dk and dv in tiles. Each step is a function that a fault replaces.

    Attributes:
        br, bc, base2: tiles of queries and of keys; 2^x in place of e^x.
        reverse: the order of both tiles.
        scale_first: dS is scaled before its rounding, not dq and dk at the end.
        load: q, k, v, dO as they are read.
        scale, product: the scale of S; `Q K^T`.
        lse, delta: as they are read; delta of O and dO.
        exp, p: e^x or 2^x; P as it enters `P^T dO`.
        dp, difference, ds: dO V^T; of dP and delta; dS as it enters the products.
        dq_part, dk_part, dv_part, dq, dk, dv: the products of one tile, and their sums so far.
        end: of dq, dk and dv: the gradients as they are returned, before the sum over a group.
        group: that sum, of the gradients and the number of heads of k.
        heads, seen: which k and v, and which keys, as in the forward pass.
        rows, columns: tiles of queries and of keys, of their number and the side of a tile.
    """

    br: int = 48
    bc: int = 80
    base2: bool = False
    reverse: bool = False
    scale_first: bool = False
    load: Step = lambda q, k, v, do: (q, k, v, do)
    scale: Step = same
    product: Step = same
    lse: Step = same
    delta: Step = lambda out, do: (out * do).sum(-1, keepdim=True)
    exp: Step | None = None
    p: Step = bf16
    dp: Step = same
    difference: Step = lambda dp, delta: dp - delta
    ds: Step = bf16
    dq_part: Step = same
    dk_part: Step = same
    dv_part: Step = same
    dq: Step = same
    dk: Step = same
    dv: Step = same
    end: Step = lambda dq, dk, dv, scale: (dq * scale, dk * scale, dv)
    group: Step = grouped
    out: Step = lambda x: x.bfloat16()
    heads: Step = groups
    seen: Step = visible
    rows: Step = spans
    columns: Step = spans

    def but(self, **changed: Any) -> FlashGradients:
        return replace(self, **changed)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, *, mask: Mask, scale: float
    ) -> Gradients:
        kv_heads, heads, keys = k.shape[1], self.heads(q.shape[1], k.shape[1]), k.shape[2]
        k, v = (per_head(without_padding(x, mask), heads) for x in (k, v))
        q, k, v, do = self.load(q.float(), k, v, do.float())
        seen = self.seen(torch.arange(q.shape[2])[:, None], torch.arange(keys)[None], keys - q.shape[2], mask)
        seen = seen.expand(q.shape[0], 1, -1, -1)
        delta, lse = self.delta(out.float(), do), self.lse(lse.float())[..., None]
        exp, base = self.exp or (torch.exp2 if self.base2 else torch.exp), LOG2E if self.base2 else 1.0
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        order = -1 if self.reverse else 1
        for a, b in self.columns(keys, self.bc)[::order]:
            for c, d in self.rows(q.shape[2], self.br)[::order]:
                here, kj, vj, qi, doi = seen[..., c:d, a:b], k[:, :, a:b], v[:, :, a:b], q[:, :, c:d], do[:, :, c:d]
                s = self.product(qi @ kj.mT) * self.scale(scale) * base
                p = exp((s - lse[:, :, c:d] * base).masked_fill(~here, -math.inf))
                dv[:, :, a:b] = self.dv(dv[:, :, a:b] + self.dv_part(self.p(p).mT @ doi))
                ds = p * self.difference(self.dp(doi @ vj.mT), delta[:, :, c:d])
                ds = self.ds(ds * scale) / scale if self.scale_first else self.ds(ds)
                dk[:, :, a:b] = self.dk(dk[:, :, a:b] + self.dk_part(ds.mT @ qi))
                dq[:, :, c:d] = self.dq(dq[:, :, c:d] + self.dq_part(ds @ kj))
        dq, dk, dv = self.end(dq, dk, dv, scale)
        return self.out(dq), self.out(self.group(dk, kv_heads)), self.out(self.group(dv, kv_heads))


def autograd(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, *, mask: Mask, scale: float) -> Gradients:
    """Gradients of softmax by whole rows in FP32, by autograd; the inputs and the results are rounded."""
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    kf, vf = (per_head(without_padding(x, mask), groups(q.shape[1], k.shape[1])) for x in leaves[1:])
    seen = visible(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None], k.shape[2] - q.shape[2], mask)
    s = (leaves[0] @ kf.mT * scale).masked_fill(~seen, -math.inf)
    p = torch.where(seen.any(-1, keepdim=True), torch.softmax(s, -1), 0.0)
    p = torch.where(seen, p, 0.0)
    gradients = torch.autograd.grad(p @ vf, leaves, do.float())
    return tuple(x.nan_to_num(0.0).to(q.dtype) for x in gradients)  # type: ignore[return-value]


def scaled_in_bf16(name: str, *inputs: Tensor, mask: Mask, scale: float) -> Gradients:
    """K, or Q, is stored times the scale and log2 e in BF16, and read so for its gradient's partner too (Triton's tutorial)."""
    load, factor = of(name, lambda x: bf16(x * factor) / factor), scale * LOG2E
    return FlashGradients(80, 112, base2=True, load=load)(*inputs, mask=mask, scale=scale)


def rounded_groups(x: Tensor, kv_heads: int) -> Tensor:
    """The gradient of each head of q is stored in BF16 before the sum over its group (FlashAttention-2)."""
    return grouped(bf16(x), kv_heads)


def noisy(x: Tensor) -> Tensor:
    return x * (1 + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5)))


def biased(dq: Tensor, dk: Tensor, dv: Tensor, scale: float) -> Gradients:
    dv = dv.clone()
    dv[:, -1] += 0.02 * dv[:, -1].abs().mean()
    return dq * scale, dk * scale, dv


def rotated(dq: Tensor, dk: Tensor, dv: Tensor, scale: float) -> Gradients:
    """dk is rotated back by the angle of the token beside it, in its slowest pair of dimensions."""
    dk, angle = dk.clone(), torch.tensor(0.05)
    x, y = dk[..., 0].clone(), dk[..., 1].clone()
    dk[..., 0], dk[..., 1] = x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()
    return dq * scale, dk * scale, dv


def stale_delta(out: Tensor, do: Tensor) -> Tensor:
    """The last rows read the delta of the row before."""
    delta = (out * do).sum(-1, keepdim=True)
    return torch.where(torch.arange(delta.shape[2])[:, None] % 16 == 15, delta.roll(1, 2), delta)


def by_columns(out: Tensor, do: Tensor) -> Tensor:
    """delta, rounded after every 16 columns."""
    delta = torch.zeros_like(out[..., :1])
    for terms in (out * do).split(16, -1):
        delta = bf16(delta + terms.sum(-1, keepdim=True))
    return delta


def all_but_last(count: int, side: int) -> list[tuple[int, int]]:
    return spans(count, side)[: max(1, count // side)]


G, G2 = FlashGradients(), FlashGradients(80, 112, base2=True)
CORRECT: dict[str, Step] = {
    "48 x 80": G,
    "16 x 16": FlashGradients(16, 16),
    "80 x 112, exp2": G2,
    "64 x 48, reverse": FlashGradients(64, 48, reverse=True),
    "128 x 192": FlashGradients(128, 192, base2=True),
    "32 x 160, dS scaled": FlashGradients(32, 160, scale_first=True),
    "256 x 256": FlashGradients(256, 256),
    "48 x 144, P in FP16": FlashGradients(48, 144, p=fp16),
    "FP32 inside": FlashGradients(64, 64, p=same, ds=same),
    "autograd": autograd,
}
"""Kernels that differ in all that a policy leaves open."""

PRECISION: dict[str, tuple[Step, str]] = {
    "dQ summed in BF16": (G.but(dq=bf16), "dq"),
    "dQ summed in BF16, reverse": (FlashGradients(64, 48, reverse=True, dq=bf16), "dq"),
    "dK summed in BF16": (FlashGradients(16, 80, dk=bf16), "dk"),
    "dV summed in BF16": (FlashGradients(16, 112, base2=True, dv=bf16), "dv"),
    "dK and dV summed in BF16": (FlashGradients(16, 96, dk=bf16, dv=bf16), "dk|dv"),
    "products of dQ in BF16": (FlashGradients(48, 48, dq_part=bf16), "dq"),
    "products of dK in BF16": (FlashGradients(16, 160, dk_part=bf16), "dk"),
    "products of dV in BF16": (FlashGradients(16, 144, dv_part=bf16), "dv"),
    "delta in BF16": (G2.but(delta=lambda out, do: bf16((out * do).sum(-1, keepdim=True))), "delta"),
    "delta of products in BF16": (G.but(delta=lambda out, do: bf16(out * do).sum(-1, keepdim=True)), "delta"),
    "delta in BF16 by 16": (G.but(delta=by_columns), "delta"),
    "dP in BF16": (G.but(dp=bf16), "dp"),
    "dP in E4M3": (G.but(dp=e4m3), "dp"),
    "dP - delta in BF16": (G2.but(difference=lambda dp, delta: bf16(dp - delta)), "difference"),
    "dS in E4M3": (G.but(ds=scaled(e4m3, 64.0)), "ds"),
    "dS in E5M2": (G2.but(ds=e5m2), "ds"),
    "dS truncated": (G.but(ds=truncated), "ds"),
    "P in E4M3": (FlashGradients(64, 176, p=scaled(e4m3, 256.0)), "probabilities"),
    "P in E5M2": (G.but(p=e5m2), "probabilities"),
    "P truncated": (G2.but(p=truncated), "probabilities"),
    "S in BF16": (G.but(product=bf16), "scores"),
    "S in FP16": (G2.but(product=fp16), "scores"),
    "exponential in BF16": (G.but(exp=lambda x: bf16(torch.exp(x))), "exp"),
    "S - LSE in BF16": (G2.but(exp=lambda x: torch.exp2(bf16(x))), "exp"),
    "dV times 0.98": (G.but(end=lambda dq, dk, dv, scale: (dq * scale, dk * scale, 0.98 * dv)), "output"),
    "2^x of degree 2": (G2.but(exp=exp_of_degree(1.0, 0.65571, 0.34429)), "exp"),
    "LSE in BF16": (G.but(lse=bf16), "lse"),
    "LSE in FP16": (G2.but(lse=fp16), "lse"),
    "heads of a group in BF16": (G.but(group=rounded_groups), "heads"),
    "scaled K in BF16, dQ too": (partial(scaled_in_bf16, "k"), "scale"),
    "scaled Q in BF16, dK too": (partial(scaled_in_bf16, "q"), "scale"),
    "log2 e as 1.44": (G2.but(scale=lambda x: x * 1.44 / LOG2E), "scale"),
    "no derivative of a cap": (G2.but(product=lambda s: 40 * (s / 40).tanh()), "scores"),
    "output truncated": (G.but(out=lambda x: truncated(x).bfloat16()), "output"),
    "output through FP16": (G.but(out=lambda x: (x * 2**-10).half().float().mul(2**10).bfloat16()), "output"),
}
"""Kernels whose step errs, and a pattern of the step's name."""

STRUCTURE: dict[str, Step] = {
    "dK not scaled": G.but(end=lambda dq, dk, dv, scale: (dq * scale, dk, dv)),
    "dQ not scaled": G2.but(end=lambda dq, dk, dv, scale: (dq, dk * scale, dv)),
    "dQ scaled twice": G.but(end=lambda dq, dk, dv, scale: (dq * scale**2, dk * scale, dv)),
    "dK times ln 2": G2.but(end=lambda dq, dk, dv, scale: (dq * scale, dk * scale / LOG2E, dv)),
    "delta left out": G.but(difference=lambda dp, delta: dp),
    "delta added": G2.but(difference=lambda dp, delta: dp + delta),
    "delta of the row before": G.but(delta=stale_delta),
    "limit at the first key": G.but(seen=lambda i, j, shift, mask: visible(i, j, 0, mask)),
    "limit + 1": G2.but(seen=partial(visible, reach=1)),
    "limit - 1": G.but(seen=partial(visible, reach=-1)),
    "window + 1": G2.but(seen=partial(visible, wider=1)),
    "window - 1": G.but(seen=partial(visible, wider=-1)),
    "lengths ignored": G.but(seen=of_lengths(lambda _: None)),
    # Each head of a group overwrites what the one before has stored
    "last head of a group": G.but(group=lambda x, kv_heads: x.unflatten(1, (kv_heads, -1))[:, :, -1]),
    "heads in turn": G2.but(heads=lambda heads, kv_heads: torch.arange(heads) % kv_heads),
    "last tile of queries": G.but(rows=all_but_last),
    "last tile of keys": G2.but(columns=all_but_last),
    "LSE in base 2": G2.but(lse=lambda lse: lse * LOG2E),
    "P before its division": G.but(dv=lambda dv: dv, p=lambda p: bf16(p / p.amax(-1, keepdim=True).clamp(min=1e-30))),
    "dS not times P": G.but(ds=lambda ds: bf16(ds.sign() * ds.abs().sqrt())),
    "dV of the row before": G2.but(end=lambda dq, dk, dv, scale: (dq * scale, dk * scale, dv.roll(1, 2))),
    "last tile of dQ only": FlashGradients(48, 48, dq=lambda dq: dq, dq_part=same, columns=lambda n, b: spans(n, b)[-1:]),
}
"""Kernels whose loop is wrong."""

OUTSIDE: dict[str, Step] = {
    "noise on dO": G.but(load=of("do", noisy)),
    "noise on K": G2.but(load=of("k", noisy)),
    "bias of dV of a head": G.but(end=biased),
    "rotation of dK": G2.but(end=rotated),
    "dropout of dS": G.but(ds=lambda ds: bf16(ds * (torch.rand(ds.shape, generator=torch.Generator().manual_seed(7)) > 2e-3))),
    "dP clamped": G.but(dp=lambda dp: dp.clamp(-8, 8)),
}
"""Faults that surely no catalogue has."""
