"""A kind of figure, and the figure of any table of results: a metric over one setting, lines by another, panels by a third.

It draws the sweeps of a user, studies that name no figure, and what `numdev.plot` is asked for.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from numdev.errors import BadInput
from numdev.measurement.metrics import NONFINITE
from numdev.report.figures.marks import (
    Dot,
    around,
    grid,
    line,
    log_y,
    name_steps,
    plain_ticks,
    replicates,
    rows_by_scenario,
    swatch,
)
from numdev.report.figures.theme import BASELINE, FORMAT_COLOURS, GREY, PAGE, SERIES, SMALL, TILED, freeze, styled
from numdev.report.reading.frames import COMPARISON, DEFAULTS
from numdev.report.reading.scenarios import LABEL, PRIMARY, ROLE, SCENARIO, TITLE, compared
from numdev.report.reading.view import Shown, View, is_numeric, of_shadow, shown, spoken, view_of
from numdev.report.reading.wording import Wording, alt, title, wording_of
from numdev.report.statistics import Interval


@dataclass(frozen=True)
class Plot:
    """One kind of figure.

    Attributes:
        draw: rows of one study in, the figure out.
        alt: what it shows, for those who cannot see it.
        needs: the labels without which there is nothing to draw.
        title: of a figure that is not its study's first, which has the study's title.
        table: of the records whose rows it draws; empty for the primary one.
        files: columns of paths in the folder of the results, which `draw` gets as paths that it can open.
    """

    draw: Callable[[pd.DataFrame], Figure]
    alt: str
    needs: tuple[str, ...] = ()
    title: str = ""
    table: str = ""
    files: tuple[str, ...] = ()

    def __call__(self, rows: pd.DataFrame) -> Figure:
        """The figure, laid out."""
        with styled():
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
    lines, anything else is dots. What is left out is chosen by what differs in the table. A name is that of the command line,
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


_LOG_FROM = 8.0
"""The ratio of the greatest and the least positive number from which an axis is logarithmic."""
_LONG = 90  # characters that stand level in the names of the categories of all panels of a row
_MARKERS = "os^vD<>PX*"
_DASHES = ("-", "--", ":")  # with ten markers, thirty looks of one colour
_MOST_LINES, _MOST_PANELS = 24, 30
_ACROSS = 3  # panels beside one another
_BESIDE = 24  # characters of a line's name that has room beside the panels
_ROW = 92  # characters in a row of a legend above them
_SPREAD = 0.5  # of the room of a category, for the dots in it

Key = tuple[Any, ...]


def plot_of(frame: pd.DataFrame, plot: Mapping[str, Any], usual_y: str = "") -> Plot:
    """The figure of a table.

    Args:
        frame: rows of results, as `numdev.report.reading.view` makes them, or of one study.
        plot: what the figure shows: `x`, `y`, `colour`, `facet`, `reference`; the rest is chosen by what differs in the table.
        usual_y: the metric unless one is asked for; of deviations RMSE.

    Raises:
        BadInput: for a column that the table does not have, and for more lines or panels than one can tell apart.
    """
    view = view_of(frame, plot, usual_y)
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


def _draw(selection: Shown, words: Wording) -> Figure:
    """A panel for each facet, all on the same axes."""
    facets, lines = _groups(selection.rows, selection.facet), _groups(selection.rows, selection.lines)
    marks = {
        (facet, key): {x: replicates(own, selection.metric) for (x,), own in _groups(rows_of, (selection.x,)).items()}
        for facet, rows in facets.items()
        for key, rows_of in _groups(rows, selection.lines).items()
    }
    scales = _scales(selection, [one for own in marks.values() for one in own.values()], words)
    looks = dict(zip(lines, _looks(lines, selection), strict=True))
    across = min(len(facets), 2 if len(facets) == 4 else _ACROSS)
    names = _names(list(lines), selection, words) if selection.lines else []
    down, above = math.ceil(len(facets) / across), _columns(names)
    titles = [words.values(selection.facet, facet) for facet in facets]
    up = "\n".join(textwrap.wrap(words.metric_axis(selection), 26 * down + 22))
    shared = {"sharex": scales.names is None, "sharey": True}
    figure, panels = grid(titles, across, 2.6 if down == 1 else 2.0, (words.axis(selection.x), up), **shared)
    if names:  # a legend beside the panels, or above them
        figure.set_size_inches(PAGE, figure.get_figheight() + (0.13 * math.ceil(len(names) / above) if above else 0))
    for axes, facet in zip(panels, facets, strict=True):
        _panel(axes, {line: own for (where, line), own in marks.items() if where == facet}, looks, scales, across)
    has_broken = any(_is_broken(one) for own in marks.values() for one in own.values())
    _legend(figure, dict(zip(names, looks.values(), strict=False)), ", ".join(map(words.name, selection.colour)), has_broken)
    return figure


def _groups(rows: pd.DataFrame, columns: tuple[str, ...]) -> dict[Key, pd.DataFrame]:
    """Rows by the values of some columns, all without one: numbers ascending, others as they appear, a missing one last."""
    if not columns:
        return {(): rows}
    groups = {tuple(map(_plain, key)): own for key, own in rows.groupby(list(columns), sort=False, dropna=False)}
    first: list[dict[Any, int]] = [{} for _ in columns]
    for key in groups:
        for known, value in zip(first, key, strict=True):
            known.setdefault(value, len(known))
    numeric = [pd.api.types.is_numeric_dtype(rows[name]) for name in columns]

    def place(key: Key) -> list[tuple[bool, Any]]:
        return [(v is None, v if n and v is not None else own[v]) for v, n, own in zip(key, numeric, first, strict=True)]

    return {key: groups[key] for key in sorted(groups, key=place)}


def _plain(value: Any) -> Any:
    """A value by which groups are selection: every missing one is None."""
    return None if pd.isna(value) else value


def _is_broken(interval: Interval | None) -> bool:
    return interval is None or not math.isfinite(interval.estimate)


@dataclass(frozen=True)
class _Scales:
    """The axes that all panels share.

    Attributes:
        places: of the values of x.
        names: of the categories; None on an axis of numbers.
        is_log: whether y is logarithmic.
        ends: of y where it is.
    """

    places: dict[Any, float]
    names: list[str] | None
    is_log: bool
    ends: tuple[float, float]

    def of(self, present: Collection[Any]) -> _Scales:
        """Those of one panel, which has no room for categories of other panels."""
        if self.names is None or len(present) == len(self.names):
            return self
        kept = [(value, name) for value, name in zip(self.places, self.names, strict=True) if value in present]
        return replace(self, places={value: float(i) for i, (value, _) in enumerate(kept)}, names=[name for _, name in kept])

    def lay(self, axes: Axes, beside: int) -> None:
        """Set scales, ticks and names on a panel, of which `beside` stand in a row."""
        if self.is_log:
            log_y(axes, *self.ends)
        else:
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
            axes.margins(y=0.1)
        places = sorted(self.places.values())
        if self.names is not None:
            is_long = sum(map(len, self.names)) > _LONG // beside
            turn: Any = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
            axes.set_xticks(range(len(self.names)), [textwrap.fill(name, 28) for name in self.names], **turn)
            axes.tick_params(axis="x", length=0)
            axes.set_xlim(-0.6, len(self.names) - 0.4)
        elif places[0] > 0 and places[-1] >= _LOG_FROM / 2 * places[0]:
            if len(places) <= 12:
                plain_ticks(axes, places, turned=len(places) > 8)
            else:
                axes.set_xscale("log")
                name_steps(axes.xaxis)
        elif len(places) <= 8:
            axes.set_xticks(places, [f"{place:g}" for place in places])
        else:
            axes.xaxis.set_major_locator(MaxNLocator(8))


def _scales(selection: Shown, marks: list[Interval | None], words: Wording) -> _Scales:
    known = [one for one in marks if one is not None and math.isfinite(one.estimate)]
    positive = [one for one in known if one.estimate > 0]
    least, most = (end((one.estimate for one in positive), default=1.0) for end in (min, max))
    is_log = most >= _LOG_FROM * least and all(one.estimate >= 0 for one in known)
    ends = around(positive) if is_log else (0.0, 1.0)
    values = [key for (key,) in _groups(selection.rows, (selection.x,))]
    if is_numeric(selection.rows[selection.x]):
        return _Scales({value: float(value) for value in values}, None, is_log, ends)
    names = [words.value(selection.x, value) for value in values]
    return _Scales({value: float(i) for i, value in enumerate(values)}, names, is_log, ends)


_Look = dict[str, Any]


def _looks(lines: Mapping[Key, pd.DataFrame], selection: Shown) -> list[_Look]:
    """Colour, marker and dash of each line: no two have all three.

    A colour stands for the values of what is drawn by colour: formats have their own, many numbers a scale from dark to light.
    Lines of one colour differ in marker and dash.
    """
    colours = [key[: len(selection.colour)] for key in lines]
    groups = list(dict.fromkeys(colours if len(set(colours)) > 1 else lines))
    shades: list[Any] = list(islice(cycle(SERIES), len(groups)))
    if all(len(key) == 1 and key[0] in FORMAT_COLOURS for key in groups):
        shades = [FORMAT_COLOURS[key[0]] for key in groups]
    elif len(groups) > 3 and len(groups[0]) == 1 and is_numeric(selection.rows[selection.lines[0]]):
        shades = [tuple(colormaps["viridis"](0.85 * i / (len(groups) - 1))) for i in range(len(groups))]
    looks: list[_Look] = []
    for key, own in zip(lines, colours, strict=True):
        place = groups.index(own if own in groups else key)
        same = sum(look["color"] == shades[place] for look in looks)
        marker = _MARKERS[(shades.index(shades[place]) + same) % len(_MARKERS)]
        dash = _DASHES[same % len(_DASHES)]
        looks.append({"color": shades[place], "marker": marker, "linestyle": dash})
    return looks


def _panel(
    axes: Axes, lines: Mapping[Key, Mapping[Any, Interval | None]], looks: Mapping[Key, _Look], scales: _Scales, beside: int
) -> None:
    """Lines over numbers, dots over categories; at the top a cross for NaN or Inf, at the foot 0 below a log axis."""
    scales = scales.of({x for marks in lines.values() for x in marks})
    scales.lay(axes, beside)
    order, count = list(looks), len(looks)
    for key, marks in lines.items():
        look = looks[key]
        shift = 0.0 if scales.names is None or count == 1 else _SPREAD * (order.index(key) / (count - 1) - 0.5)
        known = [(scales.places[x] + shift, one) for x, one in marks.items() if one is not None and not _is_broken(one)]
        drawn = [(x, one) for x, one in known if one.estimate > 0 or not scales.is_log]
        line(axes, drawn, **look | ({} if scales.names is None else {"linestyle": "none"}))
        zero = [x for x, one in known if scales.is_log and one.estimate == 0]
        lost = [scales.places[x] + shift for x, one in marks.items() if _is_broken(one)]
        for places, sign, height in ((zero, "$0$", 0.03), (lost, "x", 0.97)):
            if places:  # the height of an empty line would count in the layout
                in_panel: Any = {"transform": axes.get_xaxis_transform(), "linestyle": "none", "markersize": 5}
                axes.plot(places, [height] * len(places), marker=sign, color=look["color"], **in_panel)


def _legend(figure: Figure, looks: Mapping[str, _Look], heading: str, has_broken: bool) -> None:
    keys = {name: swatch("", **look) for name, look in looks.items()}
    if has_broken:
        keys["NaN or Inf"] = swatch(GREY, "x", markersize=5)
    if not keys:
        return
    figure.legend(
        list(keys.values()),
        [textwrap.fill(name, _ROW) for name in keys],
        title=heading,
        title_fontsize=SMALL + 0.5,
        loc="outside upper center" if (above := _columns([*keys, heading])) else "outside right upper",
        ncols=above or 1,
        frameon=False,
        alignment="left",
        handlelength=2.6,  # room for a dash
    )


def _columns(names: Sequence[str]) -> int:
    """The columns of a legend above the panels; 0 where its names are short enough to stand beside them."""
    longest = max(map(len, names), default=0)
    return 0 if longest <= _BESIDE else max(1, min(2, _ROW // longest))


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


def default_of(frame: pd.DataFrame, usual_y: str = "") -> Plot | None:
    """The figure of a table that nobody describes; None where its points are alike, or too many to be told apart."""
    try:
        return plot_of(frame, {}, usual_y)
    except BadInput:
        return None


METRIC = "rmse"
NEEDED = (SCENARIO, TITLE, ROLE, *COMPARISON, PRIMARY, "cluster", "format", METRIC, *NONFINITE)
"""Columns of which `POINTS` is drawn, beside labels."""
_MOST_ROWS = 40


def draw_points(rows: pd.DataFrame) -> Figure:
    """RMSE from golden of every point and of its baseline, a row for each."""
    labels = [str(name) for name in rows if str(name).startswith(LABEL) and rows[name].notna().any()]
    every = list(_groups(compared(rows, reference="golden"), tuple(labels)))
    pairs = [[(name.removeprefix(LABEL), value) for name, value in zip(labels, key, strict=True)] for key in every[:_MOST_ROWS]]
    names = [", ".join(f"{name} = {value}" for name, value in own if value is not None) or DEFAULTS for own in pairs]
    places = {key: place for place, key in enumerate(every[:_MOST_ROWS])}
    subjects = {"baseline": {"shade": BASELINE, "look": {"marker": "|"}}, "variant": {"shade": TILED}}

    def dots(panel: pd.DataFrame) -> Iterable[Dot]:
        for subject, look in subjects.items():
            for key, own in _groups(compared(panel, subject, "golden"), tuple(labels)).items():
                if key in places and len(own):
                    value = replicates(own, METRIC)
                    yield Dot(places[key], value, name=subject, absent="NaN or Inf" if value is None else "0", **look)  # type: ignore[arg-type]

    keys = {"variant": swatch(TILED), "baseline": swatch(BASELINE, "|")}
    left = f"; the first {_MOST_ROWS} of {len(every)} points" if len(every) > _MOST_ROWS else ""
    return rows_by_scenario(rows, names, dots, f"RMSE from golden, absolute{left}", keys=keys, row=0.2, room=0.0)


POINTS = Plot(
    draw_points,
    "One panel per scenario: the RMSE of the primary output from golden on a log axis, for every point of the study, geometric "
    "means over seeds with their 95 % confidence intervals.",
)
"""Of a study that names no figure, and whose points no axes tell apart."""
