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
from numdev.report.figures.theme import BASELINE, BLACK, GREY, OUTPUT_COLOURS, PALE, POLICY_COLOURS, SMALL, TILED, colour
from numdev.report.reading.scenarios import compared, formats, of, ordered
from numdev.report.statistics import Interval, significant

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
            own = here[here["output"] == output].assign(primary=True) if output else here.assign(primary=True)
            of_value = (
                {value: own[own[self.by] == value] for value in self.names or own[self.by].dropna().unique()} if self.by else {}
            )
            values = [(value, mine) for value, mine in of_value.items() if len(mine)] if self.by else [("", own)]
            for i, (value, mine) in enumerate(values):
                shade = _SHADES.get(str(value) if self.by else output, colour(fmt) if self.x != _FORMAT else "")
                look = _LOOKS[(0 if shade in _SHADES.values() else i if self.by else place) % len(_LOOKS)]
                words = str(value or name)
                yield _Series(self.names.get(words, words), mine, metric, {**look, "color": shade or GREY})

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

    def limits(self, rows: pd.DataFrame) -> tuple[float, float]:
        """A log axis around all lines of some scenarios."""
        values = [one for scenario in ordered(rows) for own in self.series(of(rows, scenario)) for _, one in self.points(own)]
        units = [Format.parse(name).u for name in formats(rows)] if self.has_units else []
        ends = (*self.at, *(self.band or ())) if self.layout == "panels" else ()
        return marks.around(values, *units, *ends, room=0.14 * min(3, len(self.y)) if self.symbol or self.ratio else 0.0)

    def draw(self, axes: Axes, panel: marks.Panel) -> None:
        """The lines of a panel with their exponents, or the ratio."""
        every = list(self.series(panel.rows))
        for place, own in enumerate(every):
            self._line(axes, own, place - (len(every) - 1) / 2)
            if words := self.power(own, whole=panel.large and len(every) > 1):
                named = own.name if len(every) > 1 else ""
                down = 2 + 10 * (place + bool(panel.large and self.paper))
                marks.corner(axes, f"{named} {words}".strip(), down=down, color=own.look["color"])
        if self.ratio and self.layout != "panels" and self.x != _FORMAT:
            value = self.times(panel.rows[panel.rows["format"] == self.main(panel.rows)])
            words = "" if value is None else f"ratio {value.text() if panel.large else significant(value.estimate, 3)}"
            marks.corner(axes, words, down=12 if panel.large else 2)
        self._lay(axes, panel.rows, turned=not panel.large)
        if self.layout == "panels":
            self._mark(axes, named=panel.large)

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
        at = {name: rows[rows["format"] == name] for name in formats(rows)}
        if self.ratio:
            values = {name: self.times(own) for name, own in at.items()}
            marks.log_y(axes, *marks.around(values.values(), *self.at, *(self.band or ())))
            for place, (name, value) in enumerate(values.items()):
                marks.line(axes, [(place, value)] if value else [], color=colour(name), marker="o")
            self._mark(axes, named=False)
            replace(self, x=_FORMAT)._lay(axes, rows)
        else:
            each = {name: next(self.series(own)) for name, own in at.items()}
            points = {name: self.points(own, in_u=True) for name, own in each.items()}
            marks.log_y(axes, *marks.around(value for own in points.values() for _, value in own))
            ends = []
            for place, (name, own) in enumerate(each.items()):
                here = [(place if self.x == _FORMAT else x, value) for x, value in points[name] if value and value.estimate > 0]
                marks.line(axes, here, elinewidth=0.8, label=name.upper(), marker="o", color=colour(name))
                ends += [(x, value.estimate, f"{name.upper()} {self.power(own)}", colour(name)) for x, value in here[-1:]]
            self._lay(axes, rows)
            if self.x != _FORMAT:
                left, right = axes.get_xlim()
                axes.set_xlim(left, right * (right / left) ** 0.75)
                marks.name_ends(axes, ends, 0.09)
        axes.set_title(self.ratio_text.capitalize() if self.ratio else "Every format, in u of F", loc="left")
        axes.set_xlabel("number format F" if self.ratio or self.x == _FORMAT else self.text[0].partition(",")[0])

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
    panels = marks.by_scenario(rows, first=1 if own.layout != "panels" else None)
    where = "" if own.x == _FORMAT else f" at {own.main(rows).upper()}"
    keys = {one.name: marks.swatch("", **one.look) for one in own.series(rows)}
    if own.layout == "panels":
        figure = marks.draw_grid(panels, own.draw, own.limits, (own.text[0], f"{own.text[1]}{where}"))
    else:
        (first,), *others = panels
        lower = 0.75 + 0.165 * len(ordered(rows)) if own.layout == "ratio" else sum(one[0].height for one in others) + 0.25
        tall = [2.3, *([lower] if others or own.layout == "ratio" else [])]
        figure = marks.page(sum(tall))
        parts: Any = figure.subfigures(len(tall), 1, height_ratios=tall, squeeze=False)
        large, narrow = parts[0][0].subplots(1, 2, width_ratios=[2, 1])
        marks.head(large, first, 1)
        marks.log_y(large, *own.limits(first.rows))
        own.draw(large, first)
        marks.corner(large, own.paper, color=GREY)
        text = own.text[1].replace(", ", f"\n{where.strip()}, " if where else ",\n", 1)
        large.set(xlabel=own.text[0], ylabel=text)
        own.beside(narrow, first.rows)
        if own.layout == "ratio":
            own.rows_of_scenarios(parts[1][0].subplots(1, 1), rows)
        elif others:
            marks.draw_grid(others, own.draw, own.limits, (own.text[0], text), parts[1][0])
    if len(keys) > 1:
        marks.legend(figure, keys, len(keys), "outside lower right")
    return figure
