"""The exact backward pass in FP64: the golden gradients."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import FP64, Format
from numdev.arithmetic.products import product, row_sums, visible_product
from numdev.attention.backward.base import Gradients, Saved, check_backward_shapes, gradient_formats, saved_by
from numdev.attention.backward.recompute import OutputForDelta
from numdev.attention.base import group_heads, softmax_scale
from numdev.attention.commonsteps import NEVER
from numdev.attention.exact import Exact
from numdev.attention.honours import Honours
from numdev.attention.mask import Mask

_WORKSPACE = {"cpu": 1 << 21, "cuda": 1 << 27}  # scores held at once, as in the exact forward pass


@dataclass(frozen=True)
class ExactBackward:
    """The gradients of `sum(dO * O)` in FP64, streamed over blocks of keys: no matrix of N x N is ever formed.

    Its own error is bounded in tests/attention/backward/bounds.py, and held against mpmath.
    """

    honours: ClassVar[Honours] = Honours()

    @property
    def formats(self) -> dict[str, Format]:
        return gradient_formats(FP64)

    @property
    def format(self) -> Format:
        return FP64

    @property
    def idle(self) -> dict[str, str]:
        return {}

    @property
    def reads(self) -> OutputForDelta:
        return OutputForDelta.UNROUNDED

    @property
    def input_key(self) -> Hashable:
        return "fp64"

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return q.double(), k.double(), v.double(), do.double()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """Any floating dtype in, FP64 out. Shapes as in `Gradients`."""
        check_backward_shapes(q, k, v, do, mask)
        return self.backward(q, k, v, do, saved_by(Exact(), self.reads, (q, k, v), mask, scale), mask, scale)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone, with `delta = rowsum(dO * O)` of what was saved."""
        check_backward_shapes(q, k, v, do, mask)
        saved.check(q, v)
        factor, (queries, keys), kv_heads = softmax_scale(q, scale), (q.shape[-2], k.shape[-2]), k.shape[1]
        q, k, v, do = self.round_inputs(q, k, v, do)
        k, v = (mask.without_padding(x)[:, :, None] for x in (k, v))
        q, do, out = (group_heads(x, kv_heads) for x in (q, do, saved.out.double()))
        lse = group_heads(saved.lse.double()[..., None], kv_heads)
        hidden = lse == NEVER
        delta, shift = row_sums(do * out).masked_fill(hidden, 0.0), lse.masked_fill(hidden, 0.0)
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k[:, :, 0]), torch.empty_like(v[:, :, 0])
        step = max(1, _WORKSPACE[q.device.type] // (q.shape[0] * q.shape[1] * q.shape[2] * queries))
        for start in range(0, keys, step):
            tile = slice(start, min(start + step, keys))
            p = product(q, k[..., tile, :].mT).mul_(factor).sub_(shift).exp_().masked_fill_(hidden, 0.0)
            ds = product(do, v[..., tile, :].mT).sub_(delta).mul_(p)
            visible = mask.visible(queries, keys, (0, queries), (tile.start, tile.stop), q.device)
            if visible is not None:
                visible = visible[:, :, None]
                p.masked_fill_(~visible, 0.0)
                ds.masked_fill_(~visible, 0.0)
            dq += visible_product(ds, k[..., tile, :], visible)
            turned = None if visible is None else visible.mT
            dk[..., tile, :] = visible_product(ds.mT, q, turned).sum(2)
            dv[..., tile, :] = visible_product(p.mT, do, turned).sum(2)
        return Gradients(dq.mul_(factor).flatten(1, 2), dk.mul_(factor), dv, delta.squeeze(-1).flatten(1, 2))
