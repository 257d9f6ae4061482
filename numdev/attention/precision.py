"""Precision policies: which number format each arithmetic step of attention uses, and the presets of them that have names.

Each pass has its own steps; the mechanism is one. Policies of quantised kernels that ship stand below, each with its source. The
recurrence and tile that go with each are `softmax` and `tiling` options of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias, TypeVar, get_args, overload

from jaxtyping import Float

from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import (
    BF16,
    CATALOGUE,
    E2M1,
    E4M3FN,
    FP16,
    FP32,
    FP64,
    INT4,
    INT8,
    Format,
    format_of,
)
from numdev.arithmetic.products import Dot
from numdev.arithmetic.quantise import BlockScale, Microscaled, Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast, Noise, Overflow, Rounding
from numdev.arithmetic.tensor_cores import Unit
from numdev.errors import BadInput, NotHonoured
from numdev.lazy import torch
from numdev.settings import changes, converted, memoised, setting, types_of

Row = tuple[str, Operation, str, str]
"""The step whose cast rounds an operation, its kind, and the steps in whose formats its operands are."""
CONSTANT, SAVED = "", "saved"  # operands of no step: a number, and what another pass left, which may be any number of the carrier
# Of softcaps and dropout, which no kernel here has: they decide nothing about how one rounds.
_OF_NO_KERNEL: dict[str, Row] = {
    "drop probabilities": ("probabilities", Operation.MULTIPLY, SAVED, CONSTANT),
    "drop dp": ("dp", Operation.MULTIPLY, "dp", CONSTANT),
    "cap difference": ("difference", Operation.MULTIPLY, "difference", SAVED),
}

FORMATS = tuple(fmt for fmt in CATALOGUE.values() if not fmt.is_integer)
"""The formats whose presets have a name."""

Step = Cast | Dot | Microscaled | Quantised
Kind = TypeVar("Kind", bound="Policy")
Three: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
Four: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]"

_FP32 = Cast(FP32)  # made once: every step of every policy is compared with it
_FP64 = Cast(FP64)
_SCALED_QUERIES = 1 << 16  # rounding event, above those of the inputs and below those of the tiles (`Noise.at`)
_PER_TILE = "; behind `@`, after how many products the running sum is rounded to it; without, after each tile"
_AT_END = "; behind `@`, after how many products the running sum is rounded to it; without, once at the end"


def _step(text: str, **more: Any) -> Any:
    """A field of a policy; its default is the step of the preset."""
    return setting(None, text, "format", **more)


@dataclass(frozen=True)
class Policy:
    """The fields of a policy are its steps, in the order of execution, the last of them `output`.

    The result of every elementary operation of a step is rounded once, by the step's cast; max and comparison never round. A step
    that is None is as in `preset`.
    """

    WIDE: ClassVar[tuple[str, ...]]
    """Steps that the softmax of torch computes in FP32, whatever the format of its tensors."""
    STORED: ClassVar[tuple[str, ...]]
    """Steps whose results a kernel stores, or multiplies on tensor cores, in the format of its tensors."""
    SHIPPED: ClassVar[Mapping[str, Callable[[], Policy]]] = {}
    """Policies of kernels that ship, by name."""
    operations: ClassVar[Mapping[str, Row]] = {}
    """The elementary operations of the algorithm, by name."""
    factors: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """The steps in whose formats both factors of each matrix product are."""

    _: KW_ONLY
    preset: InitVar[str] = setting(
        "bf16",
        "preset that the precision policy is, as precision= takes it; `custom` for any other",
        column="name",
    )

    def __post_init__(self, preset: str) -> None:
        self._complete(preset)
        self._check()

    def _complete(self, preset: str) -> None:
        lacking = [each.name for each in fields(self) if getattr(self, each.name) is None]
        if lacking:
            try:
                base = type(self).parse(preset)
            except BadInput as error:
                raise BadInput("precision.preset", preset, error.hint) from None
            for name in lacking:
                object.__setattr__(self, name, getattr(base, name))

    def _check(self) -> None:
        for cast in self.casts():
            if cast.to.precision >= 52 and cast != _FP64:
                hint = "FP64 arithmetic can only round it as fp64 does, to nearest even; give fp64, or at most 50 mantissa bits"
                raise BadInput("precision", str(cast), hint)
        assert self.units is not None  # which raises BadInput of a product that tensor cores cannot do

    @cached_property
    def units(self) -> Mapping[str, Unit]:
        """What adds up each product that is on tensor cores, by its step."""
        dots = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: self._unit(name, dot) for name, dot in dots.items() if isinstance(dot, Dot) and dot.architecture}

    def _unit(self, step: str, dot: Dot) -> Unit:
        formats = [self._format_of_factor(factor, step) for factor in self.factors.get(step, ())]
        unit = dot.architecture.unit(*formats) if dot.architecture and formats else None
        if unit is None:
            hint = "its tensor cores do not multiply what this step does; give fp32, or factors in e4m3fn, e5m2, bf16 or fp16"
            hint += ", with one scale at most for a tensor, a head or a block"
            raise BadInput(f"precision.{step}", str(dot), hint)
        if dot.every is not None and dot.every % unit.products:
            raise BadInput(f"precision.{step}", str(dot), f"one instruction adds {unit.products}; give a multiple behind @")
        return unit

    def _format_of_factor(self, step: str, product: str) -> Format | None:
        """The format of the numbers of a step as tensor cores get them; None where they get others."""
        own: Step = getattr(self, step)
        if isinstance(own, Quantised):
            return own.code_format(of_v=product == "values")
        return own.to if isinstance(own, Cast) else None

    @classmethod
    def throughout(cls: type[Kind], cast: Cast) -> Kind:
        """Every step rounded by one cast."""
        return cls(**{name: Dot(cast) if Dot in kinds else cast for name, kinds in _kinds(cls).items()})  # type: ignore[arg-type]

    @classmethod
    def golden(cls: type[Kind]) -> Kind:
        """Every step in FP64."""
        return cls.uniform(FP64)

    @classmethod
    def uniform(cls: type[Kind], fmt: Format) -> Kind:
        """Every step in `fmt`: what tensor operations in that dtype do, and the paper's reimplementation (section III)."""
        return _of_family(cls, "", fmt)

    @classmethod
    def eager(cls: type[Kind], fmt: Format) -> Kind:
        """matmul, softmax, matmul as tensor operations in `fmt`, or autograd of them: softmax works in FP32 and rounds once."""
        return _of_family(cls, "eager", fmt)

    @classmethod
    def kernel(cls: type[Kind], fmt: Format) -> Kind:
        """`fmt` for inputs, P, dS and outputs, FP32 for all else: what FlashAttention kernels do."""
        return _of_family(cls, "kernel", fmt)

    @classmethod
    def parse(cls: type[Kind], name: str) -> Kind:
        """A preset by name: `golden`, one of `SHIPPED`, a format (`bf16` is `uniform`), `kernel_bf16`, `eager_bf16`."""
        named: dict[str, Callable[[], Any]] = {"golden": cls.golden, **cls.SHIPPED}
        if name in named:
            policy: Kind = named[name]()
            return policy
        family, _, fmt = name.rpartition("_")
        with suppress(BadInput):
            if family in ("", "uniform", "eager", "kernel"):
                return _of_family(cls, family, Format.parse(fmt))
        hint = f"use {', '.join(named)}, or a format (bf16, fp16, fp32, e5m2, ...), alone or behind kernel_ or eager_"
        raise BadInput("precision", name, hint)

    @classmethod
    @memoised
    def preset_names(cls: type[Kind]) -> Mapping[Kind, str]:
        """The presets and their names."""
        shipped: dict[str, Any] = dict(cls.SHIPPED)
        names: dict[Kind, str] = {preset(): name for name, preset in reversed(shipped.items())}
        for fmt in FORMATS:
            names |= {cls.eager(fmt): f"eager_{fmt}", cls.kernel(fmt): f"kernel_{fmt}", cls.uniform(fmt): f"{fmt}"}
        return names

    def with_step(self: Kind, **steps: Step | Format | str) -> Kind:  # beartype knows no Self in a method
        """The policy with some steps changed: `policy.with_step(row_sum="bf16@64", output=FP32)`."""
        known = _kinds(type(self))
        for name, value in steps.items():
            if name not in known:
                raise BadInput(f"precision.{name}", value, f"there is no such step; give one of {', '.join(known)}")
        changed: dict[str, Any] = {name: _as_step(type(self), name, known[name], value) for name, value in steps.items()}
        return replace(self, **changed)

    def casts(self) -> Iterator[Cast]:
        """Every cast of the policy, in the order of execution."""
        for each in fields(self):
            yield from casts_of(getattr(self, each.name))

    @cached_property
    def carrier(self) -> torch.dtype:
        """The dtype that the arithmetic runs in: FP32 if every step is FP32's own or has at most 11 bits, else FP64.

        In either, `numdev.arithmetic.elementary` rounds the result of every operation once; with formats of `p` bits and a
        carrier of at least `2p + 2` the carrier's own operation, then the cast, mostly does so by itself (Figueroa 1995).
        """
        narrow = all(c == _FP32 or (c.to.precision <= 11 and FP32.covers(c.to)) for c in self.casts())
        return torch.float32 if narrow else torch.float64

    def operation(self, name: str, carrier: torch.dtype, constant: float = 1.0) -> RoundedOnce:
        """One of `operations` in a carrier; `constant` is its second operand where that is of no step."""
        step, kind, left, right = self.operations.get(name) or _OF_NO_KERNEL[name]
        first, second = (format_of(carrier) if of == SAVED else self._cast(of).to if of else constant for of in (left, right))
        assert not isinstance(first, float)
        return RoundedOnce(kind, self._cast(step), first, second, carrier)

    def is_harmless(self, step: str, carrier: torch.dtype, constants: tuple[float, ...]) -> bool:
        """Whether the carrier's own operations, then the cast, round every operation of a step as if once.

        `constants` are those that its operations meet.
        """
        dot = getattr(self, step)
        if isinstance(dot, Dot) and dot.every is not None and not dot.accumulate.is_identity_on(carrier):
            return False
        names = [name for name, (own, *_) in self.operations.items() if own == step]
        return all(self.operation(name, carrier, constant).is_harmless for name in names for constant in (1.0, *constants))

    def _cast(self, step: str) -> Cast:
        """The one cast of a step whose numbers are rounded one by one."""
        own: Step = getattr(self, step)
        cast = own.accumulate if isinstance(own, Dot) else own
        assert isinstance(cast, Cast), "a microscaled P is not rounded number by number"
        return cast

    @property
    def is_random(self) -> bool:
        """Whether a step rounds stochastically."""
        return any(cast.rounding is Rounding.STOCHASTIC for cast in self.casts())

    def replicate(self: Kind, seed: int) -> Kind:
        """The policy of one replicate: stochastic rounding draws anew in each."""
        if not self.is_random:
            return self
        steps: dict[str, Any] = {each.name: _reseeded(getattr(self, each.name), seed) for each in fields(self)}
        return replace(self, **steps)

    def ineffective_sums(self, lengths: Mapping[str, int], group: str = "precision") -> list[NotHonoured]:
        """Sums that end before the products after which they would be rounded; `lengths` are the terms of each, by its step."""
        dots = {name: getattr(self, name) for name in lengths}
        return [
            NotHonoured(
                f"{group}.{name}",
                str(dot),
                f"a sum of {lengths[name]} terms is never rounded after {dot.every}; give {dot.accumulate}, or at most "
                f"{lengths[name]} behind @",
            )
            for name, dot in dots.items()
            if dot.every is not None and dot.every > lengths[name]
        ]

    @overload
    def round_inputs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> Three: ...
    @overload
    def round_inputs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, /) -> Four: ...
    def round_inputs(self, *tensors: Any) -> Any:
        """q, k, v (and dO) as the algorithm sees them, in the carrier; each is a rounding event of its own."""
        inputs, noise = vars(self)["inputs"], Noise()
        if isinstance(inputs, Quantised):
            rounded: Iterable[torch.Tensor] = inputs(*tensors)
        else:
            rounded = (inputs(t.double(), noise) for t in tensors)  # FP64 to FP32 to the format would round twice
        return tuple(t.to(self.carrier) for t in rounded)

    @property
    def format(self) -> Format:
        """The format of the output, in whose ulp and unit roundoff deviations are counted."""
        output: Cast = vars(self)["output"]
        return output.to

    @cached_property
    def name(self) -> str:
        """The preset that this policy is, as `parse` reads it; `custom` for any other."""
        return type(self).preset_names().get(self, "custom")

    def steps(self) -> dict[str, str]:
        """Every step and its format as text, as the command line takes them."""
        return {each.name: str(getattr(self, each.name)) for each in fields(self)}

    def describe(self) -> dict[str, Any]:
        """Its steps as text, its name, and how inputs are quantised, which stand for it in a configuration."""
        known, inputs = self.steps() | {"name": self.name}, vars(self)["inputs"]
        if not isinstance(inputs, Quantised):
            return known
        return known | {"quantise": {each.name: getattr(inputs, each.name) for each in fields(inputs)}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(" + ", ".join(f"{name}={text}" for name, text in self.steps().items()) + ")"


@dataclass(frozen=True, repr=False)
class Precision(Policy):
    """The steps of tiled attention: one Cast or Dot each. `row_sum` is a Dot with ones.

    `quantise` changes how the inputs are quantised, or quantises those of a preset that does not.
    """

    WIDE = ("exponential", "rescale", "row_sum")
    STORED = ("inputs", "probabilities", "output")
    operations: ClassVar[Mapping[str, Row]] = {
        "scale scores": ("scores", Operation.MULTIPLY, "scores", CONSTANT),
        "bias scores": ("scores", Operation.ADD, "scores", "scores"),
        "shift ties": ("scores", Operation.MULTIPLY, "scores", CONSTANT),
        "shift scores": ("exponential", Operation.SUBTRACT, "scores", "scores"),
        "share": ("exponential", Operation.DIVIDE, "exponential", "row_sum"),
        "fall of the maximum": ("rescale", Operation.SUBTRACT, "scores", "scores"),
        "weigh sum": ("row_sum", Operation.MULTIPLY, "row_sum", "rescale"),
        "add sums": ("row_sum", Operation.ADD, "row_sum", "row_sum"),
        "unscale sum": ("row_sum", Operation.DIVIDE, "row_sum", CONSTANT),
        "scale probabilities": ("probabilities", Operation.MULTIPLY, "exponential", CONSTANT),
        "unscale values": ("values", Operation.DIVIDE, "values", CONSTANT),
        "rescale output": ("accumulator", Operation.MULTIPLY, "accumulator", "rescale"),
        "weigh output": ("accumulator", Operation.MULTIPLY, "accumulator", "row_sum"),
        "weigh values": ("accumulator", Operation.MULTIPLY, "values", "rescale"),
        "accumulate": ("accumulator", Operation.ADD, "accumulator", "values"),
        "accumulate weighed": ("accumulator", Operation.ADD, "accumulator", "accumulator"),
        "normalise": ("accumulator", Operation.DIVIDE, "accumulator", "row_sum"),
        "unscale maximum": ("row_sum", Operation.DIVIDE, "scores", CONSTANT),
        "log sum": ("row_sum", Operation.ADD, "scores", "row_sum"),
        "distance of splits": ("rescale", Operation.SUBTRACT, "row_sum", "row_sum"),
        "add weight": ("row_sum", Operation.ADD, "row_sum", "rescale"),
    }
    factors: ClassVar[Mapping[str, tuple[str, str]]] = {"scores": ("inputs", "inputs"), "values": ("probabilities", "inputs")}

    inputs: Cast | Quantised = _step("q, k and v as the algorithm receives them", overruled={"quantise.to": None})
    scores: Dot = _step("S, the product Q K^T and its scaling" + _PER_TILE)
    exponential: Cast = _step("the difference S - m, and its exponential; without tiles also P divided by l")
    rescale: Cast = _step("the old maximum minus the new one, and its exponential alpha")
    row_sum: Dot = _step("l, alpha times the old sum, plus the sum of P; and the LSE" + _PER_TILE)
    probabilities: Cast | Microscaled = _step("P as it enters the product with V")
    values: Dot = _step("the product P V" + _PER_TILE + "; tensor cores keep it over tiles, if these are fewer")
    accumulator: Cast = _step("O between tiles, alpha times the old O plus P V, and its division by l")
    output: Cast = _step("O as it is returned")
    _: KW_ONLY
    quantise: InitVar[Mapping[str, Any] | None] = changes(Quantised)

    def __post_init__(self, preset: str, quantise: Mapping[str, Any] | None) -> None:
        self._complete(preset)
        if quantise:
            base = self.inputs if isinstance(self.inputs, Quantised) else Quantised(self.inputs)
            object.__setattr__(self, "inputs", base.but(**quantise))
        self._check()
        if isinstance(self.probabilities, Microscaled) and self.probabilities.scale is BlockScale.E4M3_FP32:
            hint = "it needs the largest P of all rows, which no tile has; give e2m1finite/16/e4m3 and softmax.p_scale=2688"
            raise BadInput("precision.probabilities", str(self.probabilities), hint)

    @staticmethod
    def fp8(scale: Scale = Scale.BLOCK, hadamard: bool = True) -> Precision:
        """FlashAttention-3's FP8 forward: E4M3 inputs and P, FP32 accumulation, FP16 output (FA3, section 3.3).

        As the paper has it. The released kernel leaves rotation and quantisation to its caller, from whom it takes one scale for
        each batch entry and head.
        """
        low = _saturating(E4M3FN)
        inputs = Quantised(low, scale=scale, block=128, hadamard=hadamard)
        return Precision.kernel(FP16).with_step(inputs=inputs, probabilities=low)

    @staticmethod
    def int8() -> Precision:
        """INT8 q and k by block with the mean of k taken out, P and V in FP16 (SageAttention, section 4)."""
        inputs = Quantised(Cast(INT8), scale=Scale.BLOCK, block=64, smoothing=Smoothing.K, values=Cast(FP16))
        return Precision.kernel(FP16).with_step(inputs=inputs)

    @property
    def idle(self) -> dict[str, str]:
        """Settings of the inputs that are not read as the others are, and what reads them."""
        return self.inputs.idle if isinstance(self.inputs, Quantised) else {}

    def scale_queries(self, q: Float[torch.Tensor, "*shape"], factor: float) -> Float[torch.Tensor, "*shape"]:
        """`factor q` as it enters `Q K^T`, in the carrier: the exact product, rounded once by the cast of the inputs.

        Quantised inputs are rounded to the carrier alone, as their grid and its scales are those of q.
        """
        carrier = format_of(q.dtype)
        cast = self.inputs if isinstance(self.inputs, Cast) else Cast(carrier)
        noise = Noise(event=_SCALED_QUERIES)
        scale = RoundedOnce(Operation.MULTIPLY, cast, carrier, factor, torch.float64)
        return scale(q.to(torch.float64, copy=True), factor, noise).to(q.dtype)


@dataclass(frozen=True, repr=False)
class BackwardPrecision(Policy):
    """The steps of the backward pass (Dao 2023, Algorithm 2): one Cast or Dot each.

    With delta from P, P is as `exponential` rounds it, and a tile's sum is added to a running sum over tiles. Autograd of three
    tensor operations (`eager`) rounds dS twice, since its scaling is an operation of its own.
    """

    WIDE = ("exponential", "delta", "difference")
    STORED = ("inputs", "probabilities", "ds", "output")
    # In their names "stored" is P as the forward pass stored it; the step `exponential` is P as it is recomputed.
    operations: ClassVar[Mapping[str, Row]] = {
        "scale scores": ("scores", Operation.MULTIPLY, "scores", CONSTANT),
        "bias scores": ("scores", Operation.ADD, "scores", "scores"),
        "scale lse": ("exponential", Operation.MULTIPLY, SAVED, CONSTANT),
        "shift scores": ("exponential", Operation.SUBTRACT, "scores", SAVED),
        "weigh output": ("delta", Operation.MULTIPLY, "inputs", SAVED),
        "weigh dp": ("delta", Operation.MULTIPLY, "dp", "exponential"),
        "weigh dp by stored": ("delta", Operation.MULTIPLY, "dp", SAVED),
        "add delta": ("delta", Operation.ADD, "delta", "delta"),
        "shift dp": ("difference", Operation.SUBTRACT, "dp", "delta"),
        "weigh difference": ("difference", Operation.MULTIPLY, "difference", "exponential"),
        "weigh difference by stored": ("difference", Operation.MULTIPLY, "difference", SAVED),
        "scale ds": ("ds", Operation.MULTIPLY, "ds", CONSTANT),
        "add dq": ("dq_sum", Operation.ADD, "dq_sum", "dq"),
        "add dk": ("dk_sum", Operation.ADD, "dk_sum", "dk"),
        "add dv": ("dv_sum", Operation.ADD, "dv_sum", "dv"),
        "scale dq": ("dq_sum", Operation.MULTIPLY, "dq_sum", CONSTANT),
        "scale dk": ("dk_sum", Operation.MULTIPLY, "dk_sum", CONSTANT),
    }
    factors: ClassVar[Mapping[str, tuple[str, str]]] = {
        **dict.fromkeys(("scores", "dp"), ("inputs", "inputs")),
        **dict.fromkeys(("dq", "dk"), ("ds", "inputs")),
        "dv": ("probabilities", "inputs"),
    }

    inputs: Cast = _step("q, k, v and dO as the backward pass receives them")
    scores: Dot = _step("S, the product Q K^T computed again, and its scaling" + _AT_END)
    exponential: Cast = _step("the difference S - LSE, and its exponential P; LSE log2(e) for 2^x")
    probabilities: Cast = _step("P as it enters the product P^T dO")
    dp: Dot = _step("dP, the product dO V^T" + _AT_END)
    delta: Dot = _step("the products of which delta is the sum over a row, and their sums" + _AT_END)
    difference: Cast = _step("dP - delta, then P times that")
    ds: Cast = _step("dS as it enters the products dS K and dS^T Q; of naive also its scaling")
    dq: Dot = _step("the product dS K of one tile of keys" + _AT_END)
    dk: Dot = _step("the product dS^T Q of one tile of queries" + _AT_END)
    dv: Dot = _step("the product P^T dO of one tile of queries" + _AT_END)
    dq_sum: Cast = _step("the running sum of dQ over tiles of keys, and its scaling at the end")
    dk_sum: Cast = _step("the running sum of dK over tiles of queries, and its scaling at the end")
    dv_sum: Cast = _step("the running sum of dV over tiles of queries")
    output: Cast = _step("dQ, dK and dV as they are returned")


@memoised
def _kinds(policy: type[Policy]) -> dict[str, tuple[type, ...]]:
    """The kinds of value that each step may hold, by its name."""
    hints = types_of(policy)
    return {each.name: get_args(hints[each.name]) or (hints[each.name],) for each in fields(policy)}


@memoised
def _of_family(policy: type[Kind], family: str, fmt: Format) -> Kind:
    """See `Policy.uniform`, `eager` and `kernel`."""
    wide = FP64 if fmt == FP64 else FP32  # the format in which kernels, and the softmax of torch, compute on tensors in `fmt`
    if family == "kernel":
        # Formats of 8 bits and fewer saturate, as the conversions of the hardware do (PTX ISA, `cvt.satfinite`).
        stored = _saturating(fmt) if fmt.bits <= 8 else Cast(fmt)
        return policy.throughout(Cast(wide)).with_step(**dict.fromkeys(policy.STORED, stored))
    uniform = policy.throughout(Cast(fmt))
    return uniform.with_step(**dict.fromkeys(policy.WIDE, wide)) if family == "eager" else uniform


def _as_step(policy: type[Policy], name: str, kinds: tuple[type, ...], value: Step | Format | str) -> Step:
    """A step from a value object, a format or a text.

    A cast becomes a `Dot` where the step is a product or a sum; a microscaled format becomes `Quantised` inputs.
    """
    step: Any = Cast(value) if isinstance(value, Format) else value
    if isinstance(value, str):
        step = converted(f"precision.{name}", types_of(policy)[name], value)
    if isinstance(step, Cast) and Dot in kinds:
        return Dot(step)
    if isinstance(step, Microscaled) and Quantised in kinds:
        return Quantised(step)
    if type(step) not in kinds:
        allowed = " or ".join(kind.__name__ for kind in kinds)
        raise BadInput(f"precision.{name}", value, f"give a {allowed}, a format, or a text such as bf16")
    accepted: Step = step
    return accepted


def casts_of(step: Step) -> Iterator[Cast]:
    """The cast of a step, or the two of quantised inputs, whose values may have a grid of their own."""
    for part in (step.to, step.values or step.to) if isinstance(step, Quantised) else (step,):
        yield part.accumulate if isinstance(part, Dot) else part.element if isinstance(part, Microscaled) else part


def _reseeded(step: Step | None, seed: int) -> Step | None:
    """A step whose stochastic casts have a seed of the replicate; the casts of a Dot and of quantised inputs too."""
    if isinstance(step, Dot):
        return replace(step, accumulate=_reseeded(step.accumulate, seed))  # type: ignore[arg-type]
    if isinstance(step, Microscaled):
        return replace(step, element=_reseeded(step.element, seed))  # type: ignore[arg-type]
    if isinstance(step, Quantised):
        return replace(step, to=_reseeded(step.to, seed), values=_reseeded(step.values, seed))  # type: ignore[arg-type]
    if step is None or step.rounding is not Rounding.STOCHASTIC:
        return step
    return replace(step, seed=step.seed + (seed << 32))


def _saturating(fmt: Format) -> Cast:
    """The cast to `fmt` whose results beyond the largest number are the largest number."""
    return Cast(fmt, overflow=Overflow.SATURATE)


def fa4_fp8() -> Precision:
    """FlashAttention-4 with E4M3: q, k and v with a scale each, P in E4M3, BF16 output (`flash_attn/cute`, FP8 forward).

    The scales are the caller's, one for each batch entry and head; here there is one for each tensor.
    """
    low = _saturating(E4M3FN)
    return Precision.kernel(BF16).with_step(inputs=Quantised(low, scale=Scale.TENSOR), probabilities=low)


def sage1() -> Precision:
    """SageAttention's Triton kernel: blocks of 128 q and 64 k in INT8, P V accumulated in FP16 (arXiv 2410.02367).

    As `attn_qk_int8_per_block.py` and `quant_per_block.py` of its code: the mean of k taken out, codes rounded half away
    from zero, P and V in FP16. How a tensor core adds to FP16 is not modelled; here its sum is rounded after every 16
    products, the depth of one instruction.
    """
    grid = Cast(INT8, Rounding.NEAREST_AWAY)
    inputs = Quantised(grid, Scale.BLOCK, 64, 128, smoothing=Smoothing.K, values=Cast(FP16))
    return Precision.kernel(FP16).with_step(inputs=inputs, values=Dot(Cast(FP16), 16))


def sage2() -> Precision:
    """SageAttention2 as it ships for Hopper: INT8 q and k by thread, E4M3 V by channel and P (arXiv 2411.10958).

    As `sageattn_qk_int8_pv_fp8_cuda_sm90` of its code: the mean of k taken out, groups within 16 rows of q and 128 of k,
    codes rounded half away from zero, tiles added in FP32. What the FP8 product loses within a tile is not part of it; it can
    be stated, as in `values=hopper`.
    """
    grid, low = Cast(INT8, Rounding.NEAREST_AWAY), _saturating(E4M3FN)
    inputs = Quantised(grid, Scale.THREAD, 128, 16, smoothing=Smoothing.K, values=low, values_scale=Scale.CHANNEL)
    return Precision.kernel(BF16).with_step(inputs=inputs, probabilities=low)


def sage2_int4() -> Precision:
    """SageAttention2's 4-bit variant: INT4 q and k by thread, also q's mean of each 128 tokens taken out (arXiv 2411.10958).

    Groups lie within 32 rows of q and 64 of k. The kernel is described in the paper and is not part of the released code.
    """
    grid, low = Cast(INT4, Rounding.NEAREST_AWAY), _saturating(E4M3FN)
    inputs = Quantised(
        grid, Scale.THREAD, 64, 32, smoothing=Smoothing.QK, smoothing_block=128, values=low, values_scale=Scale.CHANNEL
    )
    return Precision.kernel(BF16).with_step(inputs=inputs, probabilities=low)


def sage3() -> Precision:
    """SageAttention3: q, k, v and P in FP4 with an E4M3 scale for each 16 (arXiv 2505.11594).

    Means of k, and of each 128 tokens of q, are taken out. As `sageattention3_blackwell` of its code, whose scales have no
    second level for the tensor. That of P is `p_scale = 448 * 6`, relative to the row's maximum. The kernel divides P by the
    block's scale before that is rounded.
    """
    fp4 = Microscaled(Cast(E2M1), 16, BlockScale.E4M3)
    inputs = Quantised(fp4, smoothing=Smoothing.QK, smoothing_block=128)
    return Precision.kernel(BF16).with_step(inputs=inputs, probabilities=fp4)


Precision.SHIPPED = {
    "fp8": Precision.fp8,
    "fa3_fp8": Precision.fp8,  # another name of fp8
    "fa4_fp8": fa4_fp8,
    "int8": Precision.int8,
    "sage1": sage1,
    "sage2": sage2,
    "sage2_int4": sage2_int4,
    "sage3": sage3,
}
