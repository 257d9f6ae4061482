"""Attention with gradients: any forward pass and any backward pass as one function that a model can be trained with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from numdev.arithmetic.formats import BF16, FP16, FP32, FP64, Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Attention, Gradients, Implementation, Output, Saved, check_backward_shapes
from numdev.attention.mask import Mask
from numdev.attention.softmax import OutputForDelta, Recompute
from numdev.errors import BadInput

_FORMATS = {fmt.dtype: fmt for fmt in (FP64, FP32, FP16, BF16)}
Report = Callable[[Gradients], None]
Passes = tuple[Callable[[], Output], Callable[[Output], Gradients]]
"""A forward pass, and the backward pass from what it returned; each can be repeated."""


class Backward(Implementation):
    """A backward pass after a forward pass, with which a model can be trained; its format is that of the gradients.

    An implementation is `backward` and the O that this reads; timing and training follow from them.
    """

    recompute: Recompute = Recompute()

    if TYPE_CHECKING:  # see `Implementation`

        @property
        def forward(self) -> Any:
            """The forward pass."""

    @property
    def formats(self) -> dict[str, Format]:
        """The gradients are rounded by the last step, `delta` by its own."""
        return dict.fromkeys(("dq", "dk", "dv"), self.precision.output.to) | {"delta": self.precision.delta.accumulate.to}

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inputs as the implementation sees them."""
        rounded: tuple[Tensor, Tensor, Tensor, Tensor] = self.precision.round_inputs(q, k, v, do)
        return rounded

    @property
    def primal(self) -> Attention:
        """The forward pass that computes O for a model."""
        forward: Attention = self.forward
        return forward

    @property
    def reads(self) -> OutputForDelta:
        """Which O `backward` takes: rounded or unrounded."""
        return self.recompute.output if self.recompute.reads_output else OutputForDelta.ROUNDED

    @property
    def forward_pass(self) -> Attention:
        """The forward pass that is timed, and returns the O and the LSE that the backward pass reads."""
        return self.primal.leaving(self.reads)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """The forward pass, then `backward` on what it saved. Takes rounded inputs; shapes as in `Gradients`."""
        check_backward_shapes(q, k, v, do, mask)
        return self.backward(q, k, v, do, saved_by(self.primal, self.reads, (q, k, v), mask, scale), mask, scale)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone, on rounded inputs; `scale` is `1/sqrt(head_dim)` unless given."""
        raise NotImplementedError

    def passes(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Passes:
        """The calls that are timed, on rounded inputs; those of the forward pass are rounded and stored beforehand."""
        forward = self.forward_pass
        attend = bare_call(forward, (q, k, v), mask, scale)
        return attend, lambda output: self.backward(q, k, v, do, forward.saved(output), mask, scale)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None, report: Report | None = None
    ) -> Tensor:
        """O in the dtype of q, k and v, whose gradients are those of the implementation; see `differentiable`."""
        return differentiable(q, k, v, self.primal, self, mask, scale, report)


def saved_by(forward: Attention, reads: OutputForDelta, inputs: tuple[Tensor, ...], mask: Mask, scale: float | None) -> Saved:
    """The O and the LSE of a forward pass on q, k and v, rounded by its own policy."""
    forward = forward.leaving(reads)
    q, k, v = inputs
    return forward.saved(forward(*forward.round_inputs(q, k, v), mask, scale))


def bare_call(forward: Attention, inputs: tuple[Tensor, ...], mask: Mask, scale: float | None) -> Callable[[], Output]:
    """A forward pass with its inputs rounded by its own policy and stored in its own dtype beforehand."""
    q, k, v = inputs
    q, k, v = (x if forward.storage is None else x.to(forward.storage) for x in forward.round_inputs(q, k, v))
    return lambda: forward.bare(q, k, v, mask, scale)


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
    changes nothing if that dtype holds their format. With `OutputForDelta.UNROUNDED` the forward pass runs twice. Autocast does
    not affect either pass. `report` receives the gradients, delta among them, before they are rounded to that dtype.
    """
    check_dtypes(q, k, v)
    result: Tensor = _Attend.apply(q, k, v, (forward, backward, report), mask, scale)  # type: ignore[no-untyped-call]
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
    ) -> Tensor:
        forward, backward, _ = pair
        with uncast(q):
            seen_q, seen_k, seen_v = _seen(forward, (q, k, v))
            output = forward(seen_q, seen_k, seen_v, mask, scale)
            if backward.reads is OutputForDelta.UNROUNDED:
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
            return dq, dk, dv, None, None, None


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
