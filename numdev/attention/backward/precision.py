"""Which number format each arithmetic step of attention's backward pass uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import FP64, Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.policy import FORMATS, Policy, by_name, inside, round_each, stored


@dataclass(frozen=True, repr=False)
class BackwardPrecision(Policy):
    """The precision policy of the backward pass: one Cast or Dot per step, in the order of execution.

    Dao 2023, Algorithm 2. The result of every elementary operation of a step is rounded once, by the step's cast.

    Attributes:
        inputs: q, k, v and do as the algorithm receives them.
        scores: the product `Q K^T`, and its scaling, by log2(e) as well where the exponential is 2^x.
        exponential: `LSE log2(e)` where the exponential is 2^x, `S - LSE`, then its exponential, `P`.
        probabilities: `P` as it enters `P^T dO`.
        dp: the product `dP = dO V^T`.
        delta: `dO * O` and the sum over a row; or `dP * P`, the sum over the keys of a tile, and the running sum over tiles,
            with P as `exponential` rounds it.
        difference: `dP - delta`, then `P * (dP - delta)`.
        ds: `dS` as it enters `dS K` and `dS^T Q`; of autograd (`NaiveBackward`), `dS`, then its scaling.
        dq: the product `dS K` of one tile of keys.
        dk: the product `dS^T Q` of one tile of queries.
        dv: the product `P^T dO` of one tile of queries.
        dq_sum: the running sum of dQ over tiles of keys, and its scaling at the end.
        dk_sum: the running sum of dK over tiles of queries, and its scaling at the end.
        dv_sum: the running sum of dV over tiles of queries.
        output: dQ, dK and dV as they are returned.
    """

    inputs: Cast
    scores: Dot
    exponential: Cast
    probabilities: Cast
    dp: Dot
    delta: Dot
    difference: Cast
    ds: Cast
    dq: Dot
    dk: Dot
    dv: Dot
    dq_sum: Cast
    dk_sum: Cast
    dv_sum: Cast
    output: Cast

    @staticmethod
    def golden() -> BackwardPrecision:
        """Every step in FP64."""
        return BackwardPrecision.uniform(FP64)

    @staticmethod
    def throughout(cast: Cast) -> BackwardPrecision:
        """Every step rounded by one cast."""
        dot = Dot(cast)
        return BackwardPrecision(
            inputs=cast,
            scores=dot,
            exponential=cast,
            probabilities=cast,
            dp=dot,
            delta=dot,
            difference=cast,
            ds=cast,
            dq=dot,
            dk=dot,
            dv=dot,
            dq_sum=cast,
            dk_sum=cast,
            dv_sum=cast,
            output=cast,
        )

    @staticmethod
    def uniform(fmt: Format) -> BackwardPrecision:
        """Every step in `fmt`."""
        return BackwardPrecision.throughout(Cast(fmt))

    @staticmethod
    def eager(fmt: Format) -> BackwardPrecision:
        """Autograd of matmul, softmax, matmul in `fmt`: the gradient of softmax works in FP32 and rounds dS once.

        Its scaling, an operation of its own, rounds dS again; see `NaiveBackward`.
        """
        wide = inside(fmt)
        return BackwardPrecision.uniform(fmt).with_step(exponential=wide, delta=wide, difference=wide)

    @staticmethod
    @lru_cache(maxsize=256)
    def kernel(fmt: Format) -> BackwardPrecision:
        """`fmt` for inputs, P, dS and outputs, FP32 for all else: what FlashAttention kernels do; see `stored`."""
        low = stored(fmt)
        return BackwardPrecision.uniform(inside(fmt)).with_step(inputs=low, probabilities=low, ds=low, output=low)

    @staticmethod
    def parse(name: str) -> BackwardPrecision:
        """A preset by name: `golden`, a format (`bf16` is `uniform`), `kernel_bf16`, `eager_bf16`."""
        families: dict[str, Callable[[Format], BackwardPrecision]] = {
            "": BackwardPrecision.uniform,
            "uniform": BackwardPrecision.uniform,
            "kernel": BackwardPrecision.kernel,
            "eager": BackwardPrecision.eager,
        }
        return by_name(name, {"golden": BackwardPrecision.golden}, families)

    @classmethod
    def preset_names(cls) -> Mapping[BackwardPrecision, str]:
        """The presets and their names."""
        return _preset_names()

    def round_inputs(
        self,
        q: Float[Tensor, "batch heads queries dim"],
        k: Float[Tensor, "batch kv_heads keys dim"],
        v: Float[Tensor, "batch kv_heads keys values"],
        do: Float[Tensor, "batch heads queries values"],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and do as the algorithm sees them, in the carrier; q, k and v as a forward pass with the same cast does."""
        return round_each(self.inputs, self.carrier, (q, k, v, do))  # type: ignore[return-value]


@lru_cache(maxsize=1)
def _preset_names() -> dict[BackwardPrecision, str]:
    names: dict[BackwardPrecision, str] = {}
    for fmt in FORMATS:
        names |= {
            BackwardPrecision.eager(fmt): f"eager_{fmt}",
            BackwardPrecision.kernel(fmt): f"kernel_{fmt}",
            BackwardPrecision.uniform(fmt): f"{fmt}",
        }
    return names
