"""From settings, as plain containers, to value objects. The only place where strings become choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from enum import Enum
from typing import Any, TypeVar

from numdev.captured import Captured
from numdev.cli.nearest import one_of
from numdev.distributions import Distribution, Kind
from numdev.errors import BadInput
from numdev.mask import Mask
from numdev.precision import Dot, Precision
from numdev.problem import Problem, Shape
from numdev.quantise import Quantised, Scale, Smoothing
from numdev.rounding import Cast
from numdev.softmax import Exponential, Normalise, OnlineSoftmax, ScaleOn
from numdev.study import StudyPoint
from numdev.tiling import Loop, Order, Tiling

Settings = Mapping[str, Any]
E = TypeVar("E", bound=Enum)
T = TypeVar("T")

CAPTURED = "captured"
SHAPES = ("as_is", "swapped", "square", "square_bc")
_DOTS = ("scores", "row_sum", "values")


def point(config: Settings, scenario: str = "default", labels: Mapping[str, Any] | None = None) -> StudyPoint:
    """What a whole configuration asks for.

    Raises:
        BadInput: naming the setting as the command line does.
    """
    seeds = config["seeds"]
    if seeds is not None and seeds < 1:
        raise BadInput("seeds", seeds, "give the number of replicates, at least 1")
    from numdev.cli.variants import attention, baseline

    variant, posed = attention(config), problem(config["problem"])
    replicates = posed.replicates(seeds)
    return StudyPoint(posed, variant, baseline(config, variant, posed), replicates, scenario, dict(labels or {}))


def problem(settings: Settings) -> Problem:
    """Shapes, mask, scale and source."""
    sizes = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")
    lengths = settings["key_lengths"]
    mask = Mask(settings["causal"], settings["window"], None if lengths is None else tuple(lengths))
    shape = Shape(**{name: settings[name] for name in sizes})
    return Problem(source(settings["source"]), shape, mask, settings["scale"])


def source(settings: Settings) -> Distribution | Captured:
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
    return Distribution(Kind(kind), settings["parameter"])


def precision(settings: Settings) -> Precision:
    """The preset with the steps that differ from it."""
    base = named("precision.preset", Precision.parse, settings["preset"])
    steps: dict[str, Any] = {}
    for field in fields(Precision):
        text = settings[field.name]
        if text is not None:
            parse: Callable[[str], Cast | Dot] = Dot.parse if field.name in _DOTS else Cast.parse
            steps[field.name] = named(f"precision.{field.name}", parse, text)
    return replace(base, **(steps | {"inputs": _quantised(settings["quantise"], steps.get("inputs", base.inputs))}))


def _quantised(settings: Settings, inputs: Cast | Quantised) -> Cast | Quantised:
    """The inputs, quantised where any setting says how."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        return inputs
    base = inputs if isinstance(inputs, Quantised) else Quantised(inputs)
    field = "precision.quantise"
    if "to" in given:
        given["to"] = named(f"{field}.to", Cast.parse, given["to"])
    if "scale" in given:
        given["scale"] = choice(f"{field}.scale", Scale, given["scale"])
    if "smoothing" in given:
        given["smoothing"] = choice(f"{field}.smoothing", Smoothing, given["smoothing"])
    if "values" in given:
        same = given["values"] == "same"
        given["values"] = None if same else named(f"{field}.values", Cast.parse, given["values"])
    return replace(base, **given)


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
        loop=choice("tiling.loop", Loop, settings["loop"]),
        splits=settings["splits"],
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
        exp=exp if settings["exp"] is None else choice("softmax.exp", Exponential, settings["exp"]),
        scale_on=choice("softmax.scale_on", ScaleOn, settings["scale_on"]),
        rescale_threshold=settings["rescale_threshold"],
        p_scale=settings["p_scale"],
        tie_shift=settings["tie_shift"],
    )


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
