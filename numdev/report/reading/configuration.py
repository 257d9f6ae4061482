"""What a setting of a point's configuration means: as the operation declared it, and the study's manifest keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from numdev.measurement.speed.timing import Budget
from numdev.results.record import Column
from numdev.settings import declared

PARTS = ("problem", "variant", "baseline", "timing")
"""What a configuration consists of; a column is `<part>.<setting>`."""

TIMING = {
    "timing.type": Column("timing.type", "", "class of numdev that states how long something is timed"),
    **{(name := f"timing.{one.name}"): Column(name, one.unit, one.text) for one in declared(Budget)},
}


def settings(manifests: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """The settings that some studies' manifests declare, by column; where two operations differ, what each says."""
    found: dict[str, Column] = {}
    for manifest in manifests:
        for name, (unit, text) in manifest.get("settings", {}).items():
            known = found.get(name)
            if known is None:
                found[name] = Column(name, unit, text)
            elif text not in known.meaning.split("; or: "):
                found[name] = Column(name, known.unit or unit, f"{known.meaning}; or: {text}")
    return found


def setting(column: str, known: Mapping[str, Column]) -> tuple[str, str] | None:
    """Unit and meaning of a column `<part>.<setting>`; None where it is no part of a configuration.

    A baseline has the settings of a variant. Where nothing declares the setting, as with a class of the user's own, the meaning
    names the column that holds the class.
    """
    part, _, name = column.partition(".")
    if part not in PARTS or not name:
        return None
    found = known.get(column) or TIMING.get(column)
    if found is not None:
        return found.unit, found.meaning
    if part == "baseline" and (same := known.get(f"variant.{name}")) is not None:
        return same.unit, f"of the baseline: {same.meaning}"
    return "", f"a setting of the class that stands in `{part}.type`"
