"""The deviation of dQ, dK and dV: over the sequence length, over the number format, over the tile, and its direction.

The gradients differ in size, and with N: so their deviations are compared normwise, `||D||_2 / ||golden||_2`, which one rounding
of each element makes about u.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.arithmetic.formats import FP64, Format
from numdev.report.claims.claim import OURS
from numdev.report.claims.comparisons import clustered
from numdev.report.claims.finding import (
    GROWS,
    SHRINKS,
    Evidence,
    Question,
    Region,
    Undecidable,
    by_format,
    left_out,
    select,
)
from numdev.report.figures.grid import (
    Panel,
    at_least_a_decade,
    by_scenario,
    draw_grid,
    in_u,
    limits,
    means,
    plain_ticks,
    whiskers,
)
from numdev.report.figures.labels import corner, room_above
from numdev.report.figures.plot import PANELS, Plot
from numdev.report.reading.scenarios import formats
from numdev.report.statistics.estimates import Interval, slope
from numdev.report.studies.attention import AREA, LENGTH, over_length
from numdev.report.studies.backward import GRADIENTS, SAME_INPUTS, SHADES, SYMBOLS, chosen, claim, measured, narrowest, of_output
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.direction import draw_gradients_direction, weigh_gradients_direction
from numdev.report.studies.published import GOLDEN

SIZE = "relative_frobenius"
_LEAST_U = 2**10 * FP64.u  # golden's own error is a thousandth of what is measured
_ROOM = 0.38  # share of the vertical axis above the lines: a line of words for each gradient
_FIRST_POWER = Region(0.9, 1.1)  # of the exponent of u; DESIGN.md's law on uniform(F) has the same margin


def weigh_gradients_n(rows: pd.DataFrame) -> Evidence:
    """The relative deviation of every gradient grows with N."""
    return by_format(rows, lambda own: _each(own, lambda of: over_length(of, SIZE, SAME_INPUTS), GROWS, "N"))


def weigh_gradients_formats(rows: pd.DataFrame) -> Evidence:
    """The relative deviation of every gradient is proportional to u."""
    return _each(rows, over_unit, _FIRST_POWER, "u")


def over_unit(rows: pd.DataFrame) -> Interval:
    """The exponent of u in the relative deviation; that of the number of mantissa bits in base 2, but for its sign.

    Of formats under one policy, that of the narrowest: `kernel(F)` is `uniform(F)` where F is FP32 or wider.
    """
    found = clustered(select(rows, reference=SAME_INPUTS))
    narrowest = found["format"] == formats(found)[0]
    found = found[found["policy"].isin(found["policy"][narrowest])]
    units = found["format"].map({name: Format.parse(name).u for name in formats(found)})
    found, units = found[units >= _LEAST_U], units[units >= _LEAST_U]
    if units.nunique() < 2:
        raise Undecidable("fewer than two formats were measured whose u is above golden's own error")
    return slope(units, found[SIZE], found["seed"], found["cluster"])


def weigh_gradients_tiles(rows: pd.DataFrame) -> Evidence:
    """Larger tiles make the deviation of dQ smaller, whose running sum takes up one tile of keys at a time."""

    def judge(own: pd.DataFrame) -> Evidence:
        found = {name: _over_area(of_output(own, name)) for name in measured(own)}
        if "dq" not in found:
            raise Undecidable("nothing was measured of dQ")
        told = ", ".join(f"{SYMBOLS[name]} {interval.text()}" for name, interval in found.items())
        sentence = f"the relative deviation scales as a power of the block area: {told}.{left_out(*found.values())}"
        return Evidence(f"area^{found['dq'].text()}", sentence, (Question(found["dq"], SHRINKS),))

    return by_format(rows, judge)


def _over_area(rows: pd.DataFrame) -> Interval:
    found = clustered(select(rows, reference=SAME_INPUTS))
    if found[AREA].nunique() < 2:
        raise Undecidable("only one block area was measured")
    return slope(found[AREA].astype(float), found[SIZE], found["seed"], found["cluster"])


def _each(rows: pd.DataFrame, exponent: Callable[[pd.DataFrame], Interval], region: Region, of: str) -> Evidence:
    """The same question asked of every gradient."""
    found = {name: exponent(of_output(rows, name)) for name in GRADIENTS}
    figure = ", ".join(f"{SYMBOLS[name]} {of}^{interval.text()}" for name, interval in found.items())
    sentence = f"the relative deviation from golden of the same inputs scales as {figure}.{left_out(*found.values())}"
    return Evidence(figure, sentence, tuple(Question(one, region) for one in found.values()))


def draw_gradients(rows: pd.DataFrame) -> Figure:
    """The relative deviation over N in the narrowest format, a line for each gradient."""
    own = narrowest(in_u(chosen(rows), (SIZE,)))

    def places(panel: pd.DataFrame) -> pd.Series[float]:
        return panel[LENGTH].astype(float)

    def ticks(axes: Axes, panel: pd.DataFrame) -> None:
        plain_ticks(axes, places(panel).unique().tolist())

    text = f"sequence length N, tokens (F = {own['format'].iloc[0].upper()})"
    return _lines(own.assign(place=places(own)), text, ticks, lambda found: over_length(found, SIZE, SAME_INPUTS), "N")


def draw_gradients_formats(rows: pd.DataFrame) -> Figure:
    """The relative deviation in units of u over the formats, a line for each gradient: level where it is proportional to u."""
    found = chosen(rows)
    names = formats(found)
    found = found.assign(place=found["format"].map(names.index).astype(float))

    def ticks(axes: Axes, panel: pd.DataFrame) -> None:
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.3, len(names) - 0.7)

    def exponent(own: pd.DataFrame) -> Interval:
        return over_unit(own.assign(**{SIZE: own[SIZE] * own["format"].map(lambda name: Format.parse(name).u).astype(float)}))

    return _lines(in_u(found, (SIZE,)), "number format F, from few mantissa bits to many", ticks, exponent, "u")


def _lines(
    rows: pd.DataFrame,
    text: str,
    ticks: Callable[[Axes, pd.DataFrame], None],
    exponent: Callable[[pd.DataFrame], Interval],
    symbol: str,
) -> Figure:
    """A panel for each scenario, a line for each gradient over the column `place`, and its exponent of `symbol`."""

    def draw(axes: Axes, panel: Panel) -> None:
        ticks(axes, panel.rows)
        for line, output in enumerate(measured(panel.rows)):
            here = of_output(panel.rows, output)
            points = means(here, "place", SIZE)
            across, intervals = [place for place, _ in points], [interval for _, interval in points]
            up, shade = [interval.estimate for interval in intervals], SHADES[output]
            axes.errorbar(across, up, whiskers(intervals), color=shade, marker="o", elinewidth=0.8)
            corner(axes, f"{SYMBOLS[output]} {_power(here, exponent, symbol)}", down=3 + 10 * line, color=shade)

    def ends(own: pd.DataFrame) -> tuple[float, float]:
        found = [limits(of_output(own, output), (SIZE,), "place") for output in measured(own)]
        low, high = at_least_a_decade(min(low for low, _ in found), max(high for _, high in found))
        return low, room_above(low, high, _ROOM)

    figure = draw_grid(by_scenario(rows), draw, ends, axes_text=(text, "‖D‖ / ‖golden‖, in u of F"), heights=(2.0, 1.7))
    keys = [Line2D([], [], color=SHADES[name], marker="o") for name in measured(rows)]
    figure.legend(keys, [SYMBOLS[name] for name in measured(rows)], loc="outside upper right", ncols=3, frameon=False)
    return figure


def _power(rows: pd.DataFrame, exponent: Callable[[pd.DataFrame], Interval], symbol: str) -> str:
    """The exponent of a line with its interval."""
    try:
        value, _, interval = exponent(rows).text().partition(" ")
    except Undecidable:
        return ""
    return f"$\\propto {symbol}^{{{value}}}$ {interval}"


CHAPTERS = (
    Chapter(
        place=210,
        study="gradients",
        operation="attention_backward",
        title="The gradients",
        question="Do $d Q$, $d K$ and $d V$ deviate over formats, lengths and tiles as the output of the forward pass does?",
        measured="The reference is the exact gradient of the same rounded inputs; deviations are relative, by norm.",
        paper="Of the output of the forward pass: it falls from BF16 to FP64, grows with the sequence length, and falls with "
        "larger tiles (Golden et al. 2024, section IV). Gradients were not measured there.",
        claims=(
            claim(
                "gradients",
                "gradients",
                "The relative deviation of dQ, dK and dV grows with N at a fixed tile, as Figure 5a shows for O",
                f"{OURS}: {GOLDEN}, Figure 5a, for the gradients",
                weigh_gradients_n,
                is_ours=True,
            ),
            claim(
                "gradients_formats",
                "gradients_formats",
                "The relative deviation of dQ, dK and dV is proportional to the unit roundoff of the format",
                f"{OURS}: {GOLDEN}, Figure 3, for the gradients",
                weigh_gradients_formats,
                is_ours=True,
            ),
            claim(
                "gradients_tiles",
                "gradients",
                "Larger tiles make the deviation of dQ smaller, as Figure 6c shows for O",
                f"{OURS}: {GOLDEN}, Figure 6c, for the gradients",
                weigh_gradients_tiles,
                is_ours=True,
            ),
            claim(
                "gradients_direction",
                "gradients_direction",
                "The errors of dQ, dK and dV keep a direction from one draw of the inputs to the next",
                f"{OURS}: Qiu and Yao 2025 (arXiv 2510.04212), who find errors of low rank that keep their direction over steps",
                weigh_gradients_direction,
                is_ours=True,
            ),
        ),
        figures={
            "gradients": Plot(
                draw_gradients,
                "Lines of the relative deviation of dQ, dK and dV from exact gradients of the same rounded inputs over the "
                "sequence length N, on log axes, in units of u, each with its exponent of N and the interval of that exponent. "
                f"{PANELS}",
            ),
            "gradients_formats": Plot(
                draw_gradients_formats,
                "Lines of the relative deviation of dQ, dK and dV for each number format, on a log axis, in units of its "
                f"u, each with its exponent of u and the interval of that exponent; a level line is proportional to u. {PANELS}",
                title="The deviation of the gradients over number formats",
            ),
            "gradients_direction": Plot(
                draw_gradients_direction,
                "For dQ, dK and dV: the |cosine| of the top singular vector of the error with that of the seed before (filled) "
                "beside that of random vectors (dashed line), and the share of the error's energy that lies in it (open). One "
                "panel per scenario; means over seeds with their 95 % confidence intervals.",
                title="The direction of the gradients' errors",
            ),
        },
    ),
)
