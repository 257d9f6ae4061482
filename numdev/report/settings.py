"""The circumstances under which a study repeats its question: their order, and what they are in words."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

PAPER = "uniform"  # settings of the paper: uniform inputs, every step in one format, either recurrence
FORMATS = ("e5m2", "e4m3fn", "bf16", "fp16", "tf32", "fp32", "fp64")  # from few mantissa bits to many

_INPUTS = {
    "uniform": "U[0, 1)",
    "normal": "N(0, 1)",
    "normal_logits": "wide logits",
    "outliers": "outliers",
    "student_t": "Student's t",
    "tied": "tied maxima",
    "sink": "attention sink",
    "gap": "attention sink without noise",
    "constant": "constant",
}
_POLICIES = {"uniform": "all steps in F", "kernel": "kernel(F)"}
_SIZES = {
    "N": "problem.shape.keys",
    "d": "problem.shape.head_dim",
    "Br": "variant.tiling.br",
    "Bc": "variant.tiling.bc",
}
_RECURRENCES = {"each": "FA1", "end": "FA2"}


def is_papers(setting: str) -> bool:
    """Whether a setting is one of the paper's own: `uniform_each` (FlashAttention-1), `uniform_end` (-2), `uniform`."""
    return setting == PAPER or setting.startswith(f"{PAPER}_")


def ordered(settings: Iterable[str]) -> list[str]:
    """The paper's settings first, otherwise as they come, each once."""
    return sorted(dict.fromkeys(settings), key=lambda setting: not is_papers(setting))


def formats(rows: pd.DataFrame) -> list[str]:
    """The formats that occur, from the fewest mantissa bits to the most; formats unknown here last."""
    found = [str(name) for name in rows["format"].unique()]
    return sorted(found, key=lambda name: (FORMATS.index(name) if name in FORMATS else len(FORMATS), name))


def describe(rows: pd.DataFrame) -> str:
    """What the rows of one setting have in common, such as `U[0, 1), all steps in F, FA2`."""
    narrow = rows[~rows["format"].isin(["fp32", "fp64"])]  # kernel(F) is uniform(F) where F is FP32 or wider
    parts = [
        inputs(rows),
        _only(narrow, "policy", _POLICIES) + (" (baseline too)" if _is_strict(narrow) else ""),
        _only(rows, "variant.softmax.normalise", _RECURRENCES),
    ]
    return ", ".join(part for part in parts if part)


def circumstances(rows: pd.DataFrame) -> str:
    """Of one setting in full: `U[0, 1), all steps in F, FA2; N = 256 to 4096, d = 64, Br = 64, Bc = 64; 10 seeds`."""
    own = rows[rows["subject"] == "variant"]
    if own.empty:
        return ""
    shown = [f"{name} = {_span(own[column])}" for name, column in _SIZES.items() if column in own and own[column].notna().any()]
    if (own["problem.shape.queries"] != own["problem.shape.keys"]).any():
        shown.insert(0, f"queries = {_span(own['problem.shape.queries'])}")
    seeds = own["seed"].nunique()
    parts = [describe(own), ", ".join(shown), f"{seeds} seeds" if seeds > 1 else "1 seed"]
    return "; ".join(part for part in parts if part)


def _span(values: pd.Series[float]) -> str:
    """The one value, or the least and the greatest."""
    low, high = values.min(), values.max()
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def inputs(rows: pd.DataFrame) -> str:
    """Where q, k, v come from, if all rows have it in common."""
    return _only(rows, "problem.source.kind", _INPUTS) or _only(rows, "problem.source.type", {"Captured": "captured"})


def _is_strict(rows: pd.DataFrame) -> bool:
    """Whether the baseline, too, rounds after every elementary operation."""
    if rows.empty or "baseline.precision.name" not in rows:
        return False
    return bool((rows["baseline.precision.name"] == rows["format"]).all())


def _only(rows: pd.DataFrame, column: str, words: dict[str, str]) -> str:
    """The word for a column's value if it has just one."""
    values = [str(value) for value in rows[column].dropna().unique()] if column in rows else []
    return words.get(values[0], "") if len(values) == 1 else ""
