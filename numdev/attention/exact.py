"""Exact attention in FP64: the golden value."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import FP64, Format
from numdev.arithmetic.products import product, row_sums, visible_product, whole_blocks
from numdev.attention.base import Output, Primary, check_shapes, group_heads, softmax_scale
from numdev.attention.honours import Honours
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.together import Inputs, Limits, plain_stack, together
from numdev.attention.walk import Walk

_WORKSPACE = {"cpu": 1 << 20, "cuda": 1 << 27}  # scores held at once: 8 MB, in the last-level cache; 1 GB on a GPU
_STACKED = Limits(each=1 << 15, most=1 << 19)


@dataclass(frozen=True)
class Exact(Primary):
    """`softmax(scale Q K^T) V` in FP64, streamed over rows: no matrix of N x N is ever formed.

    Its own error is at most `2 ((d + 4) A + N + 2) 2^-53 max |v|`, where `A = scale max_ij sum_t |q_it| |k_jt|` bounds the
    scores (the products' bounds, Higham 2002, section 3.1, and softmax's, Blanchard, Higham & Higham 2021; derived in
    tests/cases.py). The tests compare it with 200-bit arithmetic.
    """

    honours: ClassVar[Honours] = Honours()

    @property
    def idle(self) -> dict[str, str]:
        return {}

    def walk(self, shape: Shape, mask: Mask) -> Walk:
        return Walk(Precision.golden(), why="it has no tiles")

    @property
    def formats(self) -> dict[str, Format]:
        return {"out": FP64, "lse": FP64}

    @property
    def input_key(self) -> Hashable:
        return "fp64"

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.double(), k.double(), v.double()

    def unrounded(self) -> Exact:
        """Itself: nothing rounds its output to another format."""
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Any floating dtype in, FP64 out. Shapes as in `Output`."""
        check_shapes(q, k, v, mask)
        factor = softmax_scale(q, scale)
        q, k, v = self.round_inputs(q, k, v)
        k, v = mask.without_padding(k), mask.without_padding(v)
        batch, heads, queries, _ = q.shape
        kv_heads, keys = k.shape[1:3]
        grouped, k, v = group_heads(q, kv_heads), k[:, :, None], v[:, :, None]
        transposed = k.mT.contiguous()
        out = q.new_empty(*grouped.shape[:-1], v.shape[-1])
        lse = q.new_empty(grouped.shape[:-1])
        step = whole_blocks(_WORKSPACE[q.device.type] // (batch * heads * keys), torch.float64)
        for start in range(0, queries, step):
            stop = min(start + step, queries)
            scores = product(grouped[..., start:stop, :], transposed).mul_(factor)
            visible = mask.visible(queries, keys, (start, stop), (0, keys), q.device)
            if visible is not None:
                visible = visible[:, :, None]
                scores.masked_fill_(~visible, float("-inf"))
            m = scores.amax(-1, keepdim=True)
            m.masked_fill_(m == float("-inf"), 0.0)
            p = scores.sub_(m).exp_()
            row_sum = row_sums(p)
            lse[..., start:stop] = (m + row_sum.log()).squeeze(-1)
            out[..., start:stop, :] = visible_product(p, v, visible).div_(torch.where(row_sum == 0, 1.0, row_sum))
        return Output(out.flatten(1, 2), lse.flatten(1, 2))

    def together(self, replicates: Sequence[Inputs], mask: Mask, scale: float | None = None) -> list[Output]:
        """See `numdev.measurement.operation.Together`."""
        return together(self, replicates, mask, _STACKED, plain_stack(self, scale))


def rounded_once(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None = None) -> Tensor:
    """Exact attention, its output rounded once to the dtype of q: for `Custom`, the smallest error that a kernel can have."""
    return Exact()(q, k, v, mask, scale).out.to(q.dtype)
