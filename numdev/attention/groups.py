"""Groups of settings: the class whose fields are the settings of each, and which of them an implementation accepts.

A setting is known by its dotted name on the command line. Nothing explicit may be ignored: a constant of a class of attention
lists the settings that it reads; the object itself says which of them it reads only under another one (`tiling.stride` in the
order `strided`): `idle`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any

from numdev.arithmetic.formats import Format
from numdev.attention.precision import FORMATS, BackwardPrecision, Precision
from numdev.attention.problem import DISTRIBUTIONS, BackwardProblem, Problem
from numdev.attention.softmax import OnlineSoftmax, Recompute
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput, NotHonoured
from numdev.settings import declared, named

GROUPS: dict[str, type] = {"problem": Problem, "precision": Precision, "tiling": Tiling, "softmax": OnlineSoftmax}
"""The groups whose options set values of these settings. An option of `attention` and `baseline` has settings of its own."""

BACKWARD_GROUPS: dict[str, type] = {
    "problem": BackwardProblem,
    "precision": BackwardPrecision,
    "forward_precision": Precision,
    "tiling": Tiling,
    "softmax": OnlineSoftmax,
    "recompute": Recompute,
}
"""Those of the backward pass: `precision` has its steps, and the options of the forward pass whose presets it has too."""

BACKWARD_DEFAULTS: dict[str, Any] = {"forward_precision.preset": "${precision.preset}"}
"""Defaults that differ from those of the fields."""


_NAMED = {
    "golden": "Every step in FP64.",
    "fp8": "FlashAttention-3's FP8, as fa3_fp8.",
    "int8": "SageAttention, blocks of 64 rows.",
}
_FAMILIES = {
    "": "Every step in {}: each elementary operation rounds its exact result once.",
    "eager": "Three tensor operations in {}: matmul, softmax in FP32 or wider, rounded once, matmul.",
    "kernel": "Inputs, P and output in {}, all else in FP32, as in fused kernels.",
}


def presets(group: str) -> dict[str, str]:
    """The options of a group that need no file, with their meanings: distributions of `problem`, policies of `precision`."""
    if group == "problem":
        return {kind.kind.value: inspect.getdoc(kind) or "" for kind in DISTRIBUTIONS}
    if group != "precision":
        return {}
    shipped = {name: _NAMED.get(name) or str(inspect.getdoc(made)).splitlines()[0] for name, made in Precision.SHIPPED.items()}
    of_formats = {
        f"{family}_{fmt}".lstrip("_"): text.format(str(fmt).upper()) for family, text in _FAMILIES.items() for fmt in FORMATS
    }
    return {"golden": _NAMED["golden"], **shipped, **of_formats}


def preset(group: str, option: str) -> dict[str, Any] | None:
    """The node of an option that needs no file; None where there is none. `precision` has one of every format, as in `e8m10`."""
    if group == "problem":
        kind = {kind.kind.value: kind for kind in DISTRIBUTIONS}.get(option)
        if kind is None:
            return None
        own = {each.name: each.default for each in fields(kind) if each.init}
        return {"source": {"_target_": f"{kind.__module__}.{kind.__qualname__}", **own}}
    if group != "precision":
        return None
    try:
        Precision.parse(option)
    except BadInput:
        return None
    return {"preset": option}


def settings_of(group: str, kind: type) -> frozenset[str]:
    """The settings of a group."""
    return frozenset(f"{group}.{one.name}" for one in declared(kind))


PRESET = frozenset({"precision.preset"})
STEPS = settings_of("precision", Precision) - PRESET
TILES = settings_of("tiling", Tiling)
SIDES = frozenset({"tiling.br", "tiling.bc", "tiling.sram", "tiling.shape"})
RECURRENCE = settings_of("softmax", OnlineSoftmax)
BACKWARD_STEPS = settings_of("precision", BackwardPrecision)
FORWARD_STEPS = settings_of("forward_precision", Precision)
RECOMPUTED = settings_of("recompute", Recompute)


@dataclass(frozen=True)
class AcceptedSettings:
    """The settings that an implementation reads."""

    names: frozenset[str] = frozenset()  # dotted, as `tiling.bc`
    # Of an implementation whose arithmetic is fixed, the policies that it has, `kernel` or `eager`; `precision` then names a
    # format alone, or with this in front of it. Empty where the policy is free, or there is none
    family: str = ""
    formats: tuple[Format, ...] = ()  # those that an implementation of fixed arithmetic offers

    def format_of(self, preset: str, option: str) -> Format:
        """The format that `precision.preset` names for fixed arithmetic: alone, or behind the name of its policies.

        `option` is that of the implementation, as in `attention=sdpa`.

        Raises:
            NotHonoured: for a precision that the implementation does not have.
        """
        named("precision.preset", Precision.parse, preset)
        family, _, name = preset.rpartition("_")
        try:
            fmt = Format.parse(name)
        except BadInput:  # of golden and others there is none
            fmt = None
        if fmt is None or fmt not in self.formats or family not in ("", self.family):
            raise NotHonoured("precision.preset", preset, self.refusal("precision.preset", option))
        return fmt

    def refusal(self, name: str, option: str) -> str:
        """Why a setting that is not read cannot be set, where there is more to say than that; `option` is the variant's."""
        if not (self.family and name.startswith("precision.")):
            return ""
        names, own = ", ".join(fmt.name for fmt in self.formats), f"{self.family}_{self.formats[0]}"
        return f"{option} has an arithmetic of its own, which cannot be set; name a format alone ({names}) or as in {own}"
