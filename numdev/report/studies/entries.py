"""The axis `kernel` of a study: its entries by the role that the study declares, and figures with a row for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.report.claims.finding import Undecidable
from numdev.report.figures.grid import Panel, head, name_steps
from numdev.report.figures.style import PAGE, SMALL
from numdev.report.reading.scenarios import ENTRY_ROLE, ROLES, of, ordered
from numdev.results.manifest import EntryRole

KERNEL, ROLE = "label.kernel", f"{ENTRY_ROLE}kernel"
METRIC = "rmse"  # over all elements: what the order of a sum does to one of them is chance


def kernels(rows: pd.DataFrame) -> dict[str, EntryRole]:
    """What was measured along the axis `kernel`, in the order of the study, with the role that the study declares of each."""
    if KERNEL not in rows:
        return {}
    found = rows.reindex(columns=[KERNEL, ROLE]).dropna(subset=KERNEL).drop_duplicates()
    return {str(name): EntryRole.SUBJECT if pd.isna(role) else EntryRole(role) for name, role in found.itertuples(index=False)}


def subjects(rows: pd.DataFrame) -> list[str]:
    """The kernels of which the claims speak.

    Raises:
        Undecidable: if none was measured.
    """
    found = [name for name, role in kernels(rows).items() if role is EntryRole.SUBJECT]
    if not found:
        raise Undecidable("no kernel could be measured here")
    return found


def the(rows: pd.DataFrame, role: EntryRole) -> str:
    """The one entry that the study declares to have a role.

    Raises:
        Undecidable: if none was measured, or several.
    """
    found = [name for name, own in kernels(rows).items() if own is role]
    if len(found) != 1:
        told = ", ".join(found) or "none"
        raise Undecidable(f"the claim needs one kernel with the role {role.value} in the study, and there is {told}")
    return found[0]


def readable(name: str) -> str:
    """The label of an entry in words."""
    return name.replace("_", " ")


def panels(
    rows: pd.DataFrame, names: list[str], draw: Callable[[Axes, pd.DataFrame], None], text: str, row: float = 0.27
) -> Figure:
    """A panel per scenario, a row per kernel, `row` inches high."""
    scenarios = ordered(rows)
    figure = Figure(figsize=(PAGE, 0.9 + row * len(names)), layout="constrained")
    grid: Any = figure.subplots(1, len(scenarios), sharey=True, squeeze=False)
    for axes, scenario in zip(grid[0], scenarios, strict=True):
        head(axes, Panel(scenario.title, ROLES[scenario.role], rows, large=False), len(scenarios) + 1)
        axes.set_xscale("log")
        name_steps(axes.xaxis)
        draw(axes, of(rows, scenario))
        axes.margins(x=0.25)
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
    axes = grid[0][0]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel(text, fontsize=8)
    return figure


def beside(shade: str) -> dict[str, Any]:
    return {"textcoords": "offset points", "va": "center", "fontsize": SMALL, "color": shade}
