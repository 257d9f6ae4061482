"""A kind of figure, and the figure of any table: a metric over one column, lines by another, panels by a third.

It draws the sweeps of a user, what `numdev.plot` is asked for, and what the files of studies state. Over numbers there are lines,
with a band in place of bars where a line has many points; names have rows.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput
from numdev.report.figures import marks
from numdev.report.figures.theme import GREY, MEANINGS, PAGE, SERIES, SMALL, freeze, styled
from numdev.report.reading.frames import LABEL, PRIMARY, ROLE, ROLES, SCENARIO, TITLE, formats, is_broken, ordered
from numdev.report.reading.view import OF_A_COMPARISON, Shown, View, column_of, is_numeric, of_shadow, shown, spoken, view_of
from numdev.report.reading.wording import Wording, alt, title, wording_of
from numdev.report.statistics import Interval, significant, slope
from numdev.results.store import Role


@dataclass(frozen=True)
class Plot:
    """One kind of figure."""

    draw: Callable[[pd.DataFrame], Figure]  # rows of one study in, the figure out
    alt: str  # what it shows, for those who cannot see it
    needs: tuple[str, ...] = ()  # the labels without which there is nothing to draw
    title: str = ""  # of a figure that is not its study's first, which has the study's title
    table: str = ""  # of the records whose rows it draws; empty for the primary one

    @styled()
    def __call__(self, rows: pd.DataFrame) -> Figure:
        """The figure, laid out."""
        return freeze(self.draw(rows))

    def lacks(self, rows: pd.DataFrame) -> list[str]:
        """The labels that the figure needs and the rows lack."""
        return [name for name in self.needs if f"{LABEL}{name}" not in rows or rows[f"{LABEL}{name}"].isna().all()]


def plot(
    frame: pd.DataFrame | Sequence[Mapping[str, Any]],
    x: str | None = None,
    y: str | None = None,
    colour: str | Sequence[str] | None = None,
    facet: str | Sequence[str] | None = None,
    reference: str | None = None,
) -> Figure:
    """A metric of results over one column, a line for each value of another, a panel for each value of a third.

    Means over seeds, geometric where all values are positive, with their 95 % confidence intervals. Numbers on x are joined by
    lines, names have rows of dots. What is left out is chosen by what differs in the table. A name is that of the command line,
    such as `problem.n` or `precision`, or a column of the table, such as `variant.tiling.bc`, `subject` or `reference`.

    Args:
        frame: of `numdev.load`, or part of it; or the rows of `numdev.shadow`, whose heads are the replicates.
        x: what the metric is drawn over.
        y: the metric: `rmse` of the primary output, `lse.rmse` of the output `lse`, `latency` of speed.
        colour: what the lines differ in; a list of names is their combinations.
        facet: what the panels differ in, likewise.
        reference: what the metric is taken against: `golden` unless given, `golden_same_inputs` or `baseline`.

    Raises:
        BadInput: for a name that the table does not have, with similar ones, and for more lines or panels than can be told apart.
    """
    frame = frame if isinstance(frame, pd.DataFrame) else of_shadow(frame)
    view = {"x": x, "y": y, "colour": colour, "facet": facet, "reference": reference}
    return plot_of(frame, view)(frame)


QUANTITY, VALUE = "quantity", "value"
"""Columns of what a study draws: the words for a metric, and the metric as it is drawn."""
_FORMAT = "format"


@dataclass(frozen=True)
class Sketch:
    """What a study's file states of a figure.

    What it does not name is averaged over, as in claims; `main` of formats is BF16, or the narrowest, of which a claim speaks.
    """

    x: str = ""  # a column, or its name on the command line
    # Metrics by their words, as `output.metric`, or without an output those of the primary one
    y: Mapping[str, str] = field(default_factory=dict)
    text: tuple[str, str] = ("", "")  # of the axis of x, and of that of the metrics, with units
    # Columns, each combination of whose values has a line, the first one by its colour; `quantity` for the metrics
    colour: Sequence[str] = ()
    facet: Sequence[str] = (TITLE,)  # columns, each combination of whose values has a panel
    where: Mapping[str, Any] = field(default_factory=dict)  # values of columns, to which the figure keeps
    reference: str = "golden"  # of the metrics
    # Values of columns of other rows of a point and replicate, by whose metric that of the drawn ones is divided
    over: Mapping[str, str] = field(default_factory=dict)
    in_u: bool = False  # whether metrics are in units of u of the format
    names: Mapping[str, str] = field(default_factory=dict)  # words for values
    shades: Mapping[str, str] = field(default_factory=dict)  # colours of values, beside those that mean the same in every figure
    symbol: str = ""  # of x; with it every line states its exponent
    at: Mapping[float, str] = field(default_factory=dict)  # values of the metric that have a line, with words
    band: tuple[float, float] | None = None  # values of it between which there is a band
    additive: bool = False  # whether metrics add up, as shares do: their means are arithmetic, and their axis is linear
    banded: bool = False  # whether each line has the band of its intervals, and no bars, though its points are few
    floor: float = 0.0  # in rows on a log axis, what is less than this share of the greatest value is written at the left end

    def selected(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows of the lines, scenarios by role and formats from the narrowest, with `VALUE` and `QUANTITY`."""
        rows = _in_order(rows)
        for column, value in self.where.items():
            of_format = formats(rows) if column == _FORMAT and value == "main" else []
            values = ["bf16" if "bf16" in of_format else of_format[0]] if of_format else value
            rows = rows[rows[column].isin([values] if isinstance(values, str) else values)]
        spread = {self.x, *self.colour, *self.facet, *self.where}
        usual = {**OF_A_COMPARISON, "reference": self.reference}
        usual = {name: value for name, value in usual.items() if name in rows and name not in spread}
        return pd.concat([self._of(rows, words, name, usual) for words, name in self.y.items()], ignore_index=True)

    def _of(self, rows: pd.DataFrame, words: str, name: str, usual: Mapping[str, str]) -> pd.DataFrame:
        """The rows of one metric."""
        output, _, metric = name.rpartition(".")
        if output or PRIMARY in rows:
            rows = rows[rows["output"] == output] if output else rows[rows[PRIMARY].astype(bool)]
        own = _at(rows, usual)
        value = own[metric].astype(float)
        if self.over:
            below = _at(rows, {**usual, **self.over}).groupby(["key", "seed"])[metric].first()
            below = below.reindex(pd.MultiIndex.from_frame(own[["key", "seed"]])).set_axis(own.index)
            value = (value / below).where((value > 0) | (below > 0), 1.0)  # neither deviates
        if self.in_u:
            value = value / own[_FORMAT].map({one: Format.parse(one).u for one in formats(own)}).astype(float)
        return own.assign(primary=True, quantity=words, value=value)

    def exponent(self, rows: pd.DataFrame) -> str:
        """That of a line over numbers in words; empty where it cannot be told."""
        if not self.symbol or is_broken(rows).any():
            return ""
        value = slope(rows[self.x].astype(float), rows[VALUE], rows["seed"]).estimate
        return f"$\\propto {self.symbol}^{{{significant(value)}}}$" if math.isfinite(value) else ""


def _at(rows: pd.DataFrame, values: Mapping[str, str]) -> pd.DataFrame:
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with scenarios by their roles, which their titles have behind them in rows, and formats from the narrowest."""
    keys = []
    if _FORMAT in rows:
        keys.append(rows[_FORMAT].map({name: i for i, name in enumerate(formats(rows))}))
    if {SCENARIO, TITLE, ROLE} <= set(rows):
        keys.append(rows[SCENARIO].map({one.name: i for i, one in enumerate(ordered(rows))}))
    return rows.iloc[np.lexsort(keys)] if keys else rows


def draw(rows: pd.DataFrame, **options: Any) -> Figure:
    """The figure that a study's file states; `options` are the fields of `Sketch`."""
    at = {float(value): words for value, words in options.pop("at", {}).items()}  # whose keys are text in a manifest
    sketch = Sketch(at=at, **options)
    own = sketch.selected(rows)
    if own.empty:
        return marks.no_figure("nothing was measured of it")
    x, colour, facet = (
        tuple(column_of(own, name, "figure") for name in names) for names in ((sketch.x,), sketch.colour, sketch.facet)
    )
    return _draw(Shown(own, x[0], VALUE, colour[:1], facet, colour[1:]), Wording(names=sketch.names), sketch)


_LOG_FROM = 8.0
"""The ratio of the greatest and the least positive number from which an axis is logarithmic."""
_MARKERS = "os^vD<>PX*"
_DASHES = ("-", "--", ":")  # with ten markers, thirty looks of one colour
_MOST_LINES, _MOST_PANELS = 24, 30
_MOST_BARS = 24  # points of a line, from which on it has a band and no markers
_ACROSS = 3  # panels beside one another
_ROW = 92  # characters in a row of a legend
_SPREAD = 0.56  # of the height of a row, for the dots in it

Key = tuple[Any, ...]
_Look = dict[str, Any]
_Cells = Mapping[Any, Interval | None]  # of a line, by x


def plot_of(frame: pd.DataFrame, plot: Mapping[str, Any]) -> Plot:
    """The figure of a table: of results, as `numdev.report.reading.view` makes them, or of one study.

    `plot` states `x`, `y`, `colour`, `facet` or `reference`; the rest is chosen by what differs in the table.

    Raises:
        BadInput: for a column that the table does not have, and for more lines or panels than one can tell apart.
    """
    view = view_of(frame, plot)
    selection, words = shown(frame, view), wording_of(frame)
    _refuse_too_many(selection, view, frame["study"].unique().tolist() if "study" in frame else [])
    return Plot(lambda rows: _draw(shown(rows, view), words), alt(selection, words), title=title(selection, words))


def _refuse_too_many(selection: Shown, view: View, studies: Sequence[str]) -> None:
    for key, columns, most in (("colour", selection.lines, _MOST_LINES), ("facet", selection.facet, _MOST_PANELS)):
        count = len(selection.rows[list(columns)].drop_duplicates()) if columns else 1
        if count <= most:
            continue
        reason, hint = f"it has {count} values", "take it for x"
        if key == "colour" and selection.split:
            reason = f"points differ in {', '.join(map(spoken, selection.split))} too, which makes {count} lines"
            if len(studies) > 1:
                hint = f"draw one study, study={studies[0]} or another of {', '.join(map(str, studies))}"
            else:
                hint = f"add facet: {spoken(selection.split[0])}, or draw fewer points"
            raise BadInput("plot", f"{view.y} over {view.x}", f"{reason}, and at most {most} can be told apart; {hint}")
        names = ", ".join(getattr(view, key))
        raise BadInput(f"plot.{key}", names, f"{reason}, and at most {most} can be told apart; {hint}")


def _draw(selection: Shown, words: Wording, sketch: Sketch = Sketch()) -> Figure:
    """A panel for each facet, all on the same axes but where each has a metric of its own."""
    facets, lines = (_groups(selection.rows, columns) for columns in (selection.facet, selection.lines))
    parts = {facet: _groups(rows, selection.lines) for facet, rows in facets.items()}
    places = [x for (x,) in _groups(selection.rows, (selection.x,))]
    values = {facet: {key: _cells(rows, selection, sketch) for key, rows in part.items()} for facet, part in parts.items()}
    every = [one for part in values.values() for line in part.values() for one in line.values()]
    in_rows, is_free = not is_numeric(selection.rows[selection.x]), QUANTITY in selection.facet
    room = min(0.5, 0.13 * max(map(len, parts.values()))) if sketch.symbol else 0.0  # for exponents
    looks = dict(zip(lines, _looks(lines, selection, sketch.shades), strict=True))
    names = _names(list(lines), selection, words) if selection.lines else []
    for look, name in zip(looks.values(), names, strict=False):
        look["label"] = name
    texts = sketch.text[0] or words.axis(selection.x), sketch.text[1] or words.metric_axis(selection)
    across = min(len(facets), 2 if len(facets) == 4 else _ACROSS)
    down = math.ceil(len(facets) / across)
    if in_rows:
        crowd = max(sum(x in cells for cells in part.values()) for part in values.values() for x in places)
        texts, height = (texts[1], sketch.text[0]), 0.4 + len(places) * (0.14 + 0.06 * min(crowd, 4))
    else:
        texts, height = (texts[0], "\n".join(textwrap.wrap(texts[1], 26 * down + 22))), 2.6 if down == 1 else 1.9
    shared = {"sharex": not (in_rows and is_free), "sharey": in_rows or not is_free}
    figure, panels = marks.grid(_titles(selection, list(facets), words), across, height, texts, **shared)
    for axes, (facet, part) in zip(panels, parts.items(), strict=True):
        shown_here = [one for line in values[facet].values() for one in line.values()]
        scale = _Scale.of(shown_here if is_free else every, sketch, room, 1.0 if in_rows or sketch.symbol else _LOG_FROM)
        if in_rows:
            _rows(axes, values[facet], looks, dict(zip(places, _row_names(selection, places, words), strict=True)), scale)
        else:
            _lines(axes, values[facet], looks, places, scale)
            for place, (key, rows) in enumerate(part.items()):
                marks.corner(axes, sketch.exponent(rows), down=2 + 9 * place, color=looks[key]["color"])
    heading = "" if sketch.y else ", ".join(map(words.name, selection.colour))
    has_cross = not in_rows and any(map(_is_broken, every))
    _legend(figure, list(looks.values()) if names else [], heading, in_rows=in_rows, has_cross=has_cross)
    return figure


def _cells(rows: pd.DataFrame, selection: Shown, sketch: Sketch) -> _Cells:
    """The mean of each x, with its interval; None where a replicate holds NaN or Inf."""
    of = partial(marks.replicates, metric=selection.metric, additive=sketch.additive)
    return {x: of(own) for (x,), own in _groups(rows, (selection.x,)).items()}


def _row_names(selection: Shown, places: Sequence[Any], words: Wording) -> list[str]:
    """The names of rows: of scenarios with their roles behind them."""
    roles = _roles(selection.rows) if selection.x == TITLE else {}
    return [words.value(selection.x, x) + (f" ({roles[x]})" if roles.get(x) else "") for x in places]


def _roles(rows: pd.DataFrame) -> dict[Any, str]:
    """Words for the role of each scenario, by its title."""
    if not {TITLE, ROLE} <= set(rows):
        return {}
    return {title: ROLES[Role(role)] for title, role in rows[[TITLE, ROLE]].drop_duplicates().itertuples(index=False)}


def _titles(selection: Shown, facets: Sequence[Key], words: Wording) -> list[tuple[str, str]]:
    """The title of each panel, and a note on it: the role of its scenario."""
    roles = _roles(selection.rows)
    return [(words.values(selection.facet, facet), roles.get(facet[0], "") if facet else "") for facet in facets]


def _groups(rows: pd.DataFrame, columns: tuple[str, ...]) -> dict[Key, pd.DataFrame]:
    """Rows by the values of some columns, all without one: numbers ascending, others as they appear, then None."""
    if not columns:
        return {(): rows}
    each: Any = rows.groupby(list(columns), sort=False, dropna=False)
    groups = {tuple(None if pd.isna(value) else value for value in key): own for key, own in each}
    first: list[dict[Any, int]] = [{} for _ in columns]
    for key in groups:
        for known, value in zip(first, key, strict=True):
            known.setdefault(value, len(known))
    numeric = [pd.api.types.is_numeric_dtype(rows[name]) for name in columns]

    def place(key: Key) -> list[tuple[bool, Any]]:
        return [(v is None, v if n and v is not None else own[v]) for v, n, own in zip(key, numeric, first, strict=True)]

    return {key: groups[key] for key in sorted(groups, key=place)}


def _is_broken(interval: Interval | None) -> bool:
    return interval is None or not math.isfinite(interval.estimate)


@dataclass(frozen=True)
class _Scale:
    """The axis of the metric: its ends where it is logarithmic, and what is marked on it."""

    is_log: bool
    ends: tuple[float, float]
    at: Mapping[float, str]
    band: tuple[float, float] | None
    is_banded: bool

    @staticmethod
    def of(values: Sequence[Interval | None], sketch: Sketch, room: float, from_ratio: float) -> _Scale:
        """For some values, and what a study marks; logarithmic where they span `from_ratio`."""
        known = [one for one in values if one is not None and math.isfinite(one.estimate)]
        floor = max(0.0, sketch.floor * max((one.estimate for one in known), default=0.0))
        positive, marked = [one for one in known if one.estimate > floor], [*sketch.at, *(sketch.band or ())]
        reached = [*(one.estimate for one in positive), *marked]
        least, most = min(reached, default=1.0), max(reached, default=1.0)
        is_log = not sketch.additive and 0 < from_ratio * least <= most and all(one.estimate >= 0 for one in known)
        ends = marks.around(positive, *marked, room=room) if is_log else (0.0, 1.0)
        return _Scale(is_log, ends, sketch.at, sketch.band, sketch.banded)


def _looks(lines: Mapping[Key, pd.DataFrame], selection: Shown, shades: Mapping[str, str]) -> list[_Look]:
    """Colour, marker and dash of each line: no two have all three.

    A colour stands for the values of what is drawn by colour: some have their own, many numbers a scale from dark to light. Lines
    of one colour differ in marker and dash.
    """
    colours = [key[: len(selection.colour)] for key in lines]
    groups = list(dict.fromkeys(colours if len(set(colours)) > 1 else lines))
    own = {**MEANINGS, **shades}
    shade_of: list[Any] = list(islice(cycle(SERIES), len(groups)))
    if all(str(key[:1][0]) in own for key in groups if key) and groups != [()]:
        shade_of = [own[str(key[0])] for key in groups]
    elif len(groups) > 3 and len(groups[0]) == 1 and is_numeric(selection.rows[selection.lines[0]]):
        shade_of = [tuple(colormaps["viridis"](0.85 * i / (len(groups) - 1))) for i in range(len(groups))]
    looks: list[_Look] = []
    for key, colour in zip(lines, colours, strict=True):
        place = groups.index(colour if colour in groups else key)
        same = sum(look["color"] == shade_of[place] for look in looks)
        marker = _MARKERS[(shade_of.index(shade_of[place]) + same) % len(_MARKERS)]
        looks.append({"color": shade_of[place], "marker": marker, "linestyle": _DASHES[same % len(_DASHES)]})
    return looks


def _lines(axes: Axes, lines: Mapping[Key, _Cells], looks: Mapping[Key, _Look], places: Sequence[float], scale: _Scale) -> None:
    """Lines over numbers; at the top a cross for NaN or Inf, at the foot 0 below a log axis."""
    _lay_numbers(axes, sorted(places))
    if scale.is_log:
        marks.log_y(axes, *scale.ends)
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
        axes.margins(y=0.1)
    marks.reference_lines(axes, scale.at, scale.band, upright=False)
    for key, cells in lines.items():
        look = looks[key]
        known = [(x, one) for x, one in cells.items() if one is not None and not _is_broken(one)]
        drawn = [(x, one) for x, one in known if one.estimate > 0 or not scale.is_log]
        if len(cells) < _MOST_BARS and not scale.is_banded:
            marks.line(axes, drawn, **look)
        elif drawn:
            across, values = zip(*drawn, strict=True)
            axes.plot(across, [one.estimate for one in values], **look | {"marker": "", "linewidth": 0.9})
            below = marks.lowest if scale.is_log else lambda one: one.estimate - marks.whiskers(one)[0][0]
            low, high = ([end(one) for one in values] for end in (below, marks.highest))
            axes.fill_between(across, low, high, color=look["color"], alpha=0.2, linewidth=0)
        zero = [x for x, one in known if scale.is_log and one.estimate == 0]
        lost = [x for x, one in cells.items() if _is_broken(one)]
        for known_at, sign, height in ((zero, "$0$", 0.03), (lost, "x", 0.97)):
            if known_at:  # the height of an empty line would count in the layout
                in_panel: Any = {"transform": axes.get_xaxis_transform(), "linestyle": "none", "markersize": 5}
                axes.plot(known_at, [height] * len(known_at), marker=sign, color=look["color"], **in_panel)


def _lay_numbers(axes: Axes, places: Sequence[float]) -> None:
    """An axis of numbers, on a log scale where they span more than half of `_LOG_FROM`."""
    if places[0] > 0 and places[-1] >= _LOG_FROM / 2 * places[0]:
        if len(places) <= 12:
            marks.plain_ticks(axes, places, turned=len(places) > 5)
        else:
            axes.set_xscale("log")
            marks.name_steps(axes.xaxis)
    elif len(places) <= 8:
        axes.set_xticks(places, [f"{place:g}" for place in places])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8))


def _rows(axes: Axes, lines: Mapping[Key, _Cells], looks: Mapping[Key, _Look], names: Mapping[Any, str], scale: _Scale) -> None:
    """Dots in rows with names, those of one row apart; a value stands behind a dot that is alone."""
    order, places, dots = list(lines), {x: place for place, x in enumerate(names)}, list[marks.Dot]()
    count = max(sum(x in cells for cells in lines.values()) for x in names)
    for key, cells in lines.items():
        look, shift = looks[key], _SPREAD * (order.index(key) / (len(order) - 1) - 0.5) if count > 1 else 0.0
        for x, one in cells.items():
            text = marks.scientific(one.estimate) if one is not None and count == 1 else ""
            is_below = one is not None and scale.is_log and 0 < one.estimate < scale.ends[0]
            absent = "NaN or Inf" if _is_broken(one) else f"← {text}" if is_below else "0"
            own = {"marker": look["marker"], "linestyle": ""}
            drawn = None if is_below else one
            dots.append(marks.Dot(places[x] + shift, drawn, look["color"], text, absent, own, look.get("label", "")))
    marks.draw_rows(axes, list(names.values()), dots, at=scale.at, band=scale.band, log=scale.is_log)
    if not scale.is_log:
        axes.locator_params(axis="x", nbins=5)
        axes.margins(x=0.15)
    else:
        low, high = scale.ends
        axes.set_xlim(low, high * (high / low) ** (0.4 * (count == 1)))  # room for the values


def _legend(figure: Figure, looks: Sequence[_Look], heading: str, *, in_rows: bool, has_cross: bool) -> None:
    """The lines by name, above the panels, in as many columns as there is room for."""
    keys = {look["label"]: marks.swatch("", **look | ({"linestyle": ""} if in_rows else {})) for look in looks}
    if has_cross:
        keys["NaN or Inf"] = marks.swatch(GREY, "x", markersize=5)
    if keys:
        columns = max(1, min(len(keys), _ROW // (max(map(len, keys)) + 6)))
        figure.set_size_inches(PAGE, figure.get_figheight() + 0.14 * math.ceil(len(keys) / columns))
        options: dict[str, Any] = {"title": heading, "title_fontsize": SMALL + 0.5, "handlelength": 2.6}  # room for a dash
        names = [textwrap.fill(name, _ROW) for name in keys]
        figure.legend(list(keys.values()), names, loc="outside upper center", ncols=columns, frameon=False, **options)


def _names(lines: Sequence[Key], selection: Shown, words: Wording) -> list[str]:
    """Each line in the legend: its colour's values; of several lines of one colour what they differ in besides."""
    count = len(selection.colour)
    named = []
    for key in lines:
        alike = [other[count:] for other in lines if other[:count] == key[:count]]
        apart = zip(selection.split, key[count:], map(set, zip(*alike, strict=True)), strict=True)
        differ = [words.values([name], [value]) for name, value, values in apart if len(values) > 1 and value is not None]
        named.append(", ".join([*map(words.value, selection.colour, key[:count]), *differ]) or "others")
    return named
