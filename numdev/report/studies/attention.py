"""Studies of attention, of either pass: words, and figures beside those that a study's file states in words."""

from __future__ import annotations

import pandas as pd

from numdev.report.claims.verdicts import Undecidable
from numdev.report.studies import TEXTS, operation_words

LENGTH = "problem.shape.keys"
SAME_INPUTS = "golden_same_inputs"
SYMBOLS = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV", "delta": "delta"}
"""Symbols of the outputs."""
_KIND = "problem.source.kind"


def inputs(rows: pd.DataFrame) -> str:
    """The source of q, k, v, if it is the same in all rows."""
    return _only(rows, _KIND, TEXTS["inputs"]) or _only(rows, "problem.source.type", {"Captured": "captured"})


def arithmetic(rows: pd.DataFrame) -> str:
    """Inputs, policy and recurrence, where the rows agree on them: `U[0, 1), all steps in F, FA2`."""
    parts = [
        inputs(rows),
        _only(_narrow(rows), "policy", TEXTS["policies"]) + (" (baseline too)" if is_strict(rows) else ""),
        _only(rows, "variant.softmax.normalise", TEXTS["recurrences"]),
    ]
    return ", ".join(part for part in parts if part)


def describe(rows: pd.DataFrame) -> str:
    """Describes one scenario: `U[0, 1), all steps in F, FA2; N = 256 to 4096, d = 64, Br = 64`."""
    shown = [
        f"{name} = {_span(rows[column])}"
        for name, column in TEXTS["sizes"].items()
        if column in rows and rows[column].notna().any()
    ]
    if (rows["problem.shape.queries"] != rows[LENGTH]).any():
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


def of_output(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of one output, as if that were the primary one: what claims and figures select from.

    Raises:
        Undecidable: if it was not measured.
    """
    own = rows[rows["output"] == name]
    if own.empty:
        raise Undecidable(f"nothing was measured of {SYMBOLS.get(name, name)}")
    return own.assign(primary=True)


WORDS = operation_words("attention", inputs=inputs, describe=describe)
BACKWARD = operation_words("attention_backward", WORDS)
