"""Real kernels beside the emulation: how much of their error it predicts, and which policy they follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.claims.finding import Undecidable, select
from numdev.report.claims.kernels import KERNEL, METRIC, SMALL, agreement, kernels
from numdev.report.figures.grid import Panel, head, highest, name_steps, replicates, whiskers
from numdev.report.figures.style import BLUE, GREY, PAGE, VERMILION, colour
from numdev.report.figures.style import SMALL as TINY
from numdev.report.reading.scenarios import ROLES, formats, of, ordered
from numdev.results.scenario import EntryRole

_SHADES = {EntryRole.CONTROL: VERMILION, EntryRole.EXPECTED: BLUE, EntryRole.SUBJECT: "#000000", EntryRole.ASIDE: GREY}


def validate(rows: pd.DataFrame) -> Figure:
    """RMSE between kernel and emulation over the emulation's own arithmetic error; left of 1 it is predicted, 0 is bit-equal."""
    names, found = kernels(rows), formats(rows)

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        for place, (name, role) in enumerate(names.items()):
            for i, fmt in enumerate(found):
                part = own[(own["format"] == fmt) & (own[KERNEL] == name)]
                shade = GREY if role is EntryRole.CONTROL else colour(fmt)
                _agreement(axes, part, name, place + 0.42 * (i - (len(found) - 1) / 2), shade)
        axes.axvline(1, color=GREY, linewidth=0.6)
        axes.axvline(SMALL, color=GREY, linestyle="--", linewidth=0.6)

    shown = ["control: exact" if role is EntryRole.CONTROL else _words(name) for name, role in names.items()]
    figure = _panels(rows, shown, draw, "RMSE between kernel and emulation over that of the emulation from golden", 0.36)
    keys = [Line2D([], [], color=colour(fmt), marker="o", linestyle="") for fmt in found]
    words = [f"{fmt}, with the share of equal elements" for fmt in found]
    figure.legend(keys, words, loc="outside upper right", ncols=2, frameon=False)
    return figure


def _agreement(axes: Axes, rows: pd.DataFrame, name: str, place: float, shade: str) -> None:
    try:
        a = agreement(rows, name)
    except Undecidable:
        return
    if not a.distance.estimate > 0:
        axes.annotate("bit-equal", (0, place), (3, 0), xycoords=("axes fraction", "data"), **_beside(shade))
        return
    axes.errorbar(a.distance.estimate, place, xerr=whiskers([a.distance]), color=shade, marker="o")
    axes.annotate(f"{100 * a.equal.estimate:.1f} %", (highest(a.distance), place), (5, 0), **_beside(shade))


def policies(rows: pd.DataFrame) -> Figure:
    """RMSE of each kernel from golden, between the emulated policies `kernel(F)` and `uniform(F)`."""
    names, fmt = kernels(rows), formats(rows)[0].upper()
    policy = {EntryRole.CONTROL: f"every step in {fmt}", EntryRole.EXPECTED: f"kernel({fmt}), emulated"}

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        for place, (name, role) in enumerate(names.items()):
            try:
                interval = replicates(select(own, "variant", "golden", **{KERNEL: name}), METRIC)
            except Undecidable:
                axes.annotate("not measured", (0, place), (3, 0), xycoords=("axes fraction", "data"), **_beside(GREY))
                continue
            assert interval is not None, "select refuses what holds NaN"
            emulated, shade = role in policy, _SHADES[role]
            axes.errorbar(interval.estimate, place, xerr=whiskers([interval]), color=shade, marker="D" if emulated else "o")
            if emulated:
                axes.axvline(interval.estimate, color=shade, linestyle="--", linewidth=0.6, zorder=0)

    shown = [policy.get(role, _words(name)) for name, role in names.items()]
    return _panels(rows, shown, draw, "RMSE of O from golden, absolute")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _panels(
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


def _beside(shade: str) -> dict[str, Any]:
    return {"textcoords": "offset points", "va": "center", "fontsize": TINY, "color": shade}
