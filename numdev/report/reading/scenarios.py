"""The scenarios of a study: their order, their descriptions, and what a verdict on one generalises over."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from numdev.results.scenario import Role, Scenario

SCENARIO, TITLE, ROLE, STANDS_FOR = "scenario", "scenario.title", "scenario.role", "scenario.stands_for"
ENTRY_ROLE = "role."  # before the name of an axis: what the point's entry there is to the claims
ROLES = {
    Role.PAPER: "as the source states it",
    Role.ASSUMED: "our assumption",
    Role.BEYOND: "",
    Role.CONTROL: "control",
}
"""Words for the role of a scenario."""
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


def ordered(rows: pd.DataFrame) -> list[Scenario]:
    """The scenarios of some rows by role, in the order of the rows within a role."""
    columns = [SCENARIO, TITLE, ROLE]
    found = rows[columns].drop_duplicates().itertuples(index=False)
    return by_role(Scenario(str(name), str(title), Role(role)) for name, title, role in found)


def by_role(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Sorts scenarios: first those that stand for the source, then those beyond it, then controls; the sort is stable."""
    places = {role: place for place, role in enumerate(Role)}
    return sorted(scenarios, key=lambda scenario: places[scenario.role])


def is_sources(scenario: Scenario) -> bool:
    """Whether a scenario stands for what the source of a claim measured: as the source states it, or as we assume."""
    return scenario.role in (Role.PAPER, Role.ASSUMED)


def shown_first(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """The scenarios that stand for the source; all of them, where none does."""
    found = list(scenarios)
    return [scenario for scenario in found if is_sources(scenario)] or found


def of(rows: pd.DataFrame, scenario: Scenario) -> pd.DataFrame:
    """The rows of one scenario."""
    return rows[rows[SCENARIO] == scenario.name]


def generality(rows: pd.DataFrame) -> str:
    """What a verdict on some rows generalises over: the seeds of a distribution, or the heads of some layers."""
    own = rows[rows["subject"] == "variant"]
    if own.empty:
        return ""
    count = own[["seed", "cluster"]].drop_duplicates().shape[0] if "cluster" in own else own["seed"].nunique()
    layers = sorted(name for name in own["cluster"].dropna().unique() if name) if "cluster" in own else []
    if layers:
        these = f"layer {layers[0]}" if len(layers) == 1 else f"these {len(layers)} layers, {', '.join(layers)}"
        return f"over the heads of {these} ({count} here)"
    return f"over seeds of {inputs(own) or 'the inputs'} ({count} here)"


def formats(rows: pd.DataFrame) -> list[str]:
    """The formats that occur, from the fewest mantissa bits to the most; formats unknown here last."""
    found = [str(name) for name in rows["format"].unique()]
    return sorted(found, key=lambda name: (FORMATS.index(name) if name in FORMATS else len(FORMATS), name))


def describe(rows: pd.DataFrame) -> str:
    """What the rows of one scenario have in common, such as `U[0, 1), all steps in F, FA2`."""
    narrow = rows[~rows["format"].isin(["fp32", "fp64"])]  # kernel(F) is uniform(F) where F is FP32 or wider
    parts = [
        inputs(rows),
        _only(narrow, "policy", _POLICIES) + (" (baseline too)" if _is_strict(narrow) else ""),
        _only(rows, "variant.softmax.normalise", _RECURRENCES),
    ]
    return ", ".join(part for part in parts if part)


def circumstances(rows: pd.DataFrame) -> str:
    """Describes one scenario in full: `U[0, 1), all steps in F, FA2; N = 256 to 4096, d = 64, Br = 64`, and its replicates."""
    own = rows[rows["subject"] == "variant"]
    if own.empty:
        return ""
    shown = [f"{name} = {_span(own[column])}" for name, column in _SIZES.items() if column in own and own[column].notna().any()]
    if (own["problem.shape.queries"] != own["problem.shape.keys"]).any():
        shown.insert(0, f"queries = {_span(own['problem.shape.queries'])}")
    parts = [describe(own), ", ".join(shown), generality(own)]
    return "; ".join(part for part in parts if part)


def _span(values: pd.Series[float]) -> str:
    """The one value, or the least and the greatest."""
    low, high = values.min(), values.max()
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def inputs(rows: pd.DataFrame) -> str:
    """The source of q, k, v, if it is the same in all rows."""
    return _only(rows, "problem.source.kind", _INPUTS) or _only(rows, "problem.source.type", {"Captured": "captured"})


def _is_strict(rows: pd.DataFrame) -> bool:
    """Whether the baseline, too, rounds after every elementary operation."""
    if rows.empty or "baseline.precision.name" not in rows:
        return False
    return bool((rows["baseline.precision.name"] == rows["format"]).all())


def _only(rows: pd.DataFrame, column: str, words: dict[str, str]) -> str:
    """The word for the value of a column, if the column has one value only."""
    values = [str(value) for value in rows[column].dropna().unique()] if column in rows else []
    return words.get(values[0], "") if len(values) == 1 else ""
