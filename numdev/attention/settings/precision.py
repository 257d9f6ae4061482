"""The format of each step."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from numdev.errors import BadInput, NotHonoured
from numdev.nearest import choice, named
from numdev.settings import Overruled, setting

if TYPE_CHECKING:
    from numdev.arithmetic.dot import Dot
    from numdev.arithmetic.formats import Format
    from numdev.arithmetic.microscale import Microscaled
    from numdev.arithmetic.quantise import Quantised
    from numdev.arithmetic.rounding import Cast
    from numdev.attention.honours import Honouring
    from numdev.attention.precision import Precision

_DOTS = ("scores", "row_sum", "values")
_MICROSCALED = ("inputs", "probabilities")  # steps that may be microscaled
_SUM = "; behind `@`, after how many products the running sum is rounded to it; without, after each tile"


@dataclass
class QuantiseSettings:
    """`Quantised`; null is as in the preset."""

    to: str | None = setting(None, "grid that q, k and v are rounded to after division by their scale", "format")
    scale: str | None = setting(
        None,
        "numbers of q, k and v that share one scale: of a tensor, block of rows, row, channel or thread; empty if microscaled",
    )
    block: int | None = setting(None, "rows of a head that share one scale, with a scale per block", "rows")
    block_q: int | None = setting(None, "the same for q alone; empty where it is that of k", "rows")
    hadamard: bool | None = setting(
        None, "whether q and k are turned by a random Hadamard matrix before rounding, and back after it"
    )
    smoothing: str | None = setting(None, "whose mean over tokens is taken out before rounding: none, k's, q's, or both (qk)")
    smoothing_block: int | None = setting(None, "how many tokens of q share the mean that is taken out; empty for all", "tokens")
    values: str | None = setting(None, "v, where it is not quantised like q and k, which is `same`; empty where it is", "format")
    values_scale: str | None = setting(
        None, "numbers of v that share one scale where v has a grid of its own; empty without a scale, which is `none`"
    )
    seed: int | None = setting(None, "what the signs of the Hadamard matrix are drawn with")


@dataclass
class PrecisionSettings:
    """`Precision`: a preset and the steps that differ from it; null is as in the preset."""

    _target_: str = "numdev.attention.settings.precision.precision"
    preset: str = setting(
        "bf16", "preset that the precision policy is, as precision= takes it; `custom` for any other", column="name"
    )
    inputs: str | None = setting(
        None, "q, k and v as the algorithm receives them", "format", overruled=Overruled(("precision.quantise.to",))
    )
    scores: str | None = setting(None, "S, the product Q K^T and its scaling" + _SUM, "format")
    exponential: str | None = setting(
        None, "the difference S - m, and its exponential; without tiles also P divided by l", "format"
    )
    rescale: str | None = setting(None, "the old maximum minus the new one, and its exponential alpha", "format")
    row_sum: str | None = setting(None, "l, alpha times the old sum, plus the sum of P; and the LSE" + _SUM, "format")
    probabilities: str | None = setting(None, "P as it enters the product with V", "format")
    values: str | None = setting(None, "the product P V" + _SUM, "format")
    accumulator: str | None = setting(None, "O between tiles, alpha times the old O plus P V, and its division by l", "format")
    output: str | None = setting(None, "O as it is returned", "format")
    quantise: QuantiseSettings = field(default_factory=QuantiseSettings)


def precision(preset: str, quantise: Mapping[str, Any], **steps: str | None) -> Precision:
    """The preset with the steps that differ from it."""
    return policy_of("precision", preset, quantise, steps)


def policy_of(where: str, preset: str, quantise: Mapping[str, Any], steps: Mapping[str, str | None]) -> Precision:
    """A policy of the forward pass from the settings of the node `where`.

    Raises:
        BadInput: naming the setting.
    """
    from numdev.arithmetic.dot import Dot
    from numdev.arithmetic.microscale import Microscaled
    from numdev.arithmetic.rounding import Cast
    from numdev.attention.precision import Precision

    base = named(f"{where}.preset", Precision.parse, preset)
    changed: dict[str, Any] = {}
    for each in fields(Precision):
        text = steps[each.name]
        if text is not None:
            parse: Callable[[str], Cast | Dot | Microscaled] = Dot.parse if each.name in _DOTS else Cast.parse
            if each.name in _MICROSCALED and Microscaled.is_named_by(text):
                parse = Microscaled.parse
            changed[each.name] = named(f"{where}.{each.name}", parse, text)
    return replace(base, **(changed | {"inputs": _quantised(where, quantise, changed.get("inputs", base.inputs))}))


def _quantised(policy: str, settings: Mapping[str, Any], inputs: Cast | Microscaled | Quantised) -> Cast | Quantised:
    """The inputs, quantised where any setting says how."""
    from numdev.arithmetic.microscale import Microscaled
    from numdev.arithmetic.quantise import Quantised, Scale, Smoothing
    from numdev.arithmetic.rounding import Cast

    given = {name: value for name, value in settings.items() if value is not None}
    base = Quantised(inputs) if isinstance(inputs, Microscaled) or (given and isinstance(inputs, Cast)) else inputs
    if not given:
        return base
    assert isinstance(base, Quantised), "what was no quantisation became one"
    where = f"{policy}.quantise"
    if "to" in given:
        given["to"] = named(f"{where}.to", _grid, given["to"])
        if isinstance(given["to"], Microscaled):
            given.setdefault("scale", None)
    if given.get("scale") is not None:
        given["scale"] = choice(f"{where}.scale", Scale, given["scale"])
    if "smoothing" in given:
        given["smoothing"] = choice(f"{where}.smoothing", Smoothing, given["smoothing"])
        if not given["smoothing"].of_q:
            given.setdefault("smoothing_block", None)
    if "values" in given:
        given["values"] = None if given["values"] == "same" else named(f"{where}.values", _grid, given["values"])
        if not isinstance(given["values"], Cast):
            given.setdefault("values_scale", None)
    if given.get("values_scale") is not None:
        none = given["values_scale"] == "none"
        given["values_scale"] = None if none else choice(f"{where}.values_scale", Scale, given["values_scale"])
    return replace(base, **given)


def _grid(text: str) -> Cast | Microscaled:
    from numdev.arithmetic.microscale import Microscaled
    from numdev.arithmetic.rounding import Cast

    return Microscaled.parse(text) if Microscaled.is_named_by(text) else Cast.parse(text)


def format_of(preset: str, implementation: str, option: str = "") -> Format:
    """What the preset names for an implementation of fixed arithmetic: a format alone, or behind the name of its policies.

    Args:
        preset: as in `precision.preset`.
        implementation: its class, `package.module.Class`.
        option: the group and the option that it is, as in `backward=triton`; `attention=` and the name of the class unless given.

    Raises:
        NotHonoured: for a precision that the implementation does not have.
    """
    from numdev.arithmetic.formats import Format
    from numdev.attention.precision import Precision

    kind: type[Honouring] = pkgutil.resolve_name(":".join(implementation.rsplit(".", 1)))
    named("precision.preset", Precision.parse, preset)
    family, _, name = preset.rpartition("_")
    try:
        fmt = Format.parse(name)
    except BadInput:  # of golden and others there is none
        fmt = None
    if fmt is None or fmt not in kind.honours.formats or family not in ("", kind.honours.family):
        option = option or f"attention={kind.__name__.lower()}"
        raise NotHonoured("precision.preset", preset, kind.honours.refusal("precision.preset", option))
    return fmt
