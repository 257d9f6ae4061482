"""Figures 6a and 6b: the difference with the paper's tile and with another shape of it, over the block area."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.claims.evidence import against_as_is
from numdev.report.claims.finding import Undecidable
from numdev.report.figures.grid import Panel, chosen, draw_grid, means, plain_ticks, whiskers
from numdev.report.figures.labels import corner
from numdev.report.figures.style import GREY, colour
from numdev.report.figures.trends import in_u, limits
from numdev.report.reading.scenarios import ROLES, SCENARIO, formats, is_sources, of, ordered

METRICS = ("max_difference",)
_ROOM = 0.3  # share of the vertical axis above the data: two lines of words
SHAPE, SRAM = "label.tiling.shape", "label.tiling.sram"


class _Look(NamedTuple):
    """How a shape of the tile is drawn: the paper's in front and small, so that what lies under it shows."""

    line: str
    marker: str
    size: float
    text: str


_LINES = {
    "as_is": _Look("-", "o", 2.5, "as in the paper"),
    "swapped": _Look("--", "s", 4.5, "Br and Bc swapped (×: over as in the paper)"),
    "square": _Look("--", "s", 4.5, "square, same area (×: over as in the paper)"),
    "square_bc": _Look(":", "D", 6.0, "square, same Bc"),
}


def fig6a(rows: pd.DataFrame) -> Figure:
    """Max difference with the paper's tile and with Br and Bc swapped, over the block area."""
    return _shapes(rows, "swapped", "paper: swapped is larger")


def fig6b(rows: pd.DataFrame) -> Figure:
    """Max difference with the paper's tile and with square ones, over the block area."""
    return _shapes(rows, "square", "paper: no difference")


def _shapes(rows: pd.DataFrame, other: str, paper: str) -> Figure:
    found = in_u(chosen(rows), METRICS)
    found = found.merge(_areas(found), on=[SCENARIO, SRAM])
    present = [name for name in _LINES if (found[SHAPE] == name).any()]

    def draw(axes: Axes, panel: Panel) -> None:
        fmt = formats(panel.rows)[0]
        for shape in present:
            _line(axes, panel.rows[panel.rows[SHAPE] == shape], shape, colour(fmt))
        plain_ticks(axes, panel.rows["area"].tolist(), turned=True)
        corner(axes, _ratio(panel.rows, other), fontweight="bold")
        if panel.large:
            corner(axes, paper, down=11, color=GREY)

    figure = draw_grid(
        _panels(found),
        draw,
        lambda own: limits(own, METRICS, "area", SHAPE, room=_ROOM),
        axes_text=("block area Br · Bc, elements", "max |tiled − baseline|,\nin u of F"),
        heights=(1.9, 1.75),
    )
    keys = [_key(name) for name in present]
    figure.legend(keys, [_LINES[name].text for name in present], loc="outside upper right", ncols=len(present), frameon=False)
    return figure


def _areas(rows: pd.DataFrame) -> pd.DataFrame:
    """The block area of the paper's tile by scenario and SRAM size: where every shape of that size stands."""
    as_is = rows[rows[SHAPE] == "as_is"].drop_duplicates([SCENARIO, SRAM])
    return as_is[[SCENARIO, SRAM]].assign(area=as_is["tiling.area"].astype(float))


def _panels(rows: pd.DataFrame) -> list[list[Panel]]:
    """A row of formats for each scenario that stands for the source, then the other scenarios, four in a row."""
    first, others = [], []
    for scenario in ordered(rows):
        here = of(rows, scenario)
        row = []
        for name in formats(here):
            own = here[here["format"] == name]
            row.append(Panel(f"{scenario.title}: {name}", ROLES[scenario.role], own, is_sources(scenario)))
        if is_sources(scenario):
            first.append(row)
        else:
            others += row
    return first + [others[i : i + 4] for i in range(0, len(others), 4)]


def _line(axes: Axes, rows: pd.DataFrame, shape: str, shade: str) -> None:
    points = means(rows, "area", METRICS[0])
    intervals = [interval for _, interval in points]
    axes.errorbar(
        [x for x, _ in points],
        [interval.estimate for interval in intervals],
        whiskers(intervals),
        color=shade,
        elinewidth=0.8,
        **_look(shape, shade),
    )


def _look(shape: str, shade: str) -> dict[str, Any]:
    look = _LINES[shape]
    face, layer = (shade, 3.0) if shape == "as_is" else ("white", 2.5 - look.size / 100)
    return {
        "linestyle": look.line,
        "marker": look.marker,
        "markersize": look.size,
        "markerfacecolor": face,
        "zorder": layer,
    }


def _key(shape: str) -> Line2D:
    return Line2D([], [], color=GREY, **_look(shape, GREY))


def _ratio(rows: pd.DataFrame, shape: str) -> str:
    """How much the other shape changes the difference."""
    try:
        times, _ = against_as_is(rows, shape)
    except Undecidable:
        return ""
    return "× " + times.text().replace(" in every replicate", "")
