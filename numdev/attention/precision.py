"""Which number format each arithmetic step of attention uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, get_args, get_type_hints

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, INT8, TF32, Format
from numdev.arithmetic.microscale import BlockScale, Microscaled
from numdev.arithmetic.noise import Noise
from numdev.arithmetic.quantise import Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast, Overflow
from numdev.attention.policystep import Step, as_step, casts_of, reseeded
from numdev.errors import BadInput


@dataclass(frozen=True)
class Precision:
    """The precision policy: one Cast or Dot per step of tiled attention, in the order of execution.

    The result of every elementary operation of a step is rounded once, by the step's cast; max and comparison never round.

    Attributes:
        inputs: q, k and v as the algorithm receives them.
        scores: the product `Q K^T`, and its scaling.
        exponential: `S - m`, then its exponential.
        rescale: `m_old - m_new`, then its exponential, `alpha`.
        row_sum: `alpha * l`, then `+ sum(P)`, the sum being a Dot with ones.
        probabilities: `P` as it enters the second product; microscaled, its blocks are runs of keys of a tile.
        values: the product `P V`.
        accumulator: `alpha * O`, then `+ P V`; and the division by `l`.
        output: what is returned.
    """

    inputs: Cast | Quantised
    scores: Dot
    exponential: Cast
    rescale: Cast
    row_sum: Dot
    probabilities: Cast | Microscaled
    values: Dot
    accumulator: Cast
    output: Cast

    def __post_init__(self) -> None:
        if isinstance(self.probabilities, Microscaled) and self.probabilities.scale is BlockScale.E4M3_FP32:
            mend = "no tile knows the largest P of all rows; give e2m1finite/16/e4m3 and softmax.p_scale=2688"
            raise BadInput("precision.probabilities", str(self.probabilities), mend)
        for cast in self.casts():
            if cast.to.precision >= 52 and cast != Cast(FP64):
                mend = "FP64 rounds to nearest even, and has no bits to spare for 52; give fp64, or at most 50 mantissa bits"
                raise BadInput("precision", str(cast), mend)

    @staticmethod
    def golden() -> Precision:
        """Every step in FP64."""
        return Precision.uniform(FP64)

    @staticmethod
    def throughout(cast: Cast) -> Precision:
        """Every step rounded by one cast."""
        return Precision(
            inputs=cast,
            scores=Dot(cast),
            exponential=cast,
            rescale=cast,
            row_sum=Dot(cast),
            probabilities=cast,
            values=Dot(cast),
            accumulator=cast,
            output=cast,
        )

    @staticmethod
    @lru_cache(maxsize=256)
    def uniform(fmt: Format) -> Precision:
        """Every step in `fmt`: what tensor operations in that dtype do, and the paper's reimplementation (section III)."""
        return Precision.throughout(Cast(fmt))

    @staticmethod
    @lru_cache(maxsize=256)
    def eager(fmt: Format) -> Precision:
        """matmul, softmax, matmul as three tensor operations in `fmt`: softmax works in FP32 inside and rounds once."""
        inside = FP64 if fmt == FP64 else FP32
        return Precision.uniform(fmt).with_step(exponential=inside, rescale=inside, row_sum=inside)

    @staticmethod
    def kernel(fmt: Format) -> Precision:
        """`fmt` for inputs, P and output, FP32 for S, m, l, alpha and O: what FlashAttention kernels do.

        Formats of 8 bits and fewer saturate, as the conversions of the hardware do (PTX ISA, `cvt.satfinite`).
        """
        low = saturating(fmt) if fmt.bits <= 8 else Cast(fmt)
        inside = Precision.uniform(FP64 if fmt == FP64 else FP32)
        return inside.with_step(inputs=low, probabilities=low, output=low)

    @staticmethod
    def fp8(scale: Scale = Scale.BLOCK, hadamard: bool = True) -> Precision:
        """FlashAttention-3's FP8 forward: E4M3 inputs and P, FP32 accumulation, FP16 output (FA3, section 3.3).

        As the paper has it. The released kernel leaves rotation and quantisation to its caller, from whom it takes one scale for
        each batch entry and head.
        """
        low = saturating(E4M3FN)
        inputs = Quantised(low, scale=scale, block=128, hadamard=hadamard)
        return Precision.kernel(FP16).with_step(inputs=inputs, probabilities=low)

    @staticmethod
    def int8() -> Precision:
        """INT8 q and k by block with the mean of k taken out, P and V in FP16 (SageAttention, section 4)."""
        inputs = Quantised(Cast(INT8), scale=Scale.BLOCK, block=64, smoothing=Smoothing.K, values=Cast(FP16))
        return Precision.kernel(FP16).with_step(inputs=inputs)

    @staticmethod
    def parse(name: str) -> Precision:
        """A preset by name: `golden`, one of `shipped`, a format (`bf16` is `uniform`), `kernel_bf16`, `eager_bf16`."""
        from numdev.attention.shipped import SHIPPED  # its policies are policies of this module

        if name in SHIPPED:
            return SHIPPED[name]()
        kind, _, fmt = name.rpartition("_")
        uniform, kernel, eager = Precision.uniform, Precision.kernel, Precision.eager
        policies: dict[str, Callable[[Format], Precision]] = {"": uniform, "uniform": uniform, "kernel": kernel, "eager": eager}
        try:
            return Precision.golden() if name == "golden" else policies[kind](Format.parse(fmt))
        except (BadInput, KeyError):
            shipped = ", ".join(SHIPPED)
            mend = f"use golden, {shipped}, or a format (bf16, fp16, fp32, e5m2, ...), alone or behind kernel_ or eager_"
            raise BadInput("precision", name, mend) from None

    def with_step(self, **steps: Step | Format | str) -> Precision:
        """The policy with some steps changed: `policy.with_step(row_sum="bf16@64", output=FP32)`.

        Raises:
            BadInput: naming the step, for one that the policy does not have, and for a value that it cannot hold.
        """
        allowed = _allowed()
        changed: dict[str, Any] = {}
        for name, value in steps.items():
            if name not in allowed:
                raise BadInput(f"precision.{name}", value, f"there is no such step; give one of {', '.join(allowed)}")
            changed[name] = as_step(name, allowed[name], value)
        return replace(self, **changed)

    def casts(self) -> Iterator[Cast]:
        """Every cast of the policy, in the order of execution."""
        for field in fields(self):
            yield from casts_of(getattr(self, field.name))

    @property
    def idle(self) -> dict[str, str]:
        """Settings of the inputs that are not read as the others are, and what reads them."""
        return self.inputs.idle if isinstance(self.inputs, Quantised) else {}

    @property
    def carrier(self) -> torch.dtype:
        """The dtype that the arithmetic runs in: FP32 if every step is FP32's own or has at most 11 bits, else FP64.

        In either, `numdev.arithmetic.elementary` rounds the result of every operation once; with formats of `p` bits and a
        carrier of at least `2p + 2` the carrier's own operation, then the cast, mostly does so by itself (Figueroa 1995).
        """
        narrow = all(c == Cast(FP32) or (c.to.precision <= 11 and FP32.covers(c.to)) for c in self.casts())
        return torch.float32 if narrow else torch.float64

    @property
    def is_random(self) -> bool:
        """Whether a step rounds stochastically."""
        return any(cast.rounding is Rounding.STOCHASTIC for cast in self.casts())

    def replicate(self, seed: int) -> Precision:
        """The policy of one replicate: stochastic rounding draws anew in each."""
        if not self.is_random:
            return self
        steps: dict[str, Any] = {field.name: reseeded(getattr(self, field.name), seed) for field in fields(self)}
        return replace(self, **steps)

    @property
    def format(self) -> Format:
        """The format of the output, in whose ulp and unit roundoff deviations are counted."""
        return self.output.to

    def round_inputs(
        self,
        q: Float[Tensor, "batch heads queries dim"],
        k: Float[Tensor, "batch kv_heads keys dim"],
        v: Float[Tensor, "batch kv_heads keys dim"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as the algorithm sees them, in the carrier."""
        if isinstance(self.inputs, Quantised):
            rounded = self.inputs(q, k, v)
            return tuple(t.to(self.carrier) for t in rounded)  # type: ignore[return-value]
        # Rounded before narrowed: FP64 to FP32 to the format would round twice. Each is a rounding event of its own.
        noise = Noise()
        return tuple(self.inputs(t.double(), noise).to(self.carrier) for t in (q, k, v))  # type: ignore[return-value]

    @cached_property
    def name(self) -> str:
        """The preset that this policy is, as `parse` reads it; `custom` for any other."""
        return _preset_names().get(self, "custom")

    def steps(self) -> dict[str, str]:
        """Every step and its format as text, as the command line takes them."""
        return dict(self._texts)

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}

    def describe(self) -> dict[str, Any]:
        """What stands for it in a configuration: its steps as text, its name, and how inputs are quantised."""
        known = self.steps() | {"name": self.name}
        if not isinstance(self.inputs, Quantised):
            return known
        return known | {"quantise": {field.name: getattr(self.inputs, field.name) for field in fields(self.inputs)}}

    def __repr__(self) -> str:
        return "Precision(" + ", ".join(f"{name}={text}" for name, text in self.steps().items()) + ")"


def saturating(fmt: Format) -> Cast:
    """The cast to `fmt` whose results beyond the largest number are the largest number."""
    return Cast(fmt, overflow=Overflow.SATURATE)


@lru_cache(maxsize=1)
def _allowed() -> dict[str, tuple[type, ...]]:
    """The kinds of value that each step may hold, by its name."""
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Precision).items()}


@lru_cache(maxsize=1)
def _preset_names() -> dict[Precision, str]:
    from numdev.attention.shipped import SHIPPED

    names = {preset(): name for name, preset in reversed(SHIPPED.items())}
    for fmt in (FP32, TF32, BF16, FP16, E5M2, E4M3FN, FP64):
        names |= {
            Precision.eager(fmt): f"eager_{fmt}",
            Precision.kernel(fmt): f"kernel_{fmt}",
            Precision.uniform(fmt): f"{fmt}",
        }
    return names
