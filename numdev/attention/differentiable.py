"""Attention as a function that trains a model: each pass by an implementation of its own, in the dtypes of models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from numdev.arithmetic.formats import BF16, FP16, FP32, FP64
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Attention, Backward, Report, Saved, saved_by
from numdev.attention.mask import Mask
from numdev.errors import BadInput

_FORMATS = {fmt.dtype: fmt for fmt in (FP64, FP32, FP16, BF16)}


def differentiable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Attention,
    backward: Backward,
    mask: Mask,
    scale: float | None = None,
    report: Report | None = None,
) -> Tensor:
    """O computed by `forward`, with gradients computed by `backward`; it can be differentiated once.

    Each pass rounds the inputs by its own policy. O and the gradients are rounded once more to the dtype of q, k and v, which
    changes nothing if that dtype holds their format. With `OutputForDelta.UNROUNDED` a forward pass that rounds runs
    twice. Autocast does not affect either pass. `report` receives the gradients, delta among them, before they are rounded to
    that dtype.
    """
    check_dtypes(q, k, v)
    learned = None if mask.bias is None else mask.bias.source
    result: Tensor = _Attend.apply(q, k, v, (forward, backward, report), mask, scale, learned)  # type: ignore[no-untyped-call]
    return result


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pair: tuple[Attention, Backward, Report | None],
        mask: Mask,
        scale: float | None,
        learned: Tensor | None,
    ) -> Tensor:
        forward, backward, _ = pair
        with uncast(q):
            seen_q, seen_k, seen_v = _seen(forward, (q, k, v))
            output = forward(seen_q, seen_k, seen_v, mask, scale)
            if forward.leaving(backward.reads) is not forward:
                saved = saved_by(forward, backward.reads, (q, k, v), mask, scale)
            else:
                saved = forward.saved(output)
            ctx.save_for_backward(q, k, v, saved.out, saved.lse)
            ctx.rest = pair, mask, scale
            return _as(output.out, q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        (_, backward, report), mask, scale = ctx.rest
        if 0 in do.stride():  # the gradient of a sum is a broadcast tensor, which kernels cannot read
            do = do.contiguous()
        with uncast(q):
            gradients = backward.backward(*_seen(backward, (q, k, v, do)), Saved(*saved), mask, scale)
            if report is not None:
                report(gradients)
            dq, dk, dv = (_as(x, q.dtype) for x in (gradients.dq, gradients.dk, gradients.dv))
            learned = None if mask.bias is None else mask.bias.source
            dbias = None if learned is None or gradients.dbias is None else _as(gradients.dbias, learned.dtype)
            return dq, dk, dv, None, None, None, dbias


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return _as(x, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _as(gradient, ctx.dtype), None


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise BadInput unless q, k and v have the same dtype, and one in which models compute."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in _FORMATS or tensor.dtype != q.dtype:
            raise BadInput(name, str(tensor.dtype), f"give q, k and v in one of {', '.join(map(str, _FORMATS))}")


def rounded_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded once to a dtype in which models compute; its gradient is rounded once to the dtype of x."""
    result: Tensor = x if x.dtype == dtype else _Rounded.apply(x, dtype)  # type: ignore[no-untyped-call]
    return result


def uncast(x: Tensor) -> torch.autocast:
    """A context without autocast: operations on the device of x keep the dtypes of their operands."""
    return torch.autocast(x.device.type, enabled=False)


def _seen(subject: Attention | Backward, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs as a pass sees them.

    If the pass rounds to the format that they already have, rounding is the identity, and a kernel takes them unchanged.
    """
    fmt = _FORMATS[inputs[0].dtype]
    takes = subject.storage is not None and subject.input_key == (Cast(fmt), torch.float32)
    return inputs if takes else subject.round_inputs(*inputs)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a dtype, rounded once: from FP64 to 16 bits torch's own conversion would round twice."""
    if x.dtype == torch.float64 and dtype in (torch.float16, torch.bfloat16):
        return Cast(_FORMATS[dtype])(x).to(dtype)
    return x.to(dtype)
