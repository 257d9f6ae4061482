"""What every implementation of attention's backward pass takes and returns."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.formats import FP32, FP64, Format
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.backward.recompute import OutputForDelta
from numdev.attention.base import Attention, Output, check_shapes
from numdev.attention.mask import Mask
from numdev.attention.ran import Ran
from numdev.errors import BadInput, Unsupported


@dataclass(frozen=True)
class Saved:
    """What a forward pass keeps for the backward pass.

    Attributes:
        out: O, from which delta may be computed.
        lse: natural log of the sum of exponentials of the scaled scores; -inf for rows that see no key.
    """

    out: Float[Tensor, "batch heads queries values"]
    lse: Float[Tensor, "batch heads queries"]

    def check(self, q: Tensor, v: Tensor) -> None:
        """Raise BadInput unless the shapes are those that a forward pass on q and v gives."""
        for name, tensor, shape in (("out", self.out, (*q.shape[:-1], v.shape[-1])), ("lse", self.lse, q.shape[:-1])):
            if tensor.shape != shape:
                raise BadInput(
                    f"saved.{name}", tuple(tensor.shape), f"give {tuple(shape)}, as the forward pass on q, k and v does"
                )


@dataclass(frozen=True)
class Gradients:
    """The gradients of `sum(dO * O)` with respect to q, k and v.

    Attributes:
        dq: `scale dS K`; 0 for rows that see no key.
        dk: `scale dS^T Q`, summed over the heads that share a KV head; 0 for keys that no query sees.
        dv: `P^T dO`, summed likewise.
        delta: `rowsum(dO * O) = rowsum(dP * P)`; 0 for rows that see no key. None where an implementation does not return it.
        counters: events of the run, as rates or counts.
        ran: the compiled kernel that really ran, with its launch settings; empty for tensor operations.
    """

    dq: Float[Tensor, "batch heads queries dim"]
    dk: Float[Tensor, "batch kv_heads keys dim"]
    dv: Float[Tensor, "batch kv_heads keys values"]
    delta: Float[Tensor, "batch heads queries"] | None
    counters: dict[str, float] = field(default_factory=dict)
    ran: Ran = Ran()

    @property
    def kernel(self) -> str:
        """The kernel that ran, as results show it."""
        return str(self.ran)

    def tensors(self) -> dict[str, Tensor]:
        """The outputs by name, the primary one first, which is what a measurement compares."""
        gradients = {"dq": self.dq, "dk": self.dk, "dv": self.dv}
        return gradients if self.delta is None else gradients | {"delta": self.delta}


@runtime_checkable
class Backward(Protocol):
    """A forward pass, then a backward pass. It raises `Unsupported`, naming the field, for a request that it cannot meet."""

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each output by its name, the primary one, `dq`, first."""
        ...

    @property
    def format(self) -> Format:
        """Format of the primary output."""
        ...

    @property
    def input_key(self) -> Hashable:
        """Equal for implementations whose `round_inputs` is the same function, so that golden is computed once."""
        ...

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inputs as the implementation sees them: what golden receives for the arithmetic error."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """The gradients on rounded inputs; `scale` is `1/sqrt(head_dim)` unless given."""
        ...


@runtime_checkable
class FromSaved(Backward, Protocol):
    """An implementation whose backward pass takes what any forward pass saved."""

    @property
    def reads(self) -> OutputForDelta:
        """Which O `backward` takes: rounded or unrounded."""
        ...

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone, on rounded inputs."""
        ...


@runtime_checkable
class Differentiable(Backward, Protocol):
    """An implementation of both passes that a model can be trained with."""

    @property
    def primal(self) -> Attention:
        """The forward pass that computes O."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """O in the dtype of q, k and v, whose gradients are those of the implementation; see `function.differentiable`."""
        ...


@runtime_checkable
class KeepsOutput(Protocol):
    """A forward pass that can return its output unrounded."""

    def unrounded(self) -> Attention: ...


class UnderBackwardPolicy:
    """What follows from a precision policy alone, for the implementations that have one."""

    precision: BackwardPrecision

    @property
    def formats(self) -> dict[str, Format]:
        """The gradients are rounded by the last step, `delta` by its own."""
        return gradient_formats(self.precision.output.to, self.precision.delta.accumulate.to)

    @property
    def format(self) -> Format:
        """Of the primary output, `dq`."""
        return self.precision.format

    @property
    def input_key(self) -> Hashable:
        """Equal where the rounding of the inputs is."""
        return self.precision.inputs, self.precision.carrier

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inputs in the policy's format, in the carrier."""
        return self.precision.round_inputs(q, k, v, do)


class UnderKernelPolicy(UnderBackwardPolicy):
    """What follows from the format of an implementation that has no other policy than `kernel(fmt)`."""

    fmt: Format

    @property
    def precision(self) -> BackwardPrecision:  # type: ignore[override]
        """The policy that it has."""
        return BackwardPrecision.kernel(self.fmt)


def gradient_formats(fmt: Format, delta: Format | None = None) -> dict[str, Format]:
    """The formats of all outputs if gradients are in `fmt`: a kernel's delta is in FP32, or in FP64 if it computes in FP64."""
    return {"dq": fmt, "dk": fmt, "dv": fmt, "delta": delta or (FP64 if fmt == FP64 else FP32)}


def saved_by(
    forward: Attention, reads: OutputForDelta, inputs: tuple[Tensor, Tensor, Tensor], mask: Mask, scale: float | None
) -> Saved:
    """What a forward pass saves on q, k and v, rounded by its own policy.

    Raises:
        Unsupported: if it returns no LSE, or if O is to be unrounded and it can only return the rounded one.
    """
    forward = leaving(forward, reads)
    return saved_of(forward(*forward.round_inputs(*inputs), mask, scale), forward)


def leaving(forward: Attention, reads: OutputForDelta) -> Attention:
    """The forward pass, made to return the O that the backward pass reads.

    Raises:
        Unsupported: if this is the unrounded O, and it can only return the rounded one.
    """
    if reads is OutputForDelta.ROUNDED:
        return forward
    if not isinstance(forward, KeepsOutput):
        raise Unsupported("recompute.output", f"{type(forward).__name__} can only return its output rounded; use rounded")
    return forward.unrounded()


def saved_of(output: Output, forward: Attention) -> Saved:
    """What a result of `forward` saves; raises Unsupported if it holds no LSE."""
    if output.lse is None:
        raise Unsupported("forward", f"{type(forward).__name__} returns no LSE, from which P is recomputed")
    return Saved(output.out, output.lse)


def check_backward_shapes(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask) -> None:
    """Raise BadInput, naming the field, unless q, k, v, do and the mask fit together."""
    check_shapes(q, k, v, mask)
    expected = (*q.shape[:-1], v.shape[-1])
    if do.shape != expected:
        raise BadInput("do", tuple(do.shape), f"it must have the shape of the output, {tuple(expected)}")
