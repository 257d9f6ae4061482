"""From settings, as plain containers, to value objects. The only place where strings become choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from enum import Enum
from typing import Any, TypeVar

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.microscale import Microscaled
from numdev.arithmetic.quantise import Quantised, Scale, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.captured import Captured
from numdev.attention.distributions import Distribution, Drawn, Kind
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.softmax import EXPONENTIALS, Exponential, Maximum, Normalise, OnlineSoftmax, ScaleOn, SumOver
from numdev.attention.tiling import Order, Tiling
from numdev.cli.nearest import one_of
from numdev.cli.settings import Request
from numdev.errors import BadInput
from numdev.results.study import Refused, StudyPoint

Settings = Mapping[str, Any]
E = TypeVar("E", bound=Enum)
T = TypeVar("T")

CAPTURED = "captured"
SHAPES = ("as_is", "swapped", "square", "square_bc")
_DOTS = ("scores", "row_sum", "values")
_MICROSCALED = ("inputs", "probabilities")  # steps that may be microscaled


def point(request: Request, scenario: str = "default", labels: Mapping[str, Any] | None = None) -> StudyPoint:
    """What a whole configuration asks for.

    Raises:
        BadInput: naming the setting as the command line does.
        NotHonoured: if a setting is stated that nothing of what would be measured reads.
    """
    from numdev.cli import honoured
    from numdev.cli.variants import attention, baseline

    config = request.config
    honoured.check(request)
    variant, posed = attention(config), problem(config["problem"])
    honoured.check_built(request, variant)
    seeds = posed.replicates(_seeds(config))
    return StudyPoint(posed, variant, baseline(config, variant, posed), seeds, scenario, dict(labels or {}))


def refused_point(request: Request, scenario: str, labels: Mapping[str, Any], reason: str) -> StudyPoint:
    """The place of a point that cannot be measured as it is stated."""
    config = request.config
    places = (f"{name}={label}" for name, label in labels.items())
    stated = " ".join(dict.fromkeys([*map(str, request.said.values()), *places]))
    variant = Refused(config["attention"]["kind"], stated)
    posed = problem(config["problem"])
    return StudyPoint(posed, variant, None, posed.replicates(_seeds(config)), scenario, dict(labels), reason)


def _seeds(config: Settings) -> int | None:
    seeds: int | None = config["seeds"]
    if seeds is not None and seeds < 1:
        raise BadInput("seeds", seeds, "give the number of replicates, at least 1")
    return seeds


def problem(settings: Settings) -> Problem:
    """Shapes, mask, scale and source."""
    sizes = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")
    lengths = settings["key_lengths"]
    mask = Mask(settings["causal"], settings["window"], None if lengths is None else tuple(lengths))
    shape = Shape(**{name: settings[name] for name in sizes})
    return Problem(source(settings["source"]), shape, mask, settings["scale"])


def source(settings: Settings) -> Drawn | Captured:
    """A distribution, or the file of captured tensors; a setting of the one refuses the other."""
    kind, field = settings["kind"], "problem.source"
    if kind == CAPTURED:
        if settings["parameter"] is not None:
            raise BadInput(f"{field}.parameter", settings["parameter"], "captured tensors have none; give null")
        return Captured(settings["path"] or "minilm", settings["layer"])
    for name in ("path", "layer"):
        if settings[name] is not None:
            raise BadInput(f"{field}.{name}", settings[name], "only problem=captured reads a file")
    known = [*(member.value for member in Kind), CAPTURED]
    if kind not in known:
        raise BadInput(f"{field}.kind", kind, one_of(kind, known))
    parameter = settings["parameter"]
    if parameter is None:
        return Distribution(Kind(kind))
    name = next((each.name for each in fields(Distribution(Kind(kind))) if each.init), "parameter")
    return Distribution(Kind(kind), **{name: int(parameter) if name == "copies" else parameter})


def precision(settings: Settings) -> Precision:
    """The preset with the steps that differ from it."""
    base = named("precision.preset", Precision.parse, settings["preset"])
    steps: dict[str, Any] = {}
    for field in fields(Precision):
        text = settings[field.name]
        if text is not None:
            parse: Callable[[str], Cast | Dot | Microscaled] = Dot.parse if field.name in _DOTS else Cast.parse
            if field.name in _MICROSCALED and Microscaled.is_named_by(text):
                parse = Microscaled.parse
            steps[field.name] = named(f"precision.{field.name}", parse, text)
    return replace(base, **(steps | {"inputs": _quantised(settings["quantise"], steps.get("inputs", base.inputs))}))


def _quantised(settings: Settings, inputs: Cast | Microscaled | Quantised) -> Cast | Quantised:
    """The inputs, quantised where any setting says how."""
    given = {name: value for name, value in settings.items() if value is not None}
    base = Quantised(inputs) if isinstance(inputs, Microscaled) or (given and isinstance(inputs, Cast)) else inputs
    if not given:
        return base
    assert isinstance(base, Quantised), "what was no quantisation became one"
    field = "precision.quantise"
    if "to" in given:
        given["to"] = named(f"{field}.to", _grid, given["to"])
        if isinstance(given["to"], Microscaled):
            given.setdefault("scale", None)
    if given.get("scale") is not None:
        given["scale"] = choice(f"{field}.scale", Scale, given["scale"])
    if "smoothing" in given:
        given["smoothing"] = choice(f"{field}.smoothing", Smoothing, given["smoothing"])
        if not given["smoothing"].of_q:
            given.setdefault("smoothing_block", None)
    if "values" in given:
        given["values"] = None if given["values"] == "same" else named(f"{field}.values", _grid, given["values"])
        if not isinstance(given["values"], Cast):
            given.setdefault("values_scale", None)
    if given.get("values_scale") is not None:
        none = given["values_scale"] == "none"
        given["values_scale"] = None if none else choice(f"{field}.values_scale", Scale, given["values_scale"])
    return replace(base, **given)


def _grid(text: str) -> Cast | Microscaled:
    return Microscaled.parse(text) if Microscaled.is_named_by(text) else Cast.parse(text)


def tiling(settings: Settings, head_dim: int) -> Tiling:
    """The tiles; `sram` gives their sides as the paper does, then `shape` exchanges or squares them."""
    sides = {name: settings[name] for name in ("br", "bc") if settings[name] is not None}
    sram, shape = settings["sram"], settings["shape"]
    if sram is not None:
        for name, value in sides.items():
            raise BadInput(f"tiling.{name}", value, f"tiling.sram={sram} gives the sides; take null for one of the two")
        derived = Tiling.from_sram(sram, head_dim)
        sides = {"br": derived.br, "bc": derived.bc}
    given = Tiling(
        **sides,
        order=Order.FORWARD if settings["order"] is None else choice("tiling.order", Order, settings["order"]),
        splits=1 if settings["splits"] is None else settings["splits"],
        stride=settings["stride"],
        seed=settings["seed"],
    )
    if shape not in SHAPES:
        raise BadInput("tiling.shape", shape, one_of(shape, SHAPES))
    if shape == "square_bc":
        return replace(given, br=given.bc)
    return given if shape == "as_is" else given.swapped() if shape == "swapped" else given.square()


def softmax(settings: Settings, exp: Exponential = Exponential.EXP) -> OnlineSoftmax:
    """The recurrence; `exp` is that of an implementation which is not told otherwise."""
    return OnlineSoftmax(
        normalise=choice("softmax.normalise", Normalise, settings["normalise"]),
        maximum=choice("softmax.maximum", Maximum, settings["maximum"]),
        exp=_exponential(settings, exp),
        scale_on=choice("softmax.scale_on", ScaleOn, settings["scale_on"]),
        rescale_threshold=settings["rescale_threshold"],
        p_scale=settings["p_scale"],
        tie_shift=settings["tie_shift"],
        sum_over=choice("softmax.sum_over", SumOver, settings["sum_over"]),
    )


def _exponential(settings: Settings, otherwise: Exponential) -> Exponential:
    """A named exponential, or the polynomial whose coefficients are given, in the share of the columns that is given."""
    name, coefficients, share = settings["exp"], settings["exp_coefficients"], settings["exp_share"]
    if name is not None and name not in EXPONENTIALS:
        raise BadInput("softmax.exp", name, one_of(name, list(EXPONENTIALS)))
    chosen = otherwise if name is None else Exponential.parse(name)
    if coefficients is not None:
        if name not in (None, "exp2"):
            raise BadInput("softmax.exp_coefficients", coefficients, f"{name} takes none; give softmax.exp=exp2 or null")
        return Exponential.polynomial(tuple(coefficients), 1.0 if share is None else share)
    if share is None:
        return chosen
    if not chosen.coefficients:
        mend = "give the polynomial too, as softmax.exp=exp2_poly3 or softmax.exp_coefficients"
        raise BadInput("softmax.exp_share", share, mend)
    return Exponential.polynomial(chosen.coefficients, share)


def named(field: str, parse: Callable[[str], T], text: str) -> T:
    """`parse(text)`, with a complaint that names the setting."""
    try:
        return parse(text)
    except BadInput as error:
        raise BadInput(field, text, error.mend) from None


def choice(field: str, kind: type[E], value: str) -> E:
    known = [member.value for member in kind]
    if value not in known:
        raise BadInput(field, value, one_of(value, known))
    return kind(value)
