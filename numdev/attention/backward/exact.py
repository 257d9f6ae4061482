"""The exact backward pass in FP64: the golden gradients."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP32, FP64, Format
from numdev.arithmetic.products import product, row_sums, visible_product
from numdev.arithmetic.rounding import Cast
from numdev.attention.backward.base import Gradients, Saved, UnderKernelPolicy, check_backward_shapes, gradient_formats
from numdev.attention.backward.function import BySaved
from numdev.attention.backward.recompute import OutputForDelta
from numdev.attention.backward.timed import TimedFromSaved
from numdev.attention.backward.walk import BackwardWalk
from numdev.attention.base import group_heads, softmax_scale
from numdev.attention.commonsteps import NEVER
from numdev.attention.exact import Exact
from numdev.attention.honours import PRESET, Honours
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.tiled import Tiled
from numdev.attention.vendor.dispatch import IN_TORCH

_WORKSPACE = {"cpu": 1 << 21, "cuda": 1 << 27}  # scores held at once, as in the exact forward pass


class _OfExact(BySaved, TimedFromSaved):
    """What follows where the backward pass takes O and LSE of exact attention."""

    @property
    def forward_pass(self) -> Exact:
        """See `numdev.attention.backward.timed.TimedBackward`."""
        return Exact()

    @property
    def idle(self) -> dict[str, str]:
        return {}

    @property
    def reads(self) -> OutputForDelta:
        return OutputForDelta.UNROUNDED


@dataclass(frozen=True)
class ExactBackward(_OfExact):
    """The gradients of `sum(dO * O)` in FP64, streamed over blocks of keys: no matrix of N x N is ever formed.

    Its own error is bounded in tests/attention/backward/bounds.py, and the tests compare it with mpmath.
    """

    honours: ClassVar[Honours] = Honours()

    @property
    def formats(self) -> dict[str, Format]:
        return gradient_formats(FP64)

    @property
    def format(self) -> Format:
        return FP64

    @property
    def primal(self) -> Exact:
        """See `numdev.attention.backward.base.Differentiable`."""
        return Exact()

    @property
    def input_key(self) -> Hashable:
        return "fp64"

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return q.double(), k.double(), v.double(), do.double()

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone, with `delta = rowsum(dO * O)` of the saved O. Any floating dtype in, FP64 out."""
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


@dataclass(frozen=True)
class RoundedBackward(_OfExact, UnderKernelPolicy):
    """Exact gradients of inputs in a format, rounded once to it: the smallest error that a kernel can have.

    Attributes:
        fmt: the format of inputs and gradients; delta is rounded to FP32.
    """

    honours: ClassVar[Honours] = Honours(PRESET, "kernel", IN_TORCH)

    fmt: Format = BF16

    @property
    def forward(self) -> Tiled:  # type: ignore[override]
        """The forward pass that its emulation uses: the exact O, rounded once."""
        return Tiled(Precision.golden().with_step(output=self.fmt))

    @property
    def primal(self) -> Tiled:
        """Exact O of inputs in the format, rounded once; see `numdev.attention.backward.base.Differentiable`."""
        return Tiled(Precision.golden().with_step(inputs=self.fmt, output=self.fmt))

    def walk(self, shape: Shape, mask: Mask) -> BackwardWalk:
        """See `numdev.attention.backward.emulation.EmulatedBackward`."""
        return BackwardWalk(self.precision, why="it has no tiles")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """Takes rounded inputs; returns FP64 tensors whose numbers are in the format. Shapes as in `Gradients`."""
        return self._rounded(ExactBackward()(q, k, v, do, mask, scale))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone; see `ExactBackward.backward`."""
        return self._rounded(ExactBackward().backward(q, k, v, do, saved, mask, scale))

    def _rounded(self, exact: Gradients) -> Gradients:
        cast = Cast(self.fmt)
        assert exact.delta is not None, "exact gradients have one"
        return Gradients(cast(exact.dq), cast(exact.dk), cast(exact.dv), Cast(FP32)(exact.delta))
