"""Figures 6a and 6b: the difference with the paper's tile and with another shape of it, over the block area."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.claims.comparisons import DEVIATION, EVERY, clustered, resolution
from numdev.report.claims.finding import ALIKE, LARGER, Evidence, Question, Undecidable, by_format, left_out, select
from numdev.report.figures.grid import Panel, chosen, draw_grid, in_u, limits, means, plain_ticks, whiskers
from numdev.report.figures.labels import corner
from numdev.report.figures.plot import PANELS, Plot
from numdev.report.figures.style import GREY, colour
from numdev.report.reading.scenarios import ROLES, SCENARIO, formats, is_sources, of, ordered
from numdev.report.statistics.estimates import Interval, ratio, signs
from numdev.report.studies.attention import claim
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.published import GOLDEN

METRICS = ("max_difference",)
_ROOM = 0.3  # share of the vertical axis above the data: two lines of words
TILE, SRAM = "label.tiling.shape", "label.tiling.sram"
_SHAPES = (
    "on log axes; a panel per scenario and number format, with the ratio of the two, its interval, and what the paper found."
)


def weigh_fig6a(rows: pd.DataFrame) -> Evidence:
    """With Br and Bc exchanged the difference is larger."""

    def judge(rows: pd.DataFrame) -> Evidence:
        times, told = against_as_is(rows, "swapped")
        every, _ = against_as_is(rows, "swapped", EVERY)
        sentence = f"swapping makes the difference {times.text()} times as large, {told}{resolution(rows)}"
        beside = Evidence(every.text(), "", (Question(every, LARGER),))
        return Evidence(times.text(), sentence, (Question(times, LARGER),), beside)

    return by_format(rows, judge)


def weigh_fig6b(rows: pd.DataFrame) -> Evidence:
    """With square tiles of the same area the difference is alike.

    Squares that keep Bc, and with it the number of rescales, are told beside it where the study has them.
    """

    def judge(rows: pd.DataFrame) -> Evidence:
        times, told = against_as_is(rows, "square")
        every, _ = against_as_is(rows, "square", EVERY)
        sentence = f"square tiles of the same area make the difference {times.text()} times as large, {told}"
        if (rows["label.tiling.shape"] == "square_bc").any():
            kept, told = against_as_is(rows, "square_bc")
            sentence += f" Squares that keep Bc make it {kept.text()} times as large, {told}"
        beside = Evidence(every.text(), "", (Question(every, ALIKE),))
        return Evidence(times.text(), sentence + resolution(rows), (Question(times, ALIKE),), beside)

    return by_format(rows, judge)


def against_as_is(rows: pd.DataFrame, shape: str, metric: str = DEVIATION) -> tuple[Interval, str]:
    """The difference with another shape of the tile over that with the paper's, and a sentence on the pairs.

    Pairs are of one SRAM size and one replicate; those of one replicate are one trial of the sign test, by their mean.
    Sizes at which both shapes are the same tile say nothing and are left out.

    Raises:
        Undecidable: if no size has two different tiles.
    """
    if "label.tiling.sram" not in rows:
        raise Undecidable("the points have no label tiling.sram")
    on, tile = ["label.tiling.sram", "seed"], ["variant.tiling.br", "variant.tiling.bc"]
    name = "label.tiling.shape"
    columns = [*on, *tile, metric]
    as_is, other = (clustered(select(rows, **{name: value})) for value in ("as_is", shape))
    pairs = as_is[[*columns, "cluster"]].merge(other[columns], on=on, suffixes=("", "_other"))
    same = (pairs[tile[0]] == pairs[f"{tile[0]}_other"]) & (pairs[tile[1]] == pairs[f"{tile[1]}_other"])
    trivial = pairs.loc[same, on[0]].nunique()
    pairs = pairs[~same]
    if pairs.empty:
        raise Undecidable(f"at every size the {shape} tile is the paper's own")
    times = ratio(pairs[f"{metric}_other"], pairs[metric], pairs["seed"], pairs["cluster"])
    counted = signs(pairs[f"{metric}_other"], pairs[metric], pairs["seed"])
    test = "" if pairs["cluster"].nunique() > 1 else f" (sign test p = {counted.p:.2g})"  # heads of a layer are no trials
    told = f"larger in {counted.larger}, equal in {counted.equal} of {counted.count} replicates{test}"
    if (pairs[f"{metric}_other"] == pairs[metric]).all():
        told = f"exactly equal in all {len(pairs)} pairs"
    rest = f"; at {trivial} more sizes both are one tile" if trivial else ""
    return times, f"{told}{rest}.{left_out(times)}"


class _Look(NamedTuple):
    """The style of one shape of the tile. The paper's is small and in front, so that the others stay visible behind it."""

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


def draw_fig6a(rows: pd.DataFrame) -> Figure:
    """Max difference with the paper's tile and with Br and Bc swapped, over the block area."""
    return _shapes(rows, "swapped", "paper: swapped is larger")


def draw_fig6b(rows: pd.DataFrame) -> Figure:
    """Max difference with the paper's tile and with square ones, over the block area."""
    return _shapes(rows, "square", "paper: no difference")


def _shapes(rows: pd.DataFrame, other: str, paper: str) -> Figure:
    found = in_u(chosen(rows), METRICS)
    found = found.merge(_areas(found), on=[SCENARIO, SRAM])
    present = [name for name in _LINES if (found[TILE] == name).any()]

    def draw(axes: Axes, panel: Panel) -> None:
        fmt = formats(panel.rows)[0]
        for shape in present:
            _line(axes, panel.rows[panel.rows[TILE] == shape], shape, colour(fmt))
        plain_ticks(axes, panel.rows["area"].tolist(), turned=True)
        corner(axes, _ratio(panel.rows, other), fontweight="bold")
        if panel.large:
            corner(axes, paper, down=11, color=GREY)

    figure = draw_grid(
        _panels(found),
        draw,
        lambda own: limits(own, METRICS, "area", TILE, room=_ROOM),
        axes_text=("block area Br · Bc, elements", "max |tiled − baseline|,\nin u of F"),
        heights=(1.9, 1.75),
    )
    keys = [_key(name) for name in present]
    figure.legend(keys, [_LINES[name].text for name in present], loc="outside upper right", ncols=len(present), frameon=False)
    return figure


def _areas(rows: pd.DataFrame) -> pd.DataFrame:
    """The block area of the paper's tile by scenario and SRAM size; all shapes of one size are drawn there."""
    as_is = rows[rows[TILE] == "as_is"].drop_duplicates([SCENARIO, SRAM])
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


CHAPTERS = (
    Chapter(
        place=50,
        study="fig6a",
        title="Swapped tiles",
        question="What does it change to exchange $B_r$ and $B_c$? (Figure 6a)",
        measured="Tiles from an SRAM size $M$ with $B_c = ceil(M \\/ 4 d)$ and $B_r = min(B_c, d)$, and with the two exchanged.",
        paper="Swapping the order of the block dimensions leads to a larger numerical difference (section IV.B).",
        claims=(
            claim(
                "fig6a",
                "fig6a",
                "Swapping Br and Bc makes the difference larger",
                f"{GOLDEN}, section IV.B, Figure 6a",
                weigh_fig6a,
            ),
        ),
        figures={
            "fig6a": Plot(
                draw_fig6a,
                "Lines of the max difference over the block area, with the paper's tile (solid) and with Br and Bc swapped "
                f"(dashed), {_SHAPES} {PANELS}",
                ("tiling.shape", "tiling.sram"),
            ),
        },
    ),
    Chapter(
        place=60,
        study="fig6b",
        title="Square tiles",
        question="What does it change to make tiles square? (Figure 6b)",
        measured="Tiles from an SRAM size $M$ with $B_c = ceil(M \\/ 4 d)$ and $B_r = min(B_c, d)$; squares of the same area, "
        "and squares that keep $B_c$.",
        paper="Constraining tiles to be square makes no significant difference, since the number of rescales hardly changes "
        "(section IV.B).",
        claims=(
            claim(
                "fig6b",
                "fig6b",
                "Square tiles make no significant difference",
                f"{GOLDEN}, section IV.B, Figure 6b",
                weigh_fig6b,
            ),
        ),
        figures={
            "fig6b": Plot(
                draw_fig6b,
                "Lines of the max difference over the block area, with the paper's tile (solid) and with square ones "
                f"(dashed), {_SHAPES} {PANELS}",
                ("tiling.shape", "tiling.sram"),
            ),
        },
    ),
)
