"""From settings to what is measured: the implementations of attention, and the baseline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from numdev.api import baseline_for
from numdev.arithmetic.formats import Format
from numdev.attention.base import Attention
from numdev.attention.emulation import emulation_of
from numdev.attention.exact import Exact
from numdev.attention.honours import Declares
from numdev.attention.instrumented import Instrumented
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem
from numdev.attention.softmax import Exponential, Normalise
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order
from numdev.attention.triton import Kernel, Products, Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.cli.build import Settings, choice, named, precision, softmax, tiling
from numdev.cli.nearest import one_of
from numdev.errors import BadInput, NotHonoured


def attention(config: Settings) -> Declares:
    """The variant.

    Raises:
        NotHonoured: for a precision that an implementation of fixed arithmetic does not have.
    """
    kind = kind_of(config)
    variant = MAKERS[kind].make(config)
    preset = config["precision"]["preset"]
    if variant.honours.family and "_" in preset and Precision.parse(preset).format != variant.format:
        raise NotHonoured("precision.preset", preset, f"attention={kind} returns {variant.format}; name a format alone")
    return variant


def kind_of(config: Settings) -> str:
    """The variant's kind, one that there is."""
    kind: str = config["attention"]["kind"]
    if kind not in MAKERS:
        raise BadInput("attention.kind", kind, one_of(kind, tuple(MAKERS)))
    return kind


def arithmetic_of(kind: str) -> str:
    """What an implementation of fixed arithmetic can be told of its precision."""
    honours = MAKERS[kind].type.honours
    names = ", ".join(fmt.name for fmt in honours.formats)
    own = f"{honours.family}_{honours.formats[0]}"
    return f"attention={kind} has an arithmetic of its own, which cannot be set; name a format alone ({names}) or as in {own}"


def _tiled(config: Settings) -> Tiled:
    tiles = tiling(config["tiling"], config["problem"]["head_dim"])
    return Tiled(precision(config["precision"]), tiles, softmax(config["softmax"]), config["attention"]["count"])


def _instrumented(config: Settings) -> Instrumented:
    tiles = tiling(config["tiling"], config["problem"]["head_dim"])
    return Instrumented(precision(config["precision"]), tiles, softmax(config["softmax"]))


def _naive(config: Settings) -> Naive:
    normalise = choice("attention.normalise", Normalise, config["attention"]["normalise"])
    return Naive(precision(config["precision"]), normalise)


def _triton(config: Settings) -> Triton:
    settings, tiles = config["attention"], config["tiling"]
    br, bc = _sides(config)
    return Triton(
        fmt=_format(config, "triton"),
        br=br,
        bc=bc,
        order=_order(config),
        splits=tiles["splits"],
        softmax=softmax(config["softmax"], Exponential.EXP2),
        products=choice("attention.products", Products, settings["products"]),
        kernel=choice("attention.kernel", Kernel, settings["kernel"]),
    )


def _sdpa(config: Settings) -> Sdpa:
    return Sdpa(choice("attention.backend", Backend, config["attention"]["backend"]), _format(config, "sdpa"))


def _flex(config: Settings) -> Flex:
    br, bc = _sides(config)
    return Flex(br, bc, _format(config, "flex"))


def _vanilla(config: Settings) -> Vanilla:
    return Vanilla(_format(config, "vanilla"))


def _custom(config: Settings) -> Custom:
    """A function of the user's, whose module may lie in the current folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    function = config["attention"]["function"]
    if function is None:
        raise BadInput("attention.function", None, "attention=custom needs one, written package.module:function")
    return Custom(function, _format(config, "custom"))


class Maker(NamedTuple):
    """A kind of variant: its class, which declares what it honours, and how it is made."""

    type: type[Declares]
    make: Callable[[Settings], Declares]


MAKERS = {
    "tiled": Maker(Tiled, _tiled),
    "instrumented": Maker(Instrumented, _instrumented),
    "naive": Maker(Naive, _naive),
    "exact": Maker(Exact, lambda config: Exact()),
    "triton": Maker(Triton, _triton),
    "sdpa": Maker(Sdpa, _sdpa),
    "flex": Maker(Flex, _flex),
    "vanilla": Maker(Vanilla, _vanilla),
    "custom": Maker(Custom, _custom),
}


def _format(config: Settings, kind: str) -> Format:
    """What the preset names for an implementation of fixed arithmetic: a format alone, or behind the name of its policies."""
    honours, preset = MAKERS[kind].type.honours, config["precision"]["preset"]
    named("precision.preset", Precision.parse, preset)
    family, _, name = preset.rpartition("_")
    try:
        fmt = Format.parse(name)
    except BadInput:  # of golden and others there is none
        fmt = None
    if fmt is None or fmt not in honours.formats or family not in ("", honours.family):
        raise NotHonoured("precision.preset", preset, arithmetic_of(kind))
    return fmt


def _sides(config: Settings) -> tuple[int | None, int | None]:
    """Br and Bc where the command line or a study says them; None leaves them to the kernel's own table."""
    settings = config["tiling"]
    if settings["sram"] is None and settings["shape"] == "as_is":
        return settings["br"], settings["bc"]
    tiles = tiling(settings, config["problem"]["head_dim"])
    return tiles.br, tiles.bc


def _order(config: Settings) -> Order | None:
    stated = config["tiling"]["order"]
    return None if stated is None else choice("tiling.order", Order, stated)


def baseline(config: Settings, variant: Declares, problem: Problem) -> Attention | None:
    """Naive attention, in the variant's output format unless a preset is named; or the emulation of a kernel."""
    settings = config["baseline"]
    name, kind = settings["precision"], settings["kind"]
    if kind not in ("naive", "emulation"):
        raise BadInput("baseline.kind", kind, one_of(kind, ("naive", "emulation")))
    if kind == "emulation":
        _, bc = _sides(config)
        return emulation_of(variant, problem.shape, problem.mask, bc, _order(config), config["tiling"]["splits"] or 1)
    normalise = choice("baseline.normalise", Normalise, settings["normalise"])
    if name == "none":
        return None
    if name is None:
        return replace(baseline_for(variant.format), normalise=normalise)
    if name == "uniform":
        return Naive(Precision.uniform(variant.format), normalise)
    try:
        return Naive(Precision.parse(name), normalise)
    except BadInput as error:
        raise BadInput("baseline.precision", name, f"{error.mend}; or uniform, none, null") from None
