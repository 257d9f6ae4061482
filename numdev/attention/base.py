"""What every implementation of attention takes and returns."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.formats import FP32, FP64, Format
from numdev.attention.cost import CostModel
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.ran import Ran
from numdev.attention.walk import Walk
from numdev.errors import BadInput


@dataclass(frozen=True)
class Output:
    """One result of attention, and what the run counted of itself.

    Attributes:
        out: `softmax(scale Q K^T) V`; rows that see no key are 0.
        lse: natural log of the sum of exponentials of the scaled scores; -inf for rows that see no key. None where an
            implementation does not return it.
        counters: events of the run, as rates or counts; see `numdev.attention.tiled.Counters`.
        ran: the compiled kernel that really ran, with its launch settings; empty for tensor operations.
    """

    out: Float[Tensor, "batch heads queries dim"]
    lse: Float[Tensor, "batch heads queries"] | None
    counters: dict[str, float] = field(default_factory=dict)
    ran: Ran = Ran()

    @property
    def kernel(self) -> str:
        """What ran, as results show it."""
        return str(self.ran)

    def tensors(self) -> dict[str, Tensor]:
        """The outputs by name, which is what a measurement compares."""
        return {"out": self.out} if self.lse is None else {"out": self.out, "lse": self.lse}


@runtime_checkable
class Attention(Protocol):
    """An implementation of attention. It raises `Unsupported`, naming the field, for what it cannot do."""

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each output by its name, the primary one first: an output's ulp and u are those of its own format."""
        ...

    @property
    def format(self) -> Format:
        """Format of the primary output, `out`."""
        ...

    @property
    def input_key(self) -> Hashable:
        """Equal for implementations whose `round_inputs` is the same function, so that golden is computed once."""
        ...

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs as the implementation sees them: what golden receives for the arithmetic error."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Attention on rounded inputs; `scale` is `1/sqrt(head_dim)` unless given."""
        ...


@runtime_checkable
class Modelled(Attention, Protocol):
    """An implementation that declares its own cost model."""

    def cost_model(self, ran: Ran) -> CostModel | None:
        """What the cost model must know of a call that ran as `ran` says; None where no model counts its traffic."""
        ...


@runtime_checkable
class Emulated(Attention, Protocol):
    """An implementation that declares its own emulation."""

    def walk(self, shape: Shape, mask: Mask) -> Walk:
        """How it computes and walks over the keys, as far as it is known, and why the rest is not."""
        ...


@runtime_checkable
class Held(Protocol):
    """The dtype in which an implementation takes its inputs, and how it multiplies them."""

    @property
    def storage(self) -> torch.dtype | None:
        """The dtype in which a call takes q, k and v without converting them; None for that of `round_inputs`."""
        ...

    @property
    def is_tf32(self) -> bool:
        """Whether it multiplies FP32 in TF32."""
        ...


@runtime_checkable
class Timed(Modelled, Held, Protocol):
    """An implementation whose speed is measured."""

    def bare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """The call that is timed, without what `__call__` does for its caller's sake, such as copying the inputs."""
        ...


class AsRounded:
    """The defaults of `Held`: a call takes what `round_inputs` returns, and multiplies FP32 in FP32."""

    @property
    def storage(self) -> torch.dtype | None:
        """See `Held`."""
        return None

    @property
    def is_tf32(self) -> bool:
        """See `Held`."""
        return False


class Primary(AsRounded):
    """The defaults of an implementation.

    It has the format of its primary output, no cost model and an unknown walk, and its whole call is timed.
    """

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each output by its name, the primary one first."""
        raise NotImplementedError

    @property
    def format(self) -> Format:
        """Of the primary output, `out`."""
        return self.formats["out"]

    def cost_model(self, ran: Ran) -> CostModel | None:
        """See `Modelled`."""
        return None

    def walk(self, shape: Shape, mask: Mask) -> Walk:
        """See `Emulated`."""
        return Walk(Precision.kernel(self.format))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """See `Attention`."""
        raise NotImplementedError

    def bare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """See `Timed`."""
        return self(q, k, v, mask, scale)


def kernel_formats(fmt: Format) -> dict[str, Format]:
    """Of a kernel whose output is in `fmt`: its LSE is in FP32, in FP64 where it computes in FP64."""
    return {"out": fmt, "lse": FP64 if fmt == FP64 else FP32}


class UnderPolicy(Primary):
    """What follows from a precision policy alone, for the implementations that have one."""

    precision: Precision

    @property
    def formats(self) -> dict[str, Format]:
        """`out` is rounded by the last step, `lse` as the row sum that it is the logarithm of."""
        return {"out": self.precision.output.to, "lse": self.precision.row_sum.accumulate.to}

    @property
    def input_key(self) -> Hashable:
        """Equal where the rounding of the inputs is."""
        return self.precision.inputs, self.precision.carrier

    @property
    def idle(self) -> dict[str, str]:
        """See `numdev.attention.honours.Honouring`."""
        return self.precision.idle

    def replicate(self, seed: int) -> UnderPolicy:
        """The implementation of one replicate; see `Precision.replicate`."""
        precision = self.precision.replicate(seed)
        return self if precision is self.precision else replace(self, precision=precision)  # type: ignore[type-var]

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs in the policy's format, in the carrier."""
        return self.precision.round_inputs(q, k, v)


def softmax_scale(q: Tensor, scale: float | None) -> float:
    """`1/sqrt(d)` (Vaswani et al. 2017, equation 1) unless a scale is given."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    """Raise BadInput, naming the field, unless q, k, v and the mask fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 or 0 in tensor.shape:
            raise BadInput(name, tuple(tensor.shape), "give [batch, heads, tokens, head_dim], none of them 0")
    if k.shape[:3] != v.shape[:3]:
        raise BadInput("v", tuple(v.shape), f"it must have the batch, heads and tokens of k, {tuple(k.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise BadInput("k", tuple(k.shape), f"it must have the batch and head_dim of q, {tuple(q.shape)}")
    if q.shape[1] % k.shape[1]:
        raise BadInput("problem.kv_heads", k.shape[1], f"it must divide the {q.shape[1]} heads of q")
    mask.check(q.shape[0], k.shape[-2])


def group_heads(q: Tensor, kv_heads: int) -> Float[Tensor, "batch kv_heads group queries dim"]:
    """q with the heads that share a KV head as an own dimension (GQA, Ainslie et al. 2023)."""
    return q.unflatten(1, (kv_heads, -1))
