"""Attention that a model can be trained with: any forward pass and any backward pass as one differentiable function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from numdev.arithmetic.formats import BF16, FP16, FP32, FP64
from numdev.arithmetic.rounding import Cast
from numdev.attention.backward.base import Backward, FromSaved, Gradients, Saved, check_backward_shapes, saved_by, saved_of
from numdev.attention.backward.recompute import OutputForDelta
from numdev.attention.base import Attention, Held
from numdev.attention.mask import Mask
from numdev.errors import BadInput

_FORMATS = {fmt.dtype: fmt for fmt in (FP64, FP32, FP16, BF16)}


def differentiable(
    q: Tensor, k: Tensor, v: Tensor, forward: Attention, backward: FromSaved, mask: Mask, scale: float | None = None
) -> Tensor:
    """O computed by `forward`, with gradients computed by `backward`; it can be differentiated once.

    Each pass rounds the inputs by its own policy. O and the gradients are rounded once more to the dtype of q, k and v, which
    changes nothing if that dtype holds their format. With `OutputForDelta.UNROUNDED` the forward pass runs twice. Autocast does
    not affect either pass: each keeps its own formats.

    Args:
        q: `[batch, heads, queries, dim]`.
        k: `[batch, kv_heads, keys, dim]`, of the dtype of q.
        v: `[batch, kv_heads, keys, values]`, of the dtype of q.
        forward: the forward pass, which saves O and LSE.
        backward: the backward pass; its own `forward`, if it has one, is not used.
        mask: which keys a query sees.
        scale: of the scores; `1/sqrt(dim)` unless given.

    Raises:
        BadInput: for a dtype in which models do not compute, and for dtypes or shapes that do not fit together.
        Unsupported: if the forward pass returns no LSE, or not the O that `backward` reads.
    """
    return applied(q, k, v, _BySaved(forward, backward), mask, scale)


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


class BySaved:
    """Implements `Differentiable` where the backward pass takes the O and the LSE of the field `forward`."""

    @property
    def primal(self) -> Attention:
        """See `Differentiable`."""
        forward: Attention = self.forward  # type: ignore[attr-defined]
        return forward

    @property
    def pair(self) -> Pair:
        """See `Paired`."""
        assert isinstance(self, FromSaved)
        return _BySaved(self.primal, self)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """The forward pass, then `backward` on what it saved. Takes rounded inputs; shapes as in `Gradients`."""
        assert isinstance(self, FromSaved)
        check_backward_shapes(q, k, v, do, mask)
        return self.backward(q, k, v, do, saved_by(self.primal, self.reads, (q, k, v), mask, scale), mask, scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """See `Differentiable`."""
        return applied(q, k, v, self.pair, mask, scale)


@runtime_checkable
class Pair(Protocol):
    """A forward pass, and the backward pass that follows it."""

    def run(self, inputs: tuple[Tensor, ...], mask: Mask, scale: float | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """O, and the tensors kept for `gradients`."""
        ...

    def gradients(
        self, inputs: tuple[Tensor, ...], do: Tensor, kept: tuple[Tensor, ...], mask: Mask, scale: float | None
    ) -> Gradients: ...


@runtime_checkable
class Paired(Protocol):
    """An implementation of `Differentiable` whose two passes can be called separately, which torch's autograd does not allow."""

    @property
    def pair(self) -> Pair: ...


def whole(forward: Attention, backward: Backward) -> Pair:
    """A pair whose backward pass runs its own forward pass again, and uses nothing that the first one saved."""
    return _Whole(forward, backward)


@dataclass(frozen=True)
class _BySaved:
    forward: Attention
    backward: FromSaved

    def run(self, inputs: tuple[Tensor, ...], mask: Mask, scale: float | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = _seen(self.forward, inputs)
        output = self.forward(q, k, v, mask, scale)
        if self.backward.reads is OutputForDelta.UNROUNDED:
            q, k, v = inputs
            saved = saved_by(self.forward, self.backward.reads, (q, k, v), mask, scale)
        else:
            saved = saved_of(output, self.forward)
        return output.out, (saved.out, saved.lse)

    def gradients(
        self, inputs: tuple[Tensor, ...], do: Tensor, kept: tuple[Tensor, ...], mask: Mask, scale: float | None
    ) -> Gradients:
        q, k, v, do = _seen(self.backward, (*inputs, do))
        return self.backward.backward(q, k, v, do, Saved(*kept), mask, scale)


@dataclass(frozen=True)
class _Whole:
    forward: Attention
    backward: Backward

    def run(self, inputs: tuple[Tensor, ...], mask: Mask, scale: float | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = _seen(self.forward, inputs)
        return self.forward(q, k, v, mask, scale).out, ()

    def gradients(
        self, inputs: tuple[Tensor, ...], do: Tensor, kept: tuple[Tensor, ...], mask: Mask, scale: float | None
    ) -> Gradients:
        q, k, v, do = _seen(self.backward, (*inputs, do))
        return self.backward(q, k, v, do, mask, scale)


def applied(q: Tensor, k: Tensor, v: Tensor, pair: Pair, mask: Mask, scale: float | None) -> Tensor:
    """O computed by the forward pass of a pair, with gradients computed by its backward pass; see `differentiable`."""
    check_dtypes(q, k, v)
    result: Tensor = _Attend.apply(q, k, v, pair, mask, scale)  # type: ignore[no-untyped-call]
    return result


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pair: Pair, mask: Mask, scale: float | None) -> Tensor:
        with uncast(q):
            out, kept = pair.run((q, k, v), mask, scale)
            ctx.save_for_backward(q, k, v, *kept)
            ctx.rest = pair, mask, scale
            return _as(out, q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        pair, mask, scale = ctx.rest
        if 0 in do.stride():  # the gradient of a sum is a broadcast tensor, which kernels cannot read
            do = do.contiguous()
        with uncast(q):
            found = pair.gradients((q, k, v), do, tuple(kept), mask, scale)
            return _as(found.dq, q.dtype), _as(found.dk, k.dtype), _as(found.dv, v.dtype), None, None, None


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return _as(x, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _as(gradient, ctx.dtype), None


def _seen(subject: Attention | Backward, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs as a pass sees them.

    If the pass rounds to the format that they already have, rounding is the identity, and a kernel takes them unchanged.
    """
    fmt = _FORMATS[inputs[0].dtype]
    takes = isinstance(subject, Held) and subject.storage is not None
    return inputs if takes and subject.input_key == (Cast(fmt), torch.float32) else subject.round_inputs(*inputs)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a dtype, rounded once: from FP64 to 16 bits torch's own conversion would round twice."""
    if x.dtype == torch.float64 and dtype in (torch.float16, torch.bfloat16):
        return Cast(_FORMATS[dtype])(x).to(dtype)
    return x.to(dtype)
