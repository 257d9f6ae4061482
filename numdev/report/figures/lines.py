"""Figures that a study's file states in words: a metric over a setting or over number formats, and its ratio by scenario.

A factor of two would not be seen on an axis over the sixteen decades from BF16 to FP64. So over a setting the panels show BF16
alone, and one beside the first every format in units of its own u, where exponents can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.arithmetic.formats import Format
from numdev.report.claims.evidence import over_column, ratio_of
from numdev.report.figures import marks
from numdev.report.figures.theme import (
    BASELINE,
    BLACK,
    GREY,
    HALF_PAGE,
    OUTPUT_COLOURS,
    PAGE,
    PALE,
    POLICY_COLOURS,
    SMALL,
    TILED,
    colour,
)
from numdev.report.reading.scenarios import compared, formats, is_sources, of, ordered
from numdev.report.statistics import Interval, significant
from numdev.results.manifest import Scenario

_FORMAT = "format"
_LOOKS: tuple[dict[str, Any], ...] = (  # of lines of one colour: the first is small and in front, so that the others stay visible
    {"linestyle": "-", "marker": "o", "zorder": 3.0},
    {"linestyle": "--", "marker": "s", "markersize": 5, "markerfacecolor": "white", "zorder": 2.4},
    {"linestyle": ":", "marker": "D", "markersize": 6, "markerfacecolor": "white", "zorder": 2.3},
)
_SHADES = OUTPUT_COLOURS | {"variant": TILED, "baseline": BASELINE}
_SHIFT = 0.24  # of the dots over one format, apart


class _Series(NamedTuple):
    """One line: its name, its rows, its metric and its look."""

    name: str
    rows: pd.DataFrame
    metric: str
    look: Mapping[str, Any]


@dataclass(frozen=True)
class Lines:
    """A figure in words.

    Attributes:
        x: the column of points that lies across, on a log axis; `format` for number formats, which are names.
        y: metrics, as `output.metric`; each has a line.
        text: what lies across and what lies up, with units.
        reference: of the metrics.
        by: a further column, each value of which has a line.
        names: words for the values of `by`, or for the metrics in the order of `y`.
        symbol: of x; with it panels state the exponent.
        paper: what the source says, above the first panel.
        in_u: whether metrics are in units of u of the format.
        ratio: `of` and `to` of a claim: over formats beside the first panel, or in the layout `panels` in place of the metric.
        ratio_text: what that is.
        at: values of the ratio, or of y, that have a line, with words.
        band: values of the ratio between which there is a band.
        layout: `panels`: one for each scenario. `reproduced`: the source's scenario is large with one panel beside it, the others
            are small below. `ratio`: in place of the small panels stands a row for each scenario with the ratio.
    """

    x: str
    y: Sequence[str]
    text: tuple[str, str]
    reference: str = "baseline"
    by: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    symbol: str = ""
    paper: str = ""
    in_u: bool = False
    ratio: Mapping[str, Any] = field(default_factory=dict)
    ratio_text: str = ""
    at: Mapping[float, str] = field(default_factory=dict)
    band: tuple[float, float] | None = None
    layout: str = "panels"

    def main(self, rows: pd.DataFrame) -> str:
        """BF16, or the narrowest format of the rows: that of which a claim speaks."""
        names = formats(rows)
        return "bf16" if "bf16" in names else names[0]

    @property
    def has_units(self) -> bool:
        """Whether the unit roundoff of each format is marked."""
        return self.x == _FORMAT and not (self.in_u or self.by)

    def series(self, rows: pd.DataFrame) -> Iterator[_Series]:
        """The lines in some rows; over a setting those at one format."""
        fmt = self.main(rows)
        here = rows if self.x == _FORMAT else rows[rows["format"] == fmt]
        for place, name in enumerate(self.y):
            output, _, metric = name.rpartition(".")
            own = here[here["output"] == output].assign(primary=True)
            values = (self.names or own[self.by].dropna().unique()) if self.by else ("",)
            lines = [(str(value), own[own[self.by] == value] if self.by else own) for value in values]
            for i, (value, mine) in enumerate((value, mine) for value, mine in lines if len(mine) or not self.by):
                shade = _SHADES.get(value if self.by else output, colour(fmt) if self.x != _FORMAT else "")
                look = _LOOKS[(0 if shade in _SHADES.values() else i if self.by else place) % len(_LOOKS)]
                yield _Series(self.names.get(value or name, value or name), mine, metric, {**look, "color": shade or GREY})

    def points(self, own: _Series, *, in_u: bool = False) -> list[tuple[float, Interval | None]]:
        """The values of a line at each x, ascending; None where a replicate holds NaN or Inf, or nothing was measured."""
        if self.ratio and self.layout == "panels":
            values = {x: self.times(rows) for x, rows in own.rows.groupby(self.x, sort=True)}
        else:
            subject = own.rows["subject"].iloc[0] if self.by == "subject" and len(own.rows) else "variant"
            rows = compared(own.rows, subject, self.reference)
            rows = marks.in_u(rows, own.metric) if in_u or self.in_u else rows
            values = {x: marks.replicates(at, own.metric) for x, at in rows.groupby(self.x, sort=True)}
        if self.x == _FORMAT:
            return [(float(i), values.get(name)) for i, name in enumerate(formats(own.rows))]
        return [(float(str(x)), value) for x, value in values.items()]

    def times(self, rows: pd.DataFrame) -> Interval | None:
        """The ratio in some rows."""
        return marks.measured(lambda: ratio_of(rows, self.y[0], self.reference, **self.ratio))

    def power(self, own: _Series, *, whole: bool = False) -> str:
        """The exponent in words; empty where it is not stated."""
        if not self.symbol or self.ratio:
            return ""
        column = "u" if self.x == _FORMAT else self.x
        value = marks.measured(over_column, own.rows, column, own.metric, self.symbol, self.reference)
        if value is None or not math.isfinite(value.estimate):
            return ""
        number, _, rest = value.text().partition(" ") if whole else (significant(value.estimate), "", "")
        return f"$\\propto {self.symbol}^{{{number}}}$ {rest}".strip()

    @property
    def ends(self) -> tuple[float, ...]:
        """Values that an axis of the ratio reaches."""
        return *self.at, *(self.band or ())

    def fill(self, grid: Sequence[Axes], rows: pd.DataFrame, scenarios: Sequence[Scenario], across: int, *, large: bool) -> None:
        """Draws a panel for each scenario, `across` in a row, all on one vertical log axis."""
        panels = [of(rows, scenario) for scenario in scenarios]
        values = [value for panel in panels for own in self.series(panel) for _, value in self.points(own)]
        units = [Format.parse(name).u for panel in panels for name in formats(panel)] if self.has_units else []
        room = 0.14 * min(3, len(self.y)) if self.symbol or self.ratio else 0.0
        limits = marks.around(values, *units, *(self.ends if self.layout == "panels" else ()), room=room)
        for place, (axes, scenario, panel) in enumerate(zip(grid, scenarios, panels, strict=True)):
            marks.log_y(axes, *limits)
            marks.head(axes, scenario, across, 8 if large else SMALL)
            self.draw(axes, panel, large=large)
            axes.tick_params(labelleft=place % across == 0)

    def draw(self, axes: Axes, rows: pd.DataFrame, *, large: bool) -> None:
        """The lines of a panel with their exponents, or the ratio."""
        every = list(self.series(rows))
        for place, own in enumerate(every):
            self._line(axes, own, place - (len(every) - 1) / 2)
            if words := self.power(own, whole=large and len(every) > 1):
                named = own.name if len(every) > 1 else ""
                down = 2 + 10 * (place + bool(large and self.paper))
                marks.corner(axes, f"{named} {words}".strip(), down=down, color=own.look["color"])
        if self.ratio and self.layout != "panels" and self.x != _FORMAT:
            value = self.times(rows[rows["format"] == self.main(rows)])
            words = "" if value is None else f"ratio {value.text() if large else significant(value.estimate, 3)}"
            marks.corner(axes, words, down=12 if large else 2)
        self._lay(axes, rows, turned=not large)
        if self.layout == "panels":
            self._mark(axes, named=large)

    def _line(self, axes: Axes, own: _Series, shift: float) -> None:
        """Over a setting joined; over formats a dot for each, and a word where there is nothing to draw."""
        points = self.points(own)
        if self.x != _FORMAT:
            known = [(x, value) for x, value in points if value is not None and value.estimate > 0]
            marks.line(axes, known, elinewidth=0.8, label=own.name, **own.look)
            return
        for (x, value), name in zip(points, formats(own.rows), strict=True):
            shade = own.look["color"] if own.look["color"] != GREY else colour(name)
            if value is not None and value.estimate > 0:
                marks.line(axes, [(x + _SHIFT * shift, value)], color=shade, marker="o", markersize=4.5, label=own.name)
            else:
                look: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "ha": "center", "fontsize": SMALL}
                axes.annotate("NaN" if value is None else "0", (x, 0.02), **look)
            if self.has_units:
                axes.hlines(Format.parse(name).u, x - 0.3, x + 0.3, color=BLACK, linewidth=0.8, linestyle=(0, (2, 1)))

    def _lay(self, axes: Axes, rows: pd.DataFrame, *, turned: bool = False) -> None:
        """Names of what was measured on the horizontal axis, every other one where there are many."""
        if self.x == _FORMAT:
            axes.set_xticks(range(len(formats(rows))), [name.upper() for name in formats(rows)])
            axes.set_xlim(-0.6, len(formats(rows)) - 0.4)
            axes.tick_params(axis="x", length=0)
            return
        each = [sorted(own.rows[self.x].dropna().astype(float).unique().tolist()) for own in self.series(rows)]
        marks.plain_ticks(axes, each[0][:: 2 if len(each[0]) > 4 else 1], turned=turned and len(each[0]) > 5)
        low, high = (end(place for own in each for place in own) for end in (min, max))
        span = max(high / low, 2.0)
        axes.set_xlim(low / span**0.08, high * span**0.08)

    def _mark(self, axes: Axes, *, named: bool = True) -> None:
        """The values with a line, and the band."""
        if self.band:
            axes.axhspan(*self.band, color=PALE, zorder=0, linewidth=0)
        for value, words in self.at.items():
            axes.axhline(value, **marks.DASHED | ({"color": BLACK, "linestyle": "-"} if value == 1 else {}))
            look: dict[str, Any] = marks.BESIDE | {"ha": "right", "va": "bottom", "color": GREY}
            axes.annotate(words if named else "", (1, value), (-2, 2), xycoords=axes.get_yaxis_transform(), **look)

    def beside(self, axes: Axes, rows: pd.DataFrame) -> None:
        """Beside the first panel: the ratio at every format, or the metric at every format in units of its u."""
        over = replace(self, x=_FORMAT) if self.ratio else self
        every, names = list[Interval | None](), list[tuple[float, float, str, str]]()
        for place, name in enumerate(formats(rows)):
            at, power = rows[rows["format"] == name], ""
            if self.ratio:
                points = [(0.0, self.times(at))]
            else:
                own = next(self.series(at))
                points, power = self.points(own, in_u=True), self.power(own)
            every += [value for _, value in points]
            here = [(place if over.x == _FORMAT else x, value) for x, value in points if value and value.estimate > 0]
            marks.line(
                axes, here, elinewidth=0.8, label="_" if over.x == _FORMAT else name.upper(), marker="o", color=colour(name)
            )
            names += [(x, value.estimate, f"{name.upper()} {power}", colour(name)) for x, value in here[-1:]]
        marks.log_y(axes, *marks.around(every, *(self.ends if self.ratio else ())))
        over._lay(axes, rows)
        if self.ratio:
            self._mark(axes, named=False)
        if over.x != _FORMAT:
            left, right = axes.get_xlim()
            axes.set_xlim(left, right * (right / left) ** 0.75)
            marks.name_ends(axes, names, 0.09)
        axes.set_title(self.ratio_text.capitalize() if self.ratio else "Every format, in u of F", loc="left")
        axes.set_xlabel("number format F" if over.x == _FORMAT else self.text[0].partition(",")[0])

    def rows_of_scenarios(self, axes: Axes, rows: pd.DataFrame) -> None:
        """The ratio at one format, a row for each scenario in the colour of its policy."""
        own, scenarios, dots = rows[rows["format"] == self.main(rows)], ordered(rows), []
        for place, scenario in enumerate(scenarios):
            here = of(own, scenario)
            value = self.times(here)
            text = "" if not value else value.text() if math.isfinite(value.high) else significant(value.estimate)
            policy = "".join(here["policy"][here["subject"] == "variant"].iloc[:1])
            dots.append(marks.Dot(place, value, POLICY_COLOURS.get(policy, TILED), text, "unknown"))
        marks.draw_rows(axes, [marks.titled(one) for one in scenarios], dots, at=self.at, band=self.band, room=0.38)
        axes.set_xlabel(f"{self.text[1].partition(',')[0]} at {self.main(rows).upper()}, {self.ratio_text}")


def draw_lines(rows: pd.DataFrame, **options: Any) -> Figure:
    """The figure; `options` are the fields of `Lines`."""
    at = {float(value): words for value, words in options.pop("at", {}).items()}  # whose keys are text in a manifest
    own = Lines(at=at, **options)
    rows = rows[rows["output"].isin([name.rpartition(".")[0] for name in own.y])]
    scenarios, is_panels = ordered(rows), own.layout == "panels"
    count = max(1, sum(map(is_sources, scenarios))) if is_panels else 1
    small = [] if own.layout == "ratio" else scenarios[count:]
    across = min(len(small), 3 if len(small) in (1, 2, 3, 5, 6, 9) else 4)  # where that leaves fewer gaps
    down = math.ceil(len(small) / across) if small else 0
    heights = [2.3, *([1.5 * down + 0.25] if small else [0.75 + 0.165 * len(scenarios)] if own.layout == "ratio" else [])]
    figure = marks.page(sum(heights), HALF_PAGE if is_panels and len(scenarios) == 1 else PAGE)
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    first = parts[0].subplots(1, count if is_panels else 2, width_ratios=None if is_panels else (2, 1), squeeze=False)[0]
    own.fill(first[:count], rows, scenarios[:count], count, large=True)
    where = "" if own.x == _FORMAT else f"at {own.main(rows).upper()}"
    text = f"{own.text[1]} {where}".rstrip() if is_panels else own.text[1].replace(", ", f"\n{where}, " if where else ",\n", 1)
    if not is_panels:
        marks.corner(first[0], own.paper, color=GREY)
        first[0].set(xlabel=own.text[0], ylabel=text)
        own.beside(first[1], of(rows, scenarios[0]))
    if own.layout == "ratio":
        own.rows_of_scenarios(parts[1].subplots(), rows)
    elif small:
        grid = parts[1].subplots(down, across, squeeze=False).ravel()
        own.fill(grid[: len(small)], rows, small, across, large=False)
        for axes in grid[len(small) :]:
            axes.remove()
    if is_panels or small:
        named = figure if is_panels else parts[1]
        named.supxlabel(own.text[0], fontsize=8)
        named.supylabel(text, fontsize=8)
    keys = {one.name: marks.swatch("", **one.look) for one in own.series(rows)}
    if len(keys) > 1:
        marks.legend(figure, keys, len(keys), "outside lower right")
    return figure
