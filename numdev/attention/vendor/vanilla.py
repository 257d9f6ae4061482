"""Attention as three tensor operations of torch, with all scores in memory, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, Format
from numdev.attention.base import Output, check_shapes, group_heads, softmax_scale
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.groups import PRESET, AcceptedSettings
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.tiling import KernelLaunch
from numdev.attention.vendor.dispatch import IN_TORCH, ByAutograd, InDtype, dense, hides_rows
from numdev.errors import Unsupported


@dataclass(frozen=True)
class Vanilla(InDtype):
    """`S = scale Q K^T`, `P = softmax(S)`, `O = P V` in the dtype itself (Dao et al. 2022, Algorithm 0).

    `Naive` emulates these operations in any format, step by step; `Vanilla` runs them, with `Theta(N^2)` memory, to measure their
    speed. Torch must be able to multiply matrices in `fmt`.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET, "eager", IN_TORCH)
    unknown: ClassVar[str] = "it has no tiles"

    fmt: Format = BF16

    @property
    def precision(self) -> Precision:
        return Precision.eager(self.fmt)

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        return CostModel(Algorithm.VANILLA, Width.of(self.fmt, self.fmt), holds_scores=True)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """No LSE; rows that see no key are 0."""
        check_shapes(q, k, v, mask, adds=True)
        if self.fmt.bits < 16:
            raise Unsupported("precision", f"torch has no matmul in {self.fmt.name}; use bf16, fp16, fp32 or fp64")
        q, k, v = q.to(self.storage), k.to(self.storage), v.to(self.storage)
        (batch, heads, queries, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
        rows = group_heads(q, kv_heads).reshape(batch * kv_heads, -1, dim)  # heads of a group share k as more rows
        k, v = k.reshape(-1, keys, dim), v.reshape(-1, keys, dim)
        empty = torch.empty((), dtype=q.dtype, device=q.device)  # beta = 0: it is not read
        scores = torch.baddbmm(empty, rows, k.mT, beta=0, alpha=softmax_scale(q, scale))
        if mask.softcap is not None:
            scores = (scores / mask.softcap).tanh() * mask.softcap
        seen = dense(mask, queries, keys, q.device)
        if (added := mask.added((0, queries), (0, keys), group_heads(q, kv_heads))) is not None:
            scores.view(batch, kv_heads, -1, queries, keys).add_(added)
        if seen is not None:
            scores.view(batch, heads, queries, keys).masked_fill_(~seen, float("-inf"))
        p = torch.softmax(scores, -1)
        del scores  # S and P are held at once; S, P and O need not be
        if seen is not None and hides_rows(mask, batch, queries, keys):
            # Softmax of nothing is NaN; its gradient needs it as it is.
            p = p.view(batch, heads, queries, keys).masked_fill(~seen.any(-1, keepdim=True), 0.0).view_as(p)
        p = mask.times_z(p.view(batch, kv_heads, -1, queries, keys), (0, queries)).view_as(p)
        return Output(torch.bmm(p, v).view(batch, heads, queries, dim), None)


@dataclass(frozen=True)
class VanillaBackward(ByAutograd):
    """The gradients of matmul, softmax, matmul of torch in the dtype itself; see `Vanilla`.

    `NaiveBackward.eager` emulates these operations in any format.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET, "eager", IN_TORCH)
    unknown: ClassVar[str] = "it has no tiles"

    fmt: Format = BF16

    @property
    def precision(self) -> BackwardPrecision:
        return BackwardPrecision.eager(self.fmt)

    @property
    def forward(self) -> Vanilla:
        return Vanilla(self.fmt)
