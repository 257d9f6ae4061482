"""Attention that a model can be trained with: any forward pass and any backward pass as one differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from numdev.arithmetic.formats import BF16, FP16, FP32, FP64
from numdev.arithmetic.rounding import Cast
from numdev.attention.backward.base import FromSaved, Saved, saved_by
from numdev.attention.backward.recompute import OutputForDelta
from numdev.attention.base import Attention
from numdev.attention.mask import Mask
from numdev.errors import BadInput, Unsupported

_FORMATS = {fmt.dtype: fmt for fmt in (FP64, FP32, FP16, BF16)}


def attend(
    q: Tensor, k: Tensor, v: Tensor, forward: Attention, backward: FromSaved, mask: Mask, scale: float | None = None
) -> Tensor:
    """O by `forward`, whose gradients are by `backward`; once differentiable.

    Each pass rounds the inputs by its own policy. O and the gradients are rounded once more to the dtype of q, k and v, which
    changes nothing where it holds their format. With `OutputForDelta.UNROUNDED` the forward pass runs twice.

    Args:
        q: `[batch, heads, queries, dim]`.
        k: `[batch, kv_heads, keys, dim]`, of the dtype of q.
        v: `[batch, kv_heads, keys, values]`, of the dtype of q.
        forward: saves O and LSE.
        backward: its `forward`, if it has one, has no part.
        mask: which keys a query sees.
        scale: of the scores; `1/sqrt(dim)` unless given.

    Raises:
        BadInput: for a dtype that is none of a model's, and for dtypes or shapes that do not fit together.
        Unsupported: where the forward pass gives no LSE, or not the O that `backward` reads.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in _FORMATS or tensor.dtype != q.dtype:
            raise BadInput(name, str(tensor.dtype), f"give q, k and v in one of {', '.join(map(str, _FORMATS))}")
    result: Tensor = _Attend.apply(q, k, v, forward, backward, mask, scale)  # type: ignore[no-untyped-call]
    return result


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, forward: Attention, backward: FromSaved, mask: Mask, scale: float | None
    ) -> Tensor:
        output = forward(*forward.round_inputs(q, k, v), mask, scale)
        if backward.reads is OutputForDelta.UNROUNDED:
            saved = saved_by(forward, backward.reads, (q, k, v), mask, scale)
        elif output.lse is None:
            raise Unsupported("forward", f"{type(forward).__name__} returns no LSE, from which P is recomputed")
        else:
            saved = Saved(output.out, output.lse)
        ctx.save_for_backward(q, k, v, saved.out, saved.lse)
        ctx.rest = backward, mask, scale
        return _as(output.out, q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        backward, mask, scale = ctx.rest
        found = backward.backward(*backward.round_inputs(q, k, v, do), Saved(out, lse), mask, scale)
        return _as(found.dq, q), _as(found.dk, k), _as(found.dv, v), None, None, None, None


def _as(x: Tensor, like: Tensor) -> Tensor:
    """`x` in the dtype of a tensor, rounded once: from FP64 torch's own conversion would round twice."""
    return x if x.dtype == like.dtype else Cast(_FORMATS[like.dtype])(x.double()).to(like.dtype)
