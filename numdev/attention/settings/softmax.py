"""The online recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numdev.errors import BadInput
from numdev.nearest import NotAChoice, choice
from numdev.settings import setting

if TYPE_CHECKING:
    from numdev.attention.softmax import Exponential, OnlineSoftmax


@dataclass
class SoftmaxSettings:
    """`OnlineSoftmax`; its `Exponential` is `exp`, or a polynomial with `exp_coefficients` in `exp_share` of the columns."""

    _target_: str = "numdev.attention.settings.softmax.softmax"
    normalise: str = setting(
        "end",
        "when O is divided by l: `each`, after every tile (FlashAttention-1), or `end`, once (FlashAttention-2)",
        word="place of the division by l",
    )
    maximum: str = setting(
        "running",
        "maximum that exponentials are taken from: `running` (FlashAttention-2), or the tile's own, `local` (FlashAttention-1)",
        word="running maximum",
    )
    exp: str | None = setting(
        None,
        "how the exponential of S - m is computed: exp, exp2, or exp2 by a named or written polynomial in some columns: "
        "exp2_poly1 to exp2_poly5, exp2_fa4, exp2_fa4_fp8; null is exp, and exp2 for attention=triton",
        word="exponential",
    )
    exp_coefficients: list[float] | None = setting(
        None, "of a polynomial of 2^f in place of exp2, lowest power first, as in [1,0.7]", column=""
    )
    exp_share: float | None = setting(
        None, "share of the columns that go by the polynomial; null is all, or as in a named one", column=""
    )
    scale_on: str = setting(
        "scores", "what the forward pass multiplies with 1/sqrt(d): the scores, or the queries, then rounded as the inputs are"
    )
    rescale_threshold: float = setting(
        0.0,
        "how far a row's maximum must rise for O and l to be rescaled (FlashAttention-4); 0 rescales always",
        "log 2",
        word="threshold of rescaling",
    )
    p_scale: float = setting(1.0, "factor of P before it is rounded, taken out after the product with V", word="factor of P")
    tie_shift: float | None = setting(
        None, "factor of m in S - m where a row's largest score is tied (Qiu & Yao 2025); empty leaves ties alone"
    )
    sum_over: str = setting(
        "exponentials", "what l adds up: `exponentials`, P before it is rounded, or `probabilities`, P as it meets V"
    )


def softmax(**settings: Any) -> OnlineSoftmax:
    """The recurrence."""
    from numdev.attention.softmax import Maximum, Normalise, OnlineSoftmax, ScaleOn, SumOver

    return OnlineSoftmax(
        normalise=choice("softmax.normalise", Normalise, settings["normalise"]),
        maximum=choice("softmax.maximum", Maximum, settings["maximum"]),
        exp=exponential("softmax", settings["exp"], settings["exp_coefficients"], settings["exp_share"]),
        scale_on=choice("softmax.scale_on", ScaleOn, settings["scale_on"]),
        rescale_threshold=settings["rescale_threshold"],
        p_scale=settings["p_scale"],
        tie_shift=settings["tie_shift"],
        sum_over=choice("softmax.sum_over", SumOver, settings["sum_over"]),
    )


def exponential(group: str, name: str | None, coefficients: list[float] | None, share: float | None) -> Exponential:
    """A named exponential, or the polynomial whose coefficients are given, in the share of the columns that is given.

    Raises:
        BadInput: naming the setting of the group.
    """
    from numdev.attention.softmax import EXPONENTIALS, Exponential

    if name is not None and name not in EXPONENTIALS:
        raise NotAChoice(f"{group}.exp", name, EXPONENTIALS)
    chosen = Exponential.EXP if name is None else Exponential.parse(name)
    if coefficients is not None:
        if name not in (None, "exp2"):
            raise BadInput(f"{group}.exp_coefficients", coefficients, f"{name} takes none; give {group}.exp=exp2 or null")
        chosen, share = Exponential.EXP2, 1.0 if share is None else share
    if share is None:
        return chosen
    if coefficients is None and not chosen.coefficients:
        mend = f"give the polynomial too, as {group}.exp=exp2_poly3 or {group}.exp_coefficients"
        raise BadInput(f"{group}.exp_share", share, mend)
    try:
        return Exponential.polynomial(chosen.coefficients if coefficients is None else tuple(coefficients), share)
    except BadInput as error:
        raise BadInput(error.field.replace("softmax", group), error.value, error.mend) from None
