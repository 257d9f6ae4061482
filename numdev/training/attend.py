"""Attention exchanged under an unmodified model, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from numdev.attention.base import Attention, Backward
from numdev.attention.differentiable import check_dtypes, rounded_once, uncast
from numdev.attention.mask import Mask
from numdev.errors import BadInput, Unsupported
from numdev.training.call import Arguments, Call, MaskReader
from numdev.training.interception import CallCounts, Interception, Onward


@runtime_checkable
class Trainable(Protocol):
    """An implementation that computes attention under a model."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """O in the dtype of q, k and v, with the gradients of the implementation."""
        ...


Variant: TypeAlias = Attention | Backward | Trainable


@contextmanager
def attend(variant: Variant, *, read_masks: bool = False) -> Iterator[CallCounts]:
    """Within it, every call of `torch.nn.functional.scaled_dot_product_attention` is computed by `variant`.

    The model is not changed. A variant of the backward pass (`TiledBackward`, `NaiveBackward`, `TritonBackward`,
    `SdpaBackward`, ...) gives O and the gradients; one of the forward pass alone gives O where no gradient is recorded.
    `nn.MultiheadAttention` and `nn.TransformerEncoder` call that function too: their fused path is switched off meanwhile. Calls
    are exchanged on the thread that enters, and in the gradients that it asks for within the context. Nothing waits for a device.

        >>> with nd.attend(variant) as seen:
        ...     model(x).sum().backward()
        >>> seen.require()

    Args:
        variant: of the backward pass, or of the forward pass.
        read_masks: whether a mask tensor on a GPU is read, for which the host waits; False refuses it.

    Yields:
        what became of the calls: `calls`, `missed`, `elsewhere`, and `require()`, which raises where a call was missed or none
        was made. Leaving the context after no call, or after a missed one, warns.

    Raises:
        BadInput: in a call, for arguments that do not fit together.
        Unsupported: in a call, naming the argument, for dropout, for a mask that is added to the scores or that no `Mask` states,
            and for inputs that require a gradient where the variant has none.
    """
    seen = CallCounts()
    with exchanging(variant, seen, read_masks):
        yield seen
    seen.warn("attend", stacklevel=4)


def exchanging(variant: Variant, seen: CallCounts, read_masks: bool) -> Interception:
    """The context of `attend`, which may be entered again and again."""
    return Interception(_Exchange(trainable(variant), MaskReader(read_masks)), seen)


def trainable(variant: Variant) -> Trainable:
    """`variant` as it computes under a model.

    Raises:
        BadInput: for what is no implementation of attention.
    """
    if isinstance(variant, Trainable):
        return variant
    if isinstance(variant, Attention) and "out" in variant.formats:
        return ForwardAlone(variant)
    hint = "give an implementation of attention, or of its backward pass with a method `attend`"
    raise BadInput("variant", type(variant).__name__, hint)


@dataclass(frozen=True)
class ForwardAlone:
    """A forward pass under a model that is not trained."""

    primal: Attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """O in the dtype of q.

        Raises:
            Unsupported: where a gradient is recorded.
        """
        check_dtypes(q, k, v)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            name = type(self.primal).__name__
            hint = f"use an implementation of the backward pass (such as TiledBackward({name}(...), ...)), or torch.no_grad()"
            raise Unsupported("variant", f"{name} has no backward pass; {hint}")
        with torch.no_grad(), uncast(q):
            return rounded_once(self.primal(*self.primal.round_inputs(q, k, v), mask, scale).out, q.dtype)


@dataclass(frozen=True)
class _Exchange:
    """Answers every call by one implementation."""

    variant: Trainable
    reader: MaskReader

    def answer(self, arguments: Arguments, onward: Onward) -> Tensor:
        call = Call.of(arguments, self.reader)
        return call.shaped(self.variant.attend(call.q, call.k, call.v, call.mask, call.scale))
