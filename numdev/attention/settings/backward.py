"""What a user can set of the backward pass, beside the tiles and the recurrence that it shares with the forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numdev.attention.settings.precision import PrecisionSettings, policy_of
from numdev.attention.settings.problem import ProblemSettings
from numdev.attention.settings.problem import problem as forward_problem
from numdev.attention.settings.softmax import exponential
from numdev.nearest import choice, named
from numdev.settings import Overruled, setting

if TYPE_CHECKING:
    from numdev.attention.backward.precision import BackwardPrecision
    from numdev.attention.backward.problem import BackwardProblem
    from numdev.attention.backward.recompute import Recompute
    from numdev.attention.precision import Precision
    from numdev.attention.softmax import OnlineSoftmax

_TILE = "; behind `@`, after how many products the running sum is rounded to it; without, once at the end"


@dataclass
class BackwardProblemSettings(ProblemSettings):
    """`BackwardProblem`."""

    _target_: str = "numdev.attention.settings.backward.problem"
    v_mean: float = setting(0.0, "what is added to every entry of v")
    do_mean: float = setting(0.0, "mean of the entries of dO, which are normal with variance 1")


def problem(v_mean: float, do_mean: float, **settings: Any) -> BackwardProblem:
    """A problem of attention, with the two means."""
    from numdev.attention.backward.problem import BackwardProblem

    plain = forward_problem(**settings)
    return BackwardProblem(plain.source, plain.shape, plain.mask, plain.scale, v_mean, do_mean)


@dataclass
class BackwardPrecisionSettings:
    """`BackwardPrecision`: a preset and the steps that differ from it; null is as in the preset."""

    _target_: str = "numdev.attention.settings.backward.precision"
    preset: str = setting(
        "bf16", "preset that the policy of the backward pass is, as precision= takes it; `custom` for any other", column="name"
    )
    inputs: str | None = setting(None, "q, k, v and dO as the backward pass receives them", "format")
    scores: str | None = setting(None, "S, the product Q K^T computed again, and its scaling" + _TILE, "format")
    exponential: str | None = setting(None, "the difference S - LSE, and its exponential P; LSE log2(e) for 2^x", "format")
    probabilities: str | None = setting(None, "P as it enters the product P^T dO", "format")
    dp: str | None = setting(None, "dP, the product dO V^T" + _TILE, "format")
    delta: str | None = setting(None, "the products of which delta is the sum over a row, and their sums" + _TILE, "format")
    difference: str | None = setting(None, "dP - delta, then P times that", "format")
    ds: str | None = setting(None, "dS as it enters the products dS K and dS^T Q; of naive also its scaling", "format")
    dq: str | None = setting(None, "the product dS K of one tile of keys" + _TILE, "format")
    dk: str | None = setting(None, "the product dS^T Q of one tile of queries" + _TILE, "format")
    dv: str | None = setting(None, "the product P^T dO of one tile of queries" + _TILE, "format")
    dq_sum: str | None = setting(None, "the running sum of dQ over tiles of keys, and its scaling at the end", "format")
    dk_sum: str | None = setting(None, "the running sum of dK over tiles of queries, and its scaling at the end", "format")
    dv_sum: str | None = setting(None, "the running sum of dV over tiles of queries", "format")
    output: str | None = setting(None, "dQ, dK and dV as they are returned", "format")


def precision(preset: str, **steps: str | None) -> BackwardPrecision:
    """The preset with the steps that differ from it."""
    from numdev.attention.backward.precision import BackwardPrecision

    base = named("precision.preset", BackwardPrecision.parse, preset)
    return base.with_step(**{name: text for name, text in steps.items() if text is not None})


@dataclass
class ForwardPrecisionSettings(PrecisionSettings):
    """`Precision` of the forward pass that leaves O and LSE to the backward pass."""

    _target_: str = "numdev.attention.settings.backward.forward_precision"
    preset: str = setting(
        "${precision.preset}",
        "preset that the policy of the forward pass is, unless given that of the backward pass",
        column="name",
    )
    inputs: str | None = setting(
        None,
        "q, k and v as the forward pass receives them, which the backward pass has rounded before",
        "format",
        overruled=Overruled(("forward_precision.quantise.to",)),
    )


def forward_precision(preset: str, quantise: Mapping[str, Any], **steps: str | None) -> Precision:
    """The preset with the steps that differ from it."""
    return policy_of("forward_precision", preset, quantise, steps)


@dataclass
class RecomputeSettings:
    """`Recompute`."""

    _target_: str = "numdev.attention.settings.backward.recompute"
    delta: str = setting(
        "output", "of what delta is the sum over a row: `output`, dO times O (FlashAttention), or `probabilities`, dP times P"
    )
    output: str = setting(
        "rounded", "O of which delta is made: `rounded`, as the forward pass returns it, or `unrounded`, before its last cast"
    )
    exp: str | None = setting(
        None,
        "how the exponential of S - LSE is computed, as softmax.exp takes it; null is as in the forward pass",
        column="exponential",
    )
    exp_coefficients: list[float] | None = setting(
        None, "of a polynomial of the backward pass's own, as softmax.exp_coefficients takes it", column=""
    )
    exp_share: float | None = setting(
        None, "share of the columns that go by the polynomial of recompute.exp or recompute.exp_coefficients", column=""
    )
    softmax: Any = "${softmax}"  # the recurrence of the forward pass


def recompute(
    delta: str,
    output: str,
    exp: str | None,
    exp_coefficients: list[float] | None,
    exp_share: float | None,
    softmax: OnlineSoftmax,
) -> Recompute:
    """How the backward pass recomputes: P by the exponential of the forward pass, unless another is stated."""
    from numdev.attention.backward.recompute import DeltaForm, OutputForDelta, Recompute

    own = exp, exp_coefficients, exp_share
    return Recompute(
        choice("recompute.delta", DeltaForm, delta),
        choice("recompute.output", OutputForDelta, output),
        softmax.exp if own == (None, None, None) else exponential("recompute", *own),
    )
