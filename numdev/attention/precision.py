"""Which number format each arithmetic step of attention uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.bits import LAYOUTS
from numdev.arithmetic.dot import Dot
from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import E4M3FN, FP16, FP64, INT8, Format
from numdev.arithmetic.microscale import BlockScale, Microscaled
from numdev.arithmetic.noise import Noise
from numdev.arithmetic.quantise import Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.policy import FORMATS, Policy, by_name, inside, round_each, saturating, stored
from numdev.errors import BadInput

_SCALED_QUERIES = 1 << 16  # rounding event, above those of the inputs and below those of the tiles (`Noise.at`)


@dataclass(frozen=True, repr=False)
class Precision(Policy):
    """The precision policy: one Cast or Dot per step of tiled attention, in the order of execution.

    The result of every elementary operation of a step is rounded once, by the step's cast; max and comparison never round.

    Attributes:
        inputs: q, k and v as the algorithm receives them.
        scores: the product `Q K^T`, and its scaling.
        exponential: `S - m`, then its exponential; and `P / l` where P is divided, as without tiles.
        rescale: `m_old - m_new`, then its exponential, `alpha`.
        row_sum: `alpha * l`, then `+ sum(P)`, the sum being a Dot with ones; `log l`, then `LSE = m + log l`, at the end.
        probabilities: `P` as it enters the second product; microscaled, its blocks are runs of keys of a tile.
        values: the product `P V`.
        accumulator: `alpha * O`, then `+ P V`; and `O / l`.
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
            mend = "it needs the largest P of all rows, which no tile has; give e2m1finite/16/e4m3 and softmax.p_scale=2688"
            raise BadInput("precision.probabilities", str(self.probabilities), mend)
        super().__post_init__()

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
        wide = inside(fmt)
        return Precision.uniform(fmt).with_step(exponential=wide, rescale=wide, row_sum=wide)

    @staticmethod
    @lru_cache(maxsize=256)
    def kernel(fmt: Format) -> Precision:
        """`fmt` for inputs, P and output, FP32 for S, m, l, alpha and O: what FlashAttention kernels do; see `stored`."""
        low = stored(fmt)
        return Precision.uniform(inside(fmt)).with_step(inputs=low, probabilities=low, output=low)

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

        uniform, kernel, eager = Precision.uniform, Precision.kernel, Precision.eager
        families: dict[str, Callable[[Format], Precision]] = {"": uniform, "uniform": uniform, "kernel": kernel, "eager": eager}
        return by_name(name, {"golden": Precision.golden, **SHIPPED}, families)

    @property
    def idle(self) -> dict[str, str]:
        """Settings of the inputs that are not read as the others are, and what reads them."""
        return self.inputs.idle if isinstance(self.inputs, Quantised) else {}

    def round_inputs(
        self,
        q: Float[Tensor, "batch heads queries dim"],
        k: Float[Tensor, "batch kv_heads keys dim"],
        v: Float[Tensor, "batch kv_heads keys values"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as the algorithm sees them, in the carrier."""
        if isinstance(self.inputs, Quantised):
            rounded = self.inputs(q, k, v)
            return tuple(t.to(self.carrier) for t in rounded)  # type: ignore[return-value]
        return round_each(self.inputs, self.carrier, (q, k, v))  # type: ignore[return-value]

    def scale_queries(self, q: Float[Tensor, "*shape"], factor: float) -> Float[Tensor, "*shape"]:
        """`factor q` as it enters `Q K^T`, in the carrier: the exact product, rounded once by the cast of the inputs.

        Quantised inputs are rounded to the carrier alone, as their grid and its scales are those of q.
        """
        carrier = LAYOUTS[q.dtype].format
        cast = self.inputs if isinstance(self.inputs, Cast) else Cast(carrier)
        noise = Noise(event=_SCALED_QUERIES)
        scale = RoundedOnce(Operation.MULTIPLY, cast, carrier, factor, torch.float64)
        return scale(q.to(torch.float64, copy=True), factor, noise).to(q.dtype)

    @classmethod
    def preset_names(cls) -> Mapping[Precision, str]:
        """The presets and their names."""
        return _preset_names()

    def describe(self) -> dict[str, Any]:
        """What stands for it in a configuration: its steps as text, its name, and how inputs are quantised."""
        known = super().describe()
        if not isinstance(self.inputs, Quantised):
            return known
        return known | {"quantise": {field.name: getattr(self.inputs, field.name) for field in fields(self.inputs)}}


@lru_cache(maxsize=1)
def _preset_names() -> dict[Precision, str]:
    from numdev.attention.shipped import SHIPPED

    names = {preset(): name for name, preset in reversed(SHIPPED.items())}
    for fmt in FORMATS:
        names |= {
            Precision.eager(fmt): f"eager_{fmt}",
            Precision.kernel(fmt): f"kernel_{fmt}",
            Precision.uniform(fmt): f"{fmt}",
        }
    return names
