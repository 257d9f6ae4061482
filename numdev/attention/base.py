"""Every implementation of attention: what its passes take, return and declare."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.attention.cost import CostModel
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Policy, Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import Exponential, OnlineSoftmax, OutputForDelta, Recompute
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiling import KernelLaunch, Order, Tiling
from numdev.errors import BadInput, NotHonoured, Unsupported

Kind = TypeVar("Kind", bound="Implementation")
AnyPrecision = TypeVar("AnyPrecision", Precision, BackwardPrecision)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The tensors of a run, which are the fields of a result, the primary one first."""

    # Events of the run, as rates or counts; see `numdev.attention.recurrence`
    counters: dict[str, float] = field(default_factory=dict)
    launch: KernelLaunch = KernelLaunch()  # the compiled kernel that really ran; empty for tensor operations

    @property
    def kernel(self) -> str:
        """The kernel that ran, as results show it."""
        return str(self.launch)

    def tensors(self) -> dict[str, Tensor]:
        """The outputs by name, which is what a measurement compares."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


Stages = tuple[Callable[[], tuple[Tensor, ...]], Callable[..., Any]]
"""What a call does before its kernel, and the kernel on what that returns."""


@dataclass(frozen=True)
class Output(Result):
    """One result of attention."""

    out: Float[Tensor, "batch heads queries dim"]  # `softmax(scale Q K^T) V`; rows that see no key are 0
    # Natural log of the sum of exponentials of the scaled scores; -inf for rows that see no key. None where an implementation
    # does not return it
    lse: Float[Tensor, "batch heads queries"] | None


@dataclass(frozen=True)
class Gradients(Result):
    """The gradients of `sum(dO * O)` with respect to q, k and v."""

    dq: Float[Tensor, "batch heads queries dim"]  # `scale dS K`; 0 for rows that see no key
    # `scale dS^T Q`, summed over the heads that share a KV head; 0 for keys that no query sees
    dk: Float[Tensor, "batch kv_heads keys dim"]
    dv: Float[Tensor, "batch kv_heads keys values"]  # `P^T dO`, summed likewise
    # `rowsum(dO * O) = rowsum(dP * P)`; 0 for rows that see no key. None where an implementation does not return it
    delta: Float[Tensor, "batch heads queries"] | None
    # dS, summed over what shares a number of the mask's bias; None where that is not learned
    dbias: Float[Tensor, "batch_or_1 heads_or_1 queries keys"] | None = None


@dataclass(frozen=True)
class Saved:
    """O and LSE as a forward pass keeps them for the backward pass; LSE is -inf for rows that see no key."""

    out: Float[Tensor, "batch heads queries values"]
    lse: Float[Tensor, "batch heads queries"]


@dataclass(frozen=True)
class KernelArithmetic(Generic[AnyPrecision]):
    """How a kernel computes on one shape under one mask, as far as it is known: what its emulation is made of.

    Forward, `br` changes no bit of a row. Backward, `br` and `query_order` decide the order in which dK and dV are added up, `bc`
    and `order` that of dQ. None is what is not known, and `why` says why.
    """

    precision: AnyPrecision
    softmax: OnlineSoftmax = OnlineSoftmax(exp=Exponential.EXP2)  # the recurrence of a forward pass
    recompute: Recompute = Recompute(exponential=Exponential.EXP2)  # what a backward pass computes again
    tiling: Tiling | None = None  # all of the order but `query_order`, where nothing of it is left to choose
    br: int | None = None
    bc: int | None = None
    order: Order | None = None  # of the tiles of keys. Additions by atomics have none: `Order.RANDOM` draws one
    query_order: Order | None = None  # of the tiles of queries; with `tiling` None where it is the same
    splits: int | None = None
    split_size: int | None = None
    turns: Turns | None = None  # with `tiling`, an order of query tiles for each tile of keys
    why: str = "it is not published"


class Implementation:
    """An implementation of either pass: a frozen dataclass, whose fields are its settings.

    What it does not declare itself follows from its precision policy. It raises `Unsupported`, naming the field, for what it
    cannot do.
    """

    unknown: ClassVar[str] = "it is not published"
    """Why its tiles are not known."""

    if TYPE_CHECKING:  # at run time a dataclass would take the property for the default of its field

        @property
        def precision(self) -> Any:
            """The format of each step."""

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each output by its name, the primary one first: an output's ulp and u are those of its own format."""
        raise NotImplementedError

    @property
    def format(self) -> Format:
        """That of the primary output."""
        return next(iter(self.formats.values()))

    @property
    def input_key(self) -> Hashable:
        """Equal where `round_inputs` is the same function, so that golden is computed once."""
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
        """Settings that it accepts, but does not read as it is, and the setting under which it would."""
        return {}

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        """A refusal of each setting whose value is accepted and can change no bit on this shape; None for an unknown one.

        Of what the number of keys decides, splits alone are refused: a sum, a threshold or an order of one tile is what a sweep
        over it begins with.
        """
        return []

    def replicate(self: Kind, seed: int) -> Kind:
        """The implementation of one replicate: stochastic rounding draws anew in each, in both passes."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        drawn = {name: part.replicate(seed) for name, part in parts.items() if isinstance(part, (Policy, Implementation))}
        changed: dict[str, Any] = {name: part for name, part in drawn.items() if part is not parts[name]}
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    def cost_model(self, launch: KernelLaunch) -> CostModel | None:
        """The cost model of a call that was launched so; None where no model counts its traffic."""
        return None

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Any]:
        """How it computes on a problem and orders the tiles, as far as it is known, and why the rest is not."""
        return KernelArithmetic(self.precision, why=self.unknown)


class Attention(Implementation):
    """A forward pass."""

    @property
    def formats(self) -> dict[str, Format]:
        """`out` is rounded by the last step, `lse` as the row sum that it is the logarithm of."""
        return {"out": self.precision.output.to, "lse": self.precision.row_sum.accumulate.to}

    def round_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs as the implementation sees them: what golden receives for the arithmetic error."""
        rounded: tuple[Tensor, Tensor, Tensor] = self.precision.round_inputs(q, k, v)
        return rounded

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Attention on rounded inputs; `scale` is `1/sqrt(head_dim)` unless given."""
        raise NotImplementedError

    def bare(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """The call that is timed, without what `__call__` does for its caller's sake, such as copying the inputs."""
        return self(q, k, v, mask, scale)

    def stages(self, inputs: tuple[Tensor, ...], mask: Mask, scale: float | None = None) -> Stages | None:
        """What a call does before its kernel, and the kernel on what that returned, to be timed apart; None for one stage."""
        return None

    def unrounded(self) -> Attention:
        """Its copy that returns O as it is before the last cast; Unsupported if it can only return the rounded one."""
        raise Unsupported("recompute.output", f"{type(self).__name__} can only return its output rounded; use rounded")

    def leaving(self, reads: OutputForDelta) -> Attention:
        """The forward pass, made to return the O that a backward pass reads; see `unrounded`."""
        return self if reads is OutputForDelta.ROUNDED else self.unrounded()

    def saved(self, output: Output) -> Saved:
        """The O and the LSE of a result; raises Unsupported if it holds no LSE."""
        if output.lse is None:
            raise Unsupported("forward", f"{type(self).__name__} returns no LSE, from which P is recomputed")
        return Saved(output.out, output.lse)


def softmax_scale(q: Tensor, scale: float | None) -> float:
    """`1/sqrt(d)` (Vaswani et al. 2017, equation 1) unless a scale is given."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, adds: bool = False) -> None:
    """Raise BadInput, naming the field, unless q, k, v and the mask fit together.

    Unsupported, unless one `adds` them, for a bias, and with it for a softcap and dropout.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 or 0 in tensor.shape:
            raise BadInput(name, tuple(tensor.shape), "give [batch, heads, tokens, head_dim], none of them 0")
    if k.shape[:3] != v.shape[:3]:
        raise BadInput("v", tuple(v.shape), f"it must have the batch, heads and tokens of k, {tuple(k.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise BadInput("k", tuple(k.shape), f"it must have the batch and head_dim of q, {tuple(q.shape)}")
    if q.shape[1] % k.shape[1]:
        raise BadInput("problem.kv_heads", k.shape[1], f"it must divide the {q.shape[1]} heads of q")
    mask.check(q.shape[0], k.shape[-2], q.shape[1], q.shape[-2])
    refused = {
        "attn_mask": (mask.bias, "adds no tensor to the scores, and reads no mask from one"),
        "problem.softcap": (mask.softcap, "caps no scores"),
        "dropout": (mask.dropout, "drops no entries of P"),
    }
    for name, (value, why) in refused.items():
        if value is not None and not adds:
            raise Unsupported(name, f"this implementation {why}; use one of torch operations, as Tiled")


def check_backward_shapes(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, saved: Saved | None = None, *, adds: bool = False
) -> None:
    """As `check_shapes`, and BadInput unless do and what was saved fit too."""
    check_shapes(q, k, v, mask, adds=adds)
    expected = (*q.shape[:-1], v.shape[-1])
    if do.shape != expected:
        raise BadInput("do", tuple(do.shape), f"it must have the shape of the output, {tuple(expected)}")
    if saved is not None:
        for name, tensor, shape in (("out", saved.out, expected), ("lse", saved.lse, q.shape[:-1])):
            if tensor.shape != shape:
                hint = f"give {tuple(shape)}, as the forward pass on q, k and v does"
                raise BadInput(f"saved.{name}", tuple(tensor.shape), hint)


def group_heads(q: Tensor, kv_heads: int) -> Float[Tensor, "batch kv_heads group queries dim"]:
    """q with the heads that share a KV head as an own dimension (GQA, Ainslie et al. 2023)."""
    return q.unflatten(1, (kv_heads, -1))


Report = Callable[[Gradients], None]
Passes = tuple[Callable[[], Output], Callable[[Output], Gradients]]
"""A forward pass, and the backward pass from what it returned; each can be repeated."""


class Backward(Implementation):
    """A backward pass after a forward pass, with which a model can be trained; its format is that of the gradients.

    An implementation is `backward` and the O that this reads; timing and training follow from them.
    """

    recompute: Recompute = Recompute()
    learns: ClassVar[bool] = False
    """Whether it has a gradient by what a mask adds to the scores."""

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
        check_backward_shapes(q, k, v, do, mask, adds=True)  # either pass refuses what it has not
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
        from numdev.attention.differentiable import differentiable  # late: it knows this class

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
