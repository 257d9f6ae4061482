"""Exact attention and its gradients in FP64: the golden values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP32, Format
from numdev.arithmetic.products import product, row_sums, visible_product, whole_blocks
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import (
    Attention,
    Backward,
    Gradients,
    Output,
    Report,
    Saved,
    check_backward_shapes,
    check_shapes,
    group_heads,
    softmax_scale,
)
from numdev.attention.groups import PRESET, AcceptedSettings
from numdev.attention.mask import Mask, ungrouped
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import OutputForDelta, Recompute
from numdev.attention.steps import NEVER
from numdev.attention.tiled import Tiled
from numdev.attention.vendor.dispatch import IN_TORCH

_WORKSPACE = {"cpu": 1 << 20, "cuda": 1 << 27}  # scores held at once; on a CPU, 8 MB, they stay in the last-level cache
_BACKWARD_WORKSPACE = {"cpu": 1 << 21, "cuda": 1 << 27}


@dataclass(frozen=True)
class Exact(Attention):
    """`softmax(scale Q K^T) V` in FP64, streamed over rows: no matrix of N x N is ever formed.

    Without a softcap and dropout its own error is at most `2 ((d + 4) A + N + 2) 2^-53 max |v|`, where `A = scale max_ij sum_t
    |q_it| |k_jt|` bounds the scores (the products' bounds, Higham 2002, section 3.1, and softmax's, Blanchard, Higham & Higham
    2021; derived in tests/cases.py). The tests compare it with 200-bit arithmetic.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings()
    unknown: ClassVar[str] = "it has no tiles"
    precision = Precision.golden()

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.double(), k.double(), v.double()

    def unrounded(self) -> Exact:
        """Itself: nothing rounds its output to another format."""
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Any floating dtype in, FP64 out. Shapes as in `Output`."""
        check_shapes(q, k, v, mask, adds=True)
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
            mask.cap_(scores)
            visible = mask.seen(queries, keys, (start, stop), (0, keys), q.device, kv_heads)
            if (added := mask.added((start, stop), (0, keys), scores)) is not None:
                scores.add_(added)
            scores = _seen(scores, visible, NEVER)
            m = scores.amax(-1, keepdim=True)
            m.masked_fill_(m == NEVER, 0.0)
            p = scores.sub_(m).exp_()
            row_sum = row_sums(p)
            lse[..., start:stop] = (m + row_sum.log()).squeeze(-1)
            p = mask.times_z(p, (start, stop))
            out[..., start:stop, :] = visible_product(p, v, visible).div_(torch.where(row_sum == 0, 1.0, row_sum))
        return Output(out.flatten(1, 2), lse.flatten(1, 2))


@dataclass(frozen=True)
class ExactBackward(Backward):
    """The gradients of `sum(dO * O)` in FP64, streamed over blocks of queries: no matrix of N x N is ever formed.

    Where P of one key is nearly 1, `dP - delta` cancels. So dP is taken from its value at the key `b` of each row's largest
    score: `e_ij = dP_ij - dP_ib`, `mean_i = sum_j P_ij e_ij`, `dS = P * (e - mean)`, `delta_i = dP_ib + mean_i`. Since `e_ib` is
    exactly 0, `mean` is a sum of the small P alone, and no step subtracts numbers that agree. Under a softcap dS is multiplied by
    `Mask.cap_slope`. To first order, element by element, without a softcap and dropout,

        |error of dS_ij| <= 4 u C W_i P_ij (1 - P_ij),    W_i = sum_t |dO_it| max |V|,    C = 2 pi + N + 2 d + 5

    with the relative error `pi u` of P, `pi = 2 ((d + 4) A + 2) + N`, and `A` as in `Exact`: it shrinks with `1 - P` as dS does.
    dQ and dK carry it through their sums; dV errs by `pi + M` for M rows in a sum. The bounds of all are derived in
    tests/attention/gradients.py (`element_bounds`), and the tests compare with multiprecision arithmetic. Two things stay
    absolute errors: what is below FP64's normal numbers, 2^-1022, and dQ of a row whose largest score is that of several equal
    keys, whose parts of dQ cancel in `dS K`.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings()
    unknown: ClassVar[str] = "it has no tiles"
    learns: ClassVar[bool] = True
    precision = BackwardPrecision.golden()
    forward = Exact()
    recompute = Recompute(output=OutputForDelta.UNROUNDED)

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return q.double(), k.double(), v.double(), do.double()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """The golden gradients, whose error is stated above. Any floating dtype in, FP64 out."""
        return self._streamed((q, k, v, do), None, mask, scale)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone: P of the saved LSE, and `delta = rowsum(dO * O)` of the saved O.

        The rounding of that O stays in `dP - delta`, also where P saturates. Any floating dtype in, FP64 out.
        """
        return self._streamed((q, k, v, do), saved, mask, scale)

    def _streamed(self, inputs: tuple[Tensor, ...], saved: Saved | None, mask: Mask, scale: float | None) -> Gradients:
        q, k, v, do = inputs
        check_backward_shapes(q, k, v, do, mask, saved, adds=True)
        factor, (queries, keys), kv_heads = softmax_scale(q, scale), (q.shape[-2], k.shape[-2]), k.shape[1]
        k, v = (mask.without_padding(x.double())[:, :, None] for x in (k, v))
        q, do = (group_heads(x.double(), kv_heads) for x in (q, do))
        k_turned, v_turned = k.mT.contiguous(), v.mT.contiguous()
        delta, lse = q.new_empty(*q.shape[:-1], 1), None
        if saved is not None:
            out, lse = (group_heads(x.double(), kv_heads) for x in (saved.out, saved.lse[..., None]))
            delta = row_sums(do * out).masked_fill_(lse == NEVER, 0.0)
            lse = lse.masked_fill(lse == NEVER, -NEVER)  # whose exponentials are 0
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k[:, :, 0]), torch.zeros_like(v[:, :, 0])
        slopes: list[Tensor] | None = None if mask.bias is None or mask.bias.source is None else []
        step = whole_blocks(_BACKWARD_WORKSPACE[q.device.type] // (q[..., 0, 0].numel() * keys), torch.float64)
        for start in range(0, queries, step):
            stop = min(start + step, queries)
            rows = (..., slice(start, stop), slice(None))
            visible = mask.seen(queries, keys, (start, stop), (0, keys), q.device, kv_heads)
            turned = None if visible is None else visible.mT
            s = product(q[rows], k_turned).mul_(factor)
            slope = mask.cap_slope(s)
            mask.cap_(s)
            if (added := mask.added((start, stop), (0, keys), s)) is not None:
                s.add_(added)
            s = _seen(s, visible, NEVER)
            dp = mask.times_z(product(do[rows], v_turned), (start, stop))
            if lse is None:
                p, ds, delta[rows] = _of_softmax(s, dp, visible)
            else:
                p = s.sub_(lse[rows]).exp_()
                ds = dp.sub_(delta[rows]).mul_(p)
            p, ds = _seen(p, visible), _seen(ds, visible)
            if slopes is not None and mask.bias is not None:
                slopes.append(ungrouped(ds, mask.bias))
            ds = ds if slope is None else _seen(ds.mul_(slope), visible)
            p = mask.times_z(p, (start, stop))
            dq[rows] = visible_product(ds, k, visible)
            dk += visible_product(ds.mT, q[rows], turned).sum(2)
            dv += visible_product(p.mT, do[rows], turned).sum(2)
        dbias = None if slopes is None else torch.cat(slopes, -2)
        return Gradients(dq.mul_(factor).flatten(1, 2), dk.mul_(factor), dv, delta.squeeze(-1).flatten(1, 2), dbias)


def _of_softmax(s: Tensor, dp: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """P, dS and delta of whole rows of scores, in place; see `ExactBackward`."""
    m, best = s.max(-1, keepdim=True)
    hidden = m == NEVER
    p = s.sub_(m.masked_fill_(hidden, 0.0)).exp_()
    p.div_(row_sums(p).masked_fill_(hidden, 1.0))
    origin = dp.gather(-1, best).masked_fill_(hidden, 0.0)
    e = _seen(dp.sub_(origin), visible)
    mean = row_sums(p * e)
    return p, e.sub_(mean).mul_(p), origin + mean


def _seen(x: Tensor, visible: Tensor | None, otherwise: float = 0.0) -> Tensor:
    """`x`, in place, with another number where a row does not see a key."""
    return x if visible is None else x.masked_fill_(~visible, otherwise)


@dataclass(frozen=True)
class RoundedBackward(Backward):
    """Exact gradients of inputs in a format, rounded once to it: the smallest error that a kernel can have; delta is in FP32."""

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(PRESET, "kernel", IN_TORCH)
    unknown: ClassVar[str] = "it has no tiles"
    recompute = Recompute(output=OutputForDelta.UNROUNDED)

    fmt: Format = BF16

    @property
    def precision(self) -> BackwardPrecision:
        return BackwardPrecision.kernel(self.fmt)

    @property
    def forward(self) -> Tiled:
        """The forward pass that its emulation uses: the exact O, rounded once."""
        return Tiled(Precision.golden().with_step(output=self.fmt))

    @property
    def primal(self) -> Tiled:
        """Exact O of inputs in the format, rounded once."""
        return Tiled(Precision.golden().with_step(inputs=self.fmt, output=self.fmt))

    @property
    def forward_pass(self) -> Exact:
        return Exact()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """Takes rounded inputs; returns FP64 tensors whose numbers are in the format. Shapes as in `Gradients`."""
        return self._rounded(ExactBackward()(q, k, v, do, mask, scale))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        return self._rounded(ExactBackward().backward(q, k, v, do, saved, mask, scale))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None, report: Report | None = None
    ) -> Tensor:
        """See `Backward`. Exact attention rounds O and the gradients to the dtype itself, without tiles."""
        if report is not None or self.fmt.dtype != q.dtype:
            return super().attend(q, k, v, mask, scale, report)
        return ExactBackward().attend(q, k, v, mask, scale)

    def _rounded(self, exact: Gradients) -> Gradients:
        cast = Cast(self.fmt)
        assert exact.delta is not None, "exact gradients have one"
        return Gradients(cast(exact.dq), cast(exact.dk), cast(exact.dv), Cast(FP32)(exact.delta))


def rounded_once(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None = None) -> Tensor:
    """Exact attention, its output rounded once to the dtype of q: for `Custom`, the smallest error that a kernel can have."""
    return Exact()(q, k, v, mask, scale).out.to(q.dtype)
