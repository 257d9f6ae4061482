"""The data dictionary: unit and meaning of every column of every table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from numdev.measurement.deviation.measurement import COLUMNS as DEVIATION
from numdev.measurement.deviation.measurement import DIRECTIONS
from numdev.measurement.speed.columns import COUNTED, FOLLOWING, MEASURED
from numdev.measurement.speed.timing import Budget
from numdev.results.record import Column
from numdev.settings import declared

_UNITS = {
    "absolute": "absolute, in the units of the output",
    "relative": "relative",
    "ulp": "ulp of the output's format",
    "u": "unit roundoff u of the output's format",
    "bits": "bits",
    "count": "count",
}

FIXED = {
    "study": "the study's name",
    "scenario": "under which circumstances the study repeats its question, by their name in its file",
    "scenario.title": "the scenario in words",
    "scenario.role": "what the scenario is to the source of the claims: `paper`, as it states it; `assumed`, our assumption "
    "about what it leaves open; `beyond`, where else we look; `control`",
    "scenario.stands_for": "the row of the source's table that the scenario repeats",
    "key": "of the point: a hash of its configuration and environment, and the name of its record",
    "series": "what is measured, as the study labels it",
    "phase": "`decode` for one query per sequence, else `prefill`",
    "crossover": "number of keys from which the tiled algorithm is faster than vanilla attention, between measured lengths",
    "from_the_start": "whether it is faster at the least measured length already",
    "longest": "the greatest number of keys at which both were measured",
    "times_at_longest": "time of vanilla attention over that of the tiled algorithm, at the greatest number of keys",
    "attention": "what is measured: the implementation, with its backend or kernel where one is asked for",
    "sources": "SHA-256 of the sources of a class of the user's own that was measured",
    "kernel": "the compiled kernel that really ran, with its launch settings; empty for tensor operations",
    "format": "number format of the variant's output",
    "policy": "precision policy: `uniform`, every step in `format`; `kernel`, FP32 inside; or the preset's own name",
    "tiling.area": "block area Br * Bc",
    "pairing": "a hash of problem and baseline: where it and the seed agree, inputs and baseline were the same",
    "kind": "of measurement: `deviation`, `speed`, or one of the user's own",
    "operation": "of which an implementation is measured, such as `attention`",
    "status": "how the measurement ended: ok, nonfinite, zero, invalid, unsupported, out_of_memory or error",
    "reason": "why, where it is not ok",
    "environment": "number of the environment in environment.json",
    "seeds": "replicates asked for",
    "counters": "whether the GPU's counters of its traffic were asked for",
    "seconds": "wall time of the measurement of the point",
    "replicates": "replicates that entered the summary",
    "nonfinite": "replicates with NaN in the subject or the reference, or Inf where the other has none",
    "claim": "name of the claim",
    "text": "what is claimed",
    "source": "where it is claimed",
    "verdict": "holds, fails or undecided, in this scenario, by the metric of the source",
    "p_verdict": "p-value of the verdict, adjusted for all `questions` of the table by Holm's method; it decides below 0.05; "
    "empty where bits were compared and nothing is inferred",
    "questions": "how many questions the table asks in all; a claim in one scenario by one metric is one",
    "figure": "the measured figure that decides, with its own 95 % confidence interval",
    "verdict_rmse": "the verdict by RMSE, which sees every element",
    "p_verdict_rmse": "p-value of `verdict_rmse`, adjusted as `p_verdict` is",
    "figure_rmse": "the figure by RMSE",
    "over": "what the verdict generalises over",
    "sentence": "what was found",
    "overall": "the verdict over all scenarios",
    "point": "the point's labels, by which it is found in both result sets",
    "metric": "name of the metric that is compared",
    "change": "from A to B: broken, worse, unknown, same, equal bits (every metric of every replicate), better, mended, "
    "in neither, only in A or only in B; worse and better are judged on `p_adjusted` < 0.05",
    "note": "why a comparison cannot be tested, or what to know of its test",
    "a": "the metric in A: geometric mean over replicates, arithmetic where one is zero",
    "b": "the metric in B: geometric mean over replicates, arithmetic where one is zero",
    "ratio": "B / A: geometric mean over replicates, paired by seed where `paired`",
    "ratio_low": "lower end of the 95 % confidence interval of the ratio (Student's t on logarithms)",
    "ratio_high": "upper end of the 95 % confidence interval of the ratio (Student's t on logarithms)",
    "paired": "whether problem, baseline and seeds were the same, so that replicates are paired",
    "p": "two-sided p-value of the ratio's lying beyond the tolerance, of this comparison alone",
    "p_adjusted": "p adjusted for the number of comparisons by Holm's method",
    "status_a": "how the measurement in A ended",
    "status_b": "how the measurement in B ended",
    "kernel_a": "the compiled kernel that really ran in A",
    "kernel_b": "the compiled kernel that really ran in B",
    "key_a": "of the point in A, and the name of its record",
    "key_b": "of the point in B, and the name of its record",
}

STATISTICS = {
    "mean": "mean over seeds",
    "low": "lower end of the 95 % confidence interval of the mean (Student's t)",
    "high": "upper end of the 95 % confidence interval of the mean (Student's t)",
    "min": "smallest over seeds",
    "max": "largest over seeds",
}

PARTS = ("problem", "variant", "baseline", "timing")
"""The parts of a configuration; a column is `<part>.<setting>`."""
TIMING = {
    "timing.type": Column("timing.type", "", "class of numdev that states how long something is timed"),
    **{(name := f"timing.{one.name}"): Column(name, one.unit, one.text) for one in declared(Budget)},
}
SHIPPED = {column.name: column for column in (*DEVIATION, *DIRECTIONS)} | {
    name: Column(name, *text) for name, text in (MEASURED | COUNTED).items()
}
"""The columns of the kinds that ship with numdev, where no record is at hand."""
LABELLED = "the point's place on an axis of the study"


def settings(manifests: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """The settings that some studies' manifests declare, by column; where two operations differ, what each says."""
    known: dict[str, Column] = {}
    for manifest in manifests:
        for name, (unit, text) in manifest.get("settings", {}).items():
            before = known.get(name, Column(name, unit, text))
            texts = dict.fromkeys([*before.meaning.split("; or: "), text])
            known[name] = Column(name, before.unit or unit, "; or: ".join(texts))
    return known


def meaning(column: str, known: Mapping[str, Column] = SHIPPED) -> tuple[str, str] | None:
    """Unit and text of a column, or None if nothing is known of it; `known` are those that records and studies declare."""
    part, _, name = column.partition(".")
    if column in known:
        unit, text = known[column].unit, known[column].meaning
        of_output = unit if part in PARTS else _UNITS.get(unit, unit)  # what a setting counts is no output
        return ("mean over seeds" if part == "counter" else of_output), text
    if column in FOLLOWING:
        return FOLLOWING[column]
    if column in FIXED:
        return ("s" if column == "seconds" else ""), FIXED[column]
    metric, _, statistic = column.rpartition(".")
    if metric in known and statistic in STATISTICS:
        unit = known[metric].unit
        return _UNITS.get(unit, unit), f"{STATISTICS[statistic]} of: {known[metric].meaning}"
    if part == "counter":
        return "mean over seeds", "what the variant counts of itself"
    if part == "label":
        return "", f"{LABELLED}: `{name}`"
    if part == "role":
        return "", (
            f"what the entry of the axis `{name}` is to the claims: `expected`, what they say the "
            "subjects are like; `control`; `aside`, not judged; empty for a subject"
        )
    return setting(column, known)


def setting(column: str, known: Mapping[str, Column]) -> tuple[str, str] | None:
    """Unit and meaning of a column `<part>.<setting>`; None where it is no part of a configuration.

    A baseline has the settings of a variant. Where nothing declares the setting, as with a class of the user's own, the meaning
    names the column that holds the class.
    """
    part, _, name = column.partition(".")
    if part not in PARTS or not name:
        return None
    if own := known.get(column) or TIMING.get(column):
        return own.unit, own.meaning
    if part == "baseline" and (variant := known.get(f"variant.{name}")):
        return variant.unit, f"of the baseline: {variant.meaning}"
    return "", f"a setting of the class that stands in `{part}.type`"


OF_OUTPUTS = (
    "D is the subject's output minus the reference's, over elements where both are finite, and where the other one of\n"
    "variant and baseline is finite too: their figures are over the same elements, of which `compared` is the number.\n"
    "An empty cell does not apply."
)


def dictionary(tables: Mapping[str, Iterable[str]], known: Mapping[str, Column] = SHIPPED, about: str = OF_OUTPUTS) -> str:
    """The data dictionary of some tables, as Markdown; `known` see `meaning`, `about` is true of all figures."""
    return "\n".join(_lines(tables, known, about)) + "\n"


def _lines(tables: Mapping[str, Iterable[str]], known: Mapping[str, Column], about: str) -> Iterator[str]:
    yield from ("# Columns", "", about)
    for name, columns in tables.items():
        yield from ("", f"## {name}", "", "| column | unit | meaning |", "|---|---|---|")
        for column in columns:
            unit, text = meaning(column, known) or ("", "")
            yield f"| `{column}` | {unit} | {text.replace('|', chr(92) + '|')} |"


_KEYS, _QUERIES = "problem.shape.keys", "problem.shape.queries"
_GROUPS = {
    "operation": ("operation",),
    "precision": ("variant.precision.name",),
    "forward_precision": ("variant.forward.precision.name",),
    "problem": ("problem.source.kind", "problem.source.type"),
    "attention": ("variant.kind", "variant.type"),
    "backward": ("variant.kind", "variant.type"),
}
"""The columns that name the option of a group: the second, a class, where the first is missing."""


def configured(name: str, points: pd.DataFrame) -> pd.Series[Any] | None:
    """The values of a setting, named as on the command line, in the records of some points; None where they do not have it.

    `problem.n` is the number of keys where there are as many queries.
    """
    if name == "problem.n" and {_KEYS, _QUERIES} <= set(points):
        return points[_KEYS].where(points[_KEYS] == points[_QUERIES])
    group, _, own = name.partition(".")
    places = [f"problem.{part}{own}" for part in ("", "shape.", "mask.", "source.")] if group == "problem" else []
    group = group.replace("forward_precision", "forward.precision")
    columns = [points[one] for one in _GROUPS.get(name, (f"variant.{group}.{own}", *places)) if one in points]
    if not columns:
        return None
    return columns[0] if own else columns[0].fillna(columns[-1]).astype("string").str.lower()
