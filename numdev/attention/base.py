"""Every implementation of attention: what its passes take and return, and what it declares of itself."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.attention.cost import CostModel
from numdev.attention.kernel_arithmetic import KernelArithmetic
from numdev.attention.kernel_launch import KernelLaunch
from numdev.attention.mask import Mask
from numdev.attention.problem import Shape
from numdev.errors import BadInput, NotHonoured

Kind = TypeVar("Kind", bound="Implementation")


@dataclass(frozen=True)
class Output:
    """One result of attention, and the events that the run counted.

    Attributes:
        out: `softmax(scale Q K^T) V`; rows that see no key are 0.
        lse: natural log of the sum of exponentials of the scaled scores; -inf for rows that see no key. None where an
            implementation does not return it.
        counters: events of the run, as rates or counts; see `numdev.attention.counters`.
        launch: the compiled kernel that really ran; empty for tensor operations.
    """

    out: Float[Tensor, "batch heads queries dim"]
    lse: Float[Tensor, "batch heads queries"] | None
    counters: dict[str, float] = field(default_factory=dict)
    launch: KernelLaunch = KernelLaunch()

    @property
    def kernel(self) -> str:
        """The kernel that ran, as results show it."""
        return str(self.launch)

    def tensors(self) -> dict[str, Tensor]:
        """The outputs by name, which is what a measurement compares."""
        return {"out": self.out} if self.lse is None else {"out": self.out, "lse": self.lse}


@dataclass(frozen=True)
class Saved:
    """The tensors that a forward pass keeps for the backward pass.

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
                mend = f"give {tuple(shape)}, as the forward pass on q, k and v does"
                raise BadInput(f"saved.{name}", tuple(tensor.shape), mend)


@dataclass(frozen=True)
class Gradients:
    """The gradients of `sum(dO * O)` with respect to q, k and v.

    Attributes:
        dq: `scale dS K`; 0 for rows that see no key.
        dk: `scale dS^T Q`, summed over the heads that share a KV head; 0 for keys that no query sees.
        dv: `P^T dO`, summed likewise.
        delta: `rowsum(dO * O) = rowsum(dP * P)`; 0 for rows that see no key. None where an implementation does not return it.
        counters, launch: as those of `Output`.
    """

    dq: Float[Tensor, "batch heads queries dim"]
    dk: Float[Tensor, "batch kv_heads keys dim"]
    dv: Float[Tensor, "batch kv_heads keys values"]
    delta: Float[Tensor, "batch heads queries"] | None
    counters: dict[str, float] = field(default_factory=dict)
    launch: KernelLaunch = KernelLaunch()

    @property
    def kernel(self) -> str:
        """The kernel that ran, as results show it."""
        return str(self.launch)

    def tensors(self) -> dict[str, Tensor]:
        """The outputs by name, the primary one first, which is what a measurement compares."""
        gradients = {"dq": self.dq, "dk": self.dk, "dv": self.dv}
        return gradients if self.delta is None else gradients | {"delta": self.delta}


class _Declares(Protocol):
    @property
    def formats(self) -> dict[str, Format]:
        """The format of each output by its name, the primary one first: an output's ulp and u are those of its own format."""
        ...

    @property
    def format(self) -> Format:
        """Format of the primary output."""
        ...

    @property
    def input_key(self) -> Hashable:
        """Equal for implementations whose `round_inputs` is the same function, so that golden is computed once."""
        ...


@runtime_checkable
class Attention(_Declares, Protocol):
    """An implementation of attention. It raises `Unsupported`, naming the field, for what it cannot do."""

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs as the implementation sees them: what golden receives for the arithmetic error."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Attention on rounded inputs; `scale` is `1/sqrt(head_dim)` unless given."""
        ...


@runtime_checkable
class Backward(_Declares, Protocol):
    """A forward pass, then a backward pass. It raises `Unsupported`, naming the field, for a request that it cannot meet."""

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inputs as the implementation sees them."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """The gradients on rounded inputs; `scale` is `1/sqrt(head_dim)` unless given."""
        ...


@runtime_checkable
class Differentiable(Backward, Protocol):
    """An implementation of both passes that a model can be trained with."""

    @property
    def primal(self) -> Attention:
        """The forward pass that computes O."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """O in the dtype of q, k and v, whose gradients are those of the implementation; see `differentiable`."""
        ...


@runtime_checkable
class KeepsOutput(Protocol):
    """A forward pass that can return its output unrounded."""

    def unrounded(self) -> Attention: ...


class Implementation:
    """An implementation of either pass in numdev; what it does not declare itself follows from its precision policy."""

    unknown: ClassVar[str] = "it is not published"
    """Why its tiles are not known."""

    if TYPE_CHECKING:  # at run time a dataclass would take the property for the default of its field

        @property
        def precision(self) -> Any:
            """The format of each step."""

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each output by its name, the primary one first."""
        raise NotImplementedError

    @property
    def format(self) -> Format:
        """Of the primary output."""
        return next(iter(self.formats.values()))

    @property
    def input_key(self) -> Hashable:
        """Equal where the rounding of the inputs is."""
        return self.precision.inputs, self.precision.carrier

    @property
    def storage(self) -> torch.dtype | None:
        """The dtype in which a call takes its inputs without converting them; None for that of `round_inputs`."""
        return None

    @property
    def is_tf32(self) -> bool:
        """Whether it multiplies FP32 in TF32."""
        return False

    @property
    def idle(self) -> Mapping[str, str]:
        """Settings that it honours, but does not read as it is, and the setting under which it would."""
        return {}

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        """See `numdev.attention.honours.OnShape`."""
        return []

    def replicate(self: Kind, seed: int) -> Kind:
        """The implementation of one replicate: stochastic rounding draws anew in each."""
        precision = self.precision.replicate(seed)
        return self if precision is self.precision else replace(self, precision=precision)  # type: ignore[type-var]

    def cost_model(self, launch: KernelLaunch) -> CostModel | None:
        """The cost model of a call that was launched so; None where no model counts its traffic."""
        return None

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Any]:
        """How it computes on a problem and orders the tiles, as far as it is known, and why the rest is not."""
        return KernelArithmetic(self.precision, why=self.unknown)


class ForwardPass(Implementation):
    """The defaults of a forward pass."""

    @property
    def formats(self) -> dict[str, Format]:
        """`out` is rounded by the last step, `lse` as the row sum that it is the logarithm of."""
        return {"out": self.precision.output.to, "lse": self.precision.row_sum.accumulate.to}

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs in the policy's format, in the carrier."""
        rounded: tuple[Tensor, Tensor, Tensor] = self.precision.round_inputs(q, k, v)
        return rounded

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """See `Attention`."""
        raise NotImplementedError

    def bare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """The call that is timed, without what `__call__` does for its caller's sake, such as copying the inputs."""
        return self(q, k, v, mask, scale)


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


def check_backward_shapes(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask) -> None:
    """Raise BadInput, naming the field, unless q, k, v, do and the mask fit together."""
    check_shapes(q, k, v, mask)
    expected = (*q.shape[:-1], v.shape[-1])
    if do.shape != expected:
        raise BadInput("do", tuple(do.shape), f"it must have the shape of the output, {tuple(expected)}")


def group_heads(q: Tensor, kv_heads: int) -> Float[Tensor, "batch kv_heads group queries dim"]:
    """q with the heads that share a KV head as an own dimension (GQA, Ainslie et al. 2023)."""
    return q.unflatten(1, (kv_heads, -1))
