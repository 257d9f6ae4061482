"""Figures 6a and 6b: the difference with the paper's tile and with another shape of it, over the block area."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.claims.comparisons import DEVIATION, EVERY, clustered, resolution
from numdev.report.claims.finding import ALIKE, LARGER, MARGIN, Evidence, Question, Undecidable, by_format, left_out, select
from numdev.report.figures.grid import Panel, chosen, draw_reproduced, limits, means, multiples, plain_ticks, whiskers
from numdev.report.figures.labels import corner
from numdev.report.figures.plot import BELOW, Plot
from numdev.report.figures.style import BLACK, GREY, PALE, colour
from numdev.report.reading.scenarios import SCENARIO, formats
from numdev.report.statistics.estimates import Interval, ratio, significant, signs
from numdev.report.studies.attention import claim
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.published import GOLDEN

METRICS = ("max_difference",)
_ROOM = 0.3  # share of the vertical axis above the data: two lines of words
TILE, SRAM = "label.tiling.shape", "label.tiling.sram"
_SHAPES = "at BF16, with their ratio. On the right, the ratio at every number format; grey marks ratios within 10 % of 1."


def weigh_fig6a(rows: pd.DataFrame) -> Evidence:
    """With Br and Bc exchanged the difference is larger."""

    def judge(rows: pd.DataFrame) -> Evidence:
        times, told = against_as_is(rows, "swapped")
        every, _ = against_as_is(rows, "swapped", EVERY)
        sentence = f"the ratio of the max differences, swapped / as in the paper, is {times.text()}: {told}{resolution(rows)}"
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
        sentence = f"the ratio of the max differences, square with the same area / as in the paper, is {times.text()}: {told}"
        if (rows["label.tiling.shape"] == "square_bc").any():
            kept, told = against_as_is(rows, "square_bc")
            sentence += f" For squares that keep Bc it is {kept.text()}: {told}"
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
    rest = f"; at {trivial} more sizes both tiles are the same" if trivial else ""
    return times, f"{told}{rest}.{left_out(times)}"


class _Look(NamedTuple):
    """The style of one shape of the tile. The paper's is small and in front, so that the others stay visible behind it."""

    line: str
    marker: str
    size: float
    text: str


_LINES = {
    "as_is": _Look("-", "o", 2.5, "as in the paper"),
    "swapped": _Look("--", "s", 4.5, "Br and Bc swapped"),
    "square": _Look("--", "s", 4.5, "square, same area"),
    "square_bc": _Look(":", "D", 6.0, "square, same Bc"),
}


def draw_fig6a(rows: pd.DataFrame) -> Figure:
    """Max difference with the paper's tile and with Br and Bc swapped, over the block area."""
    return _shapes(rows, "swapped", "paper: swapped is larger")


def draw_fig6b(rows: pd.DataFrame) -> Figure:
    """Max difference with the paper's tile and with square ones, over the block area."""
    return _shapes(rows, "square", "paper: no difference")


def _shapes(rows: pd.DataFrame, other: str, paper: str) -> Figure:
    """Every shape at BF16, absolute, in the source's scenario; the ratio at every format beside it; the other scenarios below."""
    found = chosen(rows)
    found = found.merge(_areas(found), on=[SCENARIO, SRAM])
    present = [name for name in _LINES if (found[TILE] == name).any()]
    main = "bf16" if "bf16" in formats(found) else formats(found)[0]

    def lines(axes: Axes, panel: Panel) -> None:
        own = panel.rows[panel.rows["format"] == main]
        for shape in present:
            _line(axes, own[own[TILE] == shape], shape, colour(main))
        plain_ticks(axes, own["area"].tolist()[:: 1 if panel.large else 2], turned=not panel.large)
        corner(axes, _ratio(own, other, short=not panel.large), **({"fontsize": 8} if panel.large else {}))

    def top(large: Axes, narrow: Axes, panel: Panel) -> None:
        lines(large, panel)
        large.set_ylim(0, large.get_ylim()[1] * 1.6)
        corner(large, paper, down=14, color=GREY)
        keys = [_key(name, colour(main)) for name in present]
        large.legend(keys, [_LINES[name].text for name in present], loc="upper left", frameon=False)
        large.set_xlabel("block area Br · Bc, elements")
        large.set_ylabel(f"max |tiled − baseline|\nat {main.upper()}, absolute")
        _by_format(narrow, panel.rows, other)

    def ends(own: pd.DataFrame) -> tuple[float, float]:
        return limits(own[own["format"] == main], METRICS, "area", TILE, room=_ROOM)

    text = ("block area Br · Bc, elements", f"max |tiled − baseline|\nat {main.upper()}, absolute")
    return draw_reproduced(found, top, multiples(found, lines, ends, text))


def _by_format(axes: Axes, rows: pd.DataFrame, other: str) -> None:
    """The ratio at every format, and the band in which two tiles are alike."""
    names = formats(rows)
    axes.axhspan(1 / MARGIN, MARGIN, color=PALE, zorder=0, linewidth=0)
    axes.axhline(1, color=BLACK, linewidth=0.8, zorder=1)
    for place, name in enumerate(names):
        try:
            times, _ = against_as_is(rows[rows["format"] == name], other)
        except Undecidable:
            continue
        axes.errorbar(place, times.estimate, whiskers([times]), color=colour(name), marker="o")
    axes.set_xticks(range(len(names)), [name.upper() for name in names])
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.margins(y=0.2)
    axes.set_title(f"{other.capitalize()} / as in the paper", loc="left")
    axes.set_xlabel("number format F (grey: alike)")


def _areas(rows: pd.DataFrame) -> pd.DataFrame:
    """The block area of the paper's tile by scenario and SRAM size; all shapes of one size are drawn there."""
    as_is = rows[rows[TILE] == "as_is"].drop_duplicates([SCENARIO, SRAM])
    return as_is[[SCENARIO, SRAM]].assign(area=as_is["tiling.area"].astype(float))


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


def _key(shape: str, shade: str) -> Line2D:
    return Line2D([], [], color=shade, **_look(shape, shade))


def _ratio(rows: pd.DataFrame, shape: str, *, short: bool) -> str:
    """The ratio of the differences with the other shape and with the paper's; `short` without its interval."""
    try:
        times, _ = against_as_is(rows, shape)
    except Undecidable:
        return ""
    told = significant(times.estimate, 3) if short else times.text()
    return f"{shape} / paper's: {told}" if not short else f"ratio {told}"


CHAPTERS = (
    Chapter(
        place=50,
        study="fig6a",
        title="Swapped tiles",
        question="How does swapping $B_r$ and $B_c$ change the difference? (Figure 6a)",
        measured="Tiles from an SRAM size $M$ with $B_c = ceil(M \\/ 4 d)$ and $B_r = min(B_c, d)$, and with the two swapped.",
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
                "The largest difference over the block area, with the paper's tile (solid) and with Br and Bc swapped "
                f"(dashed), {_SHAPES} {BELOW}",
                ("tiling.shape", "tiling.sram"),
            ),
        },
    ),
    Chapter(
        place=60,
        study="fig6b",
        title="Square tiles",
        question="How do square tiles change the difference? (Figure 6b)",
        measured="Tiles from an SRAM size $M$ with $B_c = ceil(M \\/ 4 d)$ and $B_r = min(B_c, d)$; squares of the same area, "
        "and squares that keep $B_c$.",
        paper="Square tiles make no significant difference, since the number of rescales hardly changes (section IV.B).",
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
                "The largest difference over the block area, with the paper's tile (solid) and with square ones "
                f"(dashed), {_SHAPES} {BELOW}",
                ("tiling.shape", "tiling.sram"),
            ),
        },
    ),
)
