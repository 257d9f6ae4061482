"""What a reader calls the parts of a study of attention: its inputs, policies, recurrences and sizes."""

from __future__ import annotations

from functools import partial

import pandas as pd

from numdev.report.claims.claim import Claim
from numdev.report.claims.comparisons import exponent_of
from numdev.report.reading.words import Words
from numdev.report.statistics.estimates import Interval

LENGTH, AREA = "problem.shape.keys", "tiling.area"
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


def inputs(rows: pd.DataFrame) -> str:
    """The source of q, k, v, if it is the same in all rows."""
    return _only(rows, "problem.source.kind", _INPUTS) or _only(rows, "problem.source.type", {"Captured": "captured"})


def arithmetic(rows: pd.DataFrame) -> str:
    """Inputs, policy and recurrence, where the rows agree on them: `U[0, 1), all steps in F, FA2`."""
    narrow = _narrow(rows)
    parts = [
        inputs(rows),
        _only(narrow, "policy", _POLICIES) + (" (baseline too)" if is_strict(rows) else ""),
        _only(rows, "variant.softmax.normalise", _RECURRENCES),
    ]
    return ", ".join(part for part in parts if part)


def describe(rows: pd.DataFrame) -> str:
    """Describes one scenario: `U[0, 1), all steps in F, FA2; N = 256 to 4096, d = 64, Br = 64`."""
    shown = [
        f"{name} = {_span(rows[column])}" for name, column in _SIZES.items() if column in rows and rows[column].notna().any()
    ]
    if (rows["problem.shape.queries"] != rows["problem.shape.keys"]).any():
        shown.insert(0, f"queries = {_span(rows['problem.shape.queries'])}")
    return "; ".join(part for part in (arithmetic(rows), ", ".join(shown)) if part)


def is_strict(rows: pd.DataFrame) -> bool:
    """Whether the baseline, too, rounds after every elementary operation."""
    narrow = _narrow(rows)
    if narrow.empty or "baseline.precision.name" not in narrow:
        return False
    return bool((narrow["baseline.precision.name"] == narrow["format"]).all())


def _narrow(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in which policies differ: kernel(F) is uniform(F) where F is FP32 or wider."""
    return rows[~rows["format"].isin(["fp32", "fp64"])]


def _span(values: pd.Series[float]) -> str:
    """The one value, or the least and the greatest."""
    low, high = values.min(), values.max()
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _only(rows: pd.DataFrame, column: str, words: dict[str, str]) -> str:
    """The word for the value of a column, if the column has one value only."""
    values = [str(value) for value in rows[column].dropna().unique()] if column in rows else []
    return words.get(values[0], "") if len(values) == 1 else ""


def over_length(rows: pd.DataFrame, metric: str, reference: str = "baseline") -> Interval:
    """The exponent of N, the number of keys."""
    return exponent_of(rows, LENGTH, metric, "N", reference)


def over_area(rows: pd.DataFrame, metric: str) -> Interval:
    """The exponent of the block area Br Bc."""
    return exponent_of(rows, AREA, metric, "block area")


WORDS = Words(
    operation="attention",
    title="How far fast attention strays from exact attention",
    methods="attention.typ",
    headlines=("fig5a_parting.svg", "fig4.svg"),
    told=(
        *("attention", "policy", "tiling.area", "problem.source.type", "problem.source.kind"),
        *("problem.shape.queries", "problem.shape.keys", "problem.shape.head_dim"),
        *("variant.tiling.br", "variant.tiling.bc", "variant.br", "variant.bc", "variant.softmax.normalise"),
    ),
    problem_class="problem.source.type",
    inputs=inputs,
    describe=describe,
    replicates="heads",
    cluster="layer",
)
claim = partial(Claim, words=WORDS)
"""A claim on attention."""
