"""The groups of settings of attention: the class whose fields are the settings of each, and the options that need no file."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from numdev.attention.distributions import DISTRIBUTIONS
from numdev.attention.precision import FORMATS, BackwardPrecision, Precision
from numdev.attention.problem import BackwardProblem, Problem
from numdev.attention.softmax import OnlineSoftmax, Recompute
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput

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
