"""The data dictionary: unit and meaning of every column of every table."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numdev.measurement.deviation import COLUMNS as DEVIATION
from numdev.measurement.deviation import DIRECTIONS
from numdev.measurement.deviation import KIND as DEVIATION_KIND
from numdev.measurement.speed import FOLLOWING, MEASURED, Budget
from numdev.results.record import Column
from numdev.settings import declared

TEXTS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
"""The words for columns, statistics, metrics and units."""
_UNITS, FIXED, STATISTICS = TEXTS["units"], TEXTS["columns"], TEXTS["statistics"]
PARTS = ("problem", "variant", "baseline", "timing")
"""The parts of a configuration; a column is `<part>.<setting>`."""
TIMING = {
    "timing.type": Column("timing.type", "", "class of numdev that states how long something is timed"),
    **{(name := f"timing.{one.name}"): Column(name, one.unit, one.text) for one in declared(Budget)},
}
SHIPPED = {column.name: column for column in (*DEVIATION, *DIRECTIONS)} | {
    name: Column(name, *text) for name, text in MEASURED.items()
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


def dictionary(tables: Mapping[str, Iterable[str]], known: Mapping[str, Column] = SHIPPED, kind: str = DEVIATION_KIND) -> str:
    """The data dictionary of some tables of a kind of measurement, as Markdown; `known` see `meaning`."""
    lines = ["# Columns", "", TEXTS["about"].get(kind, TEXTS["about"]["own"])]
    for name, columns in tables.items():
        lines += ["", f"## {name}", "", "| column | unit | meaning |", "|---|---|---|"]
        for column in columns:
            unit, text = meaning(column, known) or ("", "")
            lines.append(f"| `{column}` | {unit} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"
