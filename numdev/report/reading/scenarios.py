"""The scenarios of a study, in the order of their roles, the formats of its rows, and which rows are of one comparison."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from numdev.results.store import Role, Scenario

SCENARIO, TITLE, ROLE, STANDS_FOR = "scenario", "scenario.title", "scenario.role", "scenario.stands_for"
LABEL = "label."  # before the name of an axis: the point's place on it
ENTRY_ROLE = "role."  # before the name of an axis: what the point's entry there is to the claims
PRIMARY = "primary"  # whether a row is of the primary output
ROLES = {
    Role.PAPER: "as the source states it",
    Role.ASSUMED: "our assumption",
    Role.BEYOND: "",
    Role.CONTROL: "control",
}
"""Words for the role of a scenario."""
FORMATS = ("e5m2", "e4m3fn", "bf16", "fp16", "tf32", "fp32", "fp64")  # from few mantissa bits to many


def ordered(rows: pd.DataFrame) -> list[Scenario]:
    """The scenarios of some rows by role, in the order of the rows within a role."""
    different = rows[[SCENARIO, TITLE, ROLE]].drop_duplicates().itertuples(index=False)
    return by_role(Scenario(str(name), str(title), Role(role)) for name, title, role in different)


def by_role(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Sorts scenarios: first those that stand for the source, then those beyond it, then controls; the sort is stable."""
    places = {role: place for place, role in enumerate(Role)}
    return sorted(scenarios, key=lambda scenario: places[scenario.role])


def is_sources(scenario: Scenario) -> bool:
    """Whether a scenario stands for what the source of a claim measured: as the source states it, or as we assume."""
    return scenario.role in (Role.PAPER, Role.ASSUMED)


def of(rows: pd.DataFrame, scenario: Scenario) -> pd.DataFrame:
    """The rows of one scenario."""
    return rows[rows[SCENARIO] == scenario.name]


def formats(rows: pd.DataFrame) -> list[str]:
    """The formats that occur, from the fewest mantissa bits to the most; formats unknown here last."""
    names = map(str, rows["format"].unique())
    return sorted(names, key=lambda name: (FORMATS.index(name) if name in FORMATS else len(FORMATS), name))


def compared(rows: pd.DataFrame, subject: str = "variant", reference: str = "") -> pd.DataFrame:
    """The rows of the primary output of one subject, against one reference where it is named."""
    own = rows[rows[PRIMARY].astype(bool) & (rows["subject"] == subject)]
    return own[own["reference"] == reference] if reference else own
