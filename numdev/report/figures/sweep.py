"""The figure of any table of results: a metric over one setting, a line for each value of another, a panel for each of a third.

It draws the sweeps of a user, studies that name no figure, and what `numdev.plot` is asked for.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from itertools import cycle, islice
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.errors import BadInput
from numdev.report.figures.grid import at_least_a_decade, highest, lowest, replicates, whiskers
from numdev.report.figures.plot import Plot
from numdev.report.figures.scales import LOG_FROM, Scales
from numdev.report.figures.style import FORMAT_COLOURS, GREY, PAGE, SERIES, SMALL
from numdev.report.reading.view import Shown, View, is_numeric, shown, view_of
from numdev.report.reading.wording import Wording, alt, title, wording_of
from numdev.report.statistics.estimates import Interval

_MARKERS = "os^vD<>PX*"
_MOST_LINES, _MOST_PANELS = 24, 30
_ACROSS = 3  # panels beside one another
_SPREAD = 0.5  # of the room of a category, for the dots in it

Key = tuple[Any, ...]


def plot_of(frame: pd.DataFrame, given: Mapping[str, Any], usual_y: str = "") -> Plot:
    """The figure of a table.

    Args:
        frame: rows of results, as `numdev.report.reading.tidy` makes them, or of one study.
        given: what is asked for: `x`, `y`, `colour`, `facet`, `reference`; the rest is chosen by what differs in the table.
        usual_y: the metric unless one is asked for; of deviations RMSE.

    Raises:
        BadInput: for a column that the table does not have, and for more lines or panels than one can tell apart.
    """
    view = view_of(frame, given, usual_y)
    found, words = shown(frame, view), wording_of(frame)
    _refuse_too_many(found, view)
    return Plot(lambda rows: _draw(shown(rows, view), words), alt(found, words), title=title(found, words))


def _refuse_too_many(found: Shown, view: View) -> None:
    for key, columns, most in (("colour", found.colour, _MOST_LINES), ("facet", found.facet, _MOST_PANELS)):
        count = len(found.rows[list(columns)].drop_duplicates()) if columns else 1
        if count > most:
            names = ", ".join(getattr(view, key))
            raise BadInput(f"plot.{key}", names, f"it has {count} values, and at most {most} can be told apart; take it for x")


def _draw(found: Shown, words: Wording) -> Figure:
    """A panel for each facet, all on the same axes."""
    facets, lines = _groups(found.rows, found.facet), _groups(found.rows, found.colour)
    marks = {
        (facet, line): dict(_marks(own, found))
        for facet, rows in facets.items()
        for line, own in _groups(rows, found.colour).items()
    }
    scales = _scales(found, [one for own in marks.values() for one in own.values()], words)
    looks = dict(zip(lines, _looks(lines, found), strict=True))
    across = min(len(facets), 2 if len(facets) == 4 else _ACROSS)
    down = math.ceil(len(facets) / across)
    size = (PAGE if across > 1 or lines.keys() != {()} else 0.72 * PAGE, 0.5 + (2.6 if down == 1 else 2.0) * down)
    figure = Figure(figsize=size, layout="constrained")
    grid: Any = figure.subplots(down, across, sharex=scales.names is None, sharey=True, squeeze=False)
    for axes, facet in zip(grid.flat, facets, strict=False):
        _panel(axes, {line: own for (where, line), own in marks.items() if where == facet}, looks, scales, across)
        axes.set_title(textwrap.fill(words.values(found.facet, facet), 90 // across), loc="left", fontweight="bold")
    for axes in grid.flat[len(facets) :]:
        axes.set_axis_off()
        grid[-2][list(grid[-1]).index(axes)].tick_params(labelbottom=True)
    figure.supylabel("\n".join(textwrap.wrap(words.metric_axis(found), 26 * down + 22)), fontsize=8)
    figure.supxlabel(_below(found, words), fontsize=8)
    _legend(figure, looks, found, words, any(_is_broken(one) for own in marks.values() for one in own.values()))
    return figure


def _groups(rows: pd.DataFrame, columns: tuple[str, ...]) -> dict[Key, pd.DataFrame]:
    """Rows by the values of some columns: numbers ascending, others as they first appear; all of them, without a column."""
    if not columns:
        return {(): rows}
    found = {tuple(map(_plain, key)): own for key, own in rows.groupby(list(columns), sort=False, dropna=False)}
    numeric = [is_numeric(rows[name]) for name in columns]
    first: list[dict[Any, int]] = [{} for _ in columns]
    for key in found:
        for known, value in zip(first, key, strict=True):
            known.setdefault(value, len(known))
    return dict(
        sorted(
            found.items(),
            key=lambda item: [v if n else own[v] for v, n, own in zip(item[0], numeric, first, strict=True)],
        )
    )


def _plain(value: Any) -> Any:
    """A value by which groups are found: every missing one is None."""
    return None if pd.isna(value) else value


def _marks(rows: pd.DataFrame, found: Shown) -> Iterable[tuple[Any, Interval | None]]:
    """The mean and interval at each x; None where a replicate holds NaN or Inf."""
    for (place,), own in _groups(rows, (found.x,)).items():
        yield place, replicates(own, found.metric)


def _is_broken(interval: Interval | None) -> bool:
    return interval is None or not math.isfinite(interval.estimate)


def _scales(found: Shown, marks: list[Interval | None], words: Wording) -> Scales:
    known = [one for one in marks if one is not None and math.isfinite(one.estimate)]
    positive = [one for one in known if one.estimate > 0]
    least, most = (end((one.estimate for one in positive), default=1.0) for end in (min, max))
    is_log = most >= LOG_FROM * least and all(one.estimate >= 0 for one in known)
    ends = at_least_a_decade(min(map(lowest, positive)) / 1.3, max(map(highest, positive)) * 1.3) if is_log else (0.0, 1.0)
    values = [key for (key,) in _groups(found.rows, (found.x,))]
    if is_numeric(found.rows[found.x]):
        return Scales({value: float(value) for value in values}, None, is_log, ends)
    names = [words.value(found.x, value) for value in values]
    return Scales({value: float(i) for i, value in enumerate(values)}, names, is_log, ends)


_Look = tuple[str, str]


def _looks(lines: Mapping[Key, pd.DataFrame], found: Shown) -> list[_Look]:
    """Colour and marker of each line: formats have their own, many numbers a scale from dark to light."""
    texts = [key[0] if len(key) == 1 else None for key in lines]
    markers = list(islice(cycle(_MARKERS), len(texts)))
    if all(text in FORMAT_COLOURS for text in texts):
        return [(FORMAT_COLOURS[str(text)], marker) for text, marker in zip(texts, markers, strict=True)]
    if len(texts) > 3 and len(found.colour) == 1 and is_numeric(found.rows[found.colour[0]]):
        scale = colormaps["viridis"]
        shades = [tuple(scale(0.85 * i / (len(texts) - 1))) for i in range(len(texts))]
        return list(zip(shades, markers, strict=True))  # type: ignore[arg-type]
    return list(zip(islice(cycle(SERIES), len(texts)), markers, strict=True))


def _panel(
    axes: Axes, lines: Mapping[Key, Mapping[Any, Interval | None]], looks: Mapping[Key, _Look], scales: Scales, beside: int
) -> None:
    """Lines over numbers, dots over categories; at the foot of the panel a cross for NaN or Inf, and 0 below a log axis."""
    scales = scales.of({x for marks in lines.values() for x in marks})
    scales.lay(axes, beside)
    order, count = list(looks), len(looks)
    for line, marks in lines.items():
        shade, marker = looks[line]
        shift = 0.0 if scales.names is None or count == 1 else _SPREAD * (order.index(line) / (count - 1) - 0.5)
        known = [(scales.places[x] + shift, one) for x, one in marks.items() if one is not None and not _is_broken(one)]
        drawn = [(x, one) for x, one in known if one.estimate > 0 or not scales.is_log]
        joined: Any = {"linestyle": "-" if scales.names is None else "none", "color": shade, "marker": marker}
        axes.errorbar([x for x, _ in drawn], [one.estimate for _, one in drawn], whiskers([one for _, one in drawn]), **joined)
        zero = [x for x, one in known if scales.is_log and one.estimate == 0]
        lost = [scales.places[x] + shift for x, one in marks.items() if _is_broken(one)]
        for places, sign in ((zero, "$0$"), (lost, "x")):
            if places:  # the height of an empty line would count in the layout
                at_foot: Any = {"transform": axes.get_xaxis_transform(), "linestyle": "none", "markersize": 5}
                axes.plot(places, [0.03] * len(places), marker=sign, color=shade, **at_foot)


def _below(found: Shown, words: Wording) -> str:
    """The label of the horizontal axis; below it what a mark is a mean over, where settings differ that are not shown."""
    label = words.axis(found.x)
    if not found.over:
        return label
    means = ", ".join(f"{words.name(name)} ({count} values)" for name, count in found.over.items())
    return "\n".join([label, *textwrap.wrap(f"Each mark is a mean over {means} too.", 110)])


def _legend(figure: Figure, looks: Mapping[Key, _Look], found: Shown, words: Wording, has_broken: bool) -> None:
    keys = [Line2D([], [], color=shade, marker=marker) for shade, marker in looks.values()] if found.colour else []
    names = [", ".join(map(words.value, found.colour, key)) for key in looks] if found.colour else []
    if has_broken:
        keys.append(Line2D([], [], color=GREY, marker="x", linestyle="none", markersize=5))
        names.append("NaN or Inf")
    if not keys:
        return
    heading = ", ".join(map(words.name, found.colour))
    wide = max(map(len, [*names, heading])) > 24
    figure.legend(
        keys,
        names,
        title=heading,
        title_fontsize=SMALL + 0.5,
        loc="outside upper center" if wide else "outside right upper",
        ncols=2 if wide else 1,
        frameon=False,
        alignment="left",
    )


def default_of(frame: pd.DataFrame, usual_y: str = "") -> Plot | None:
    """The figure of a table that nobody describes; None where its points are alike, or too many to be told apart."""
    try:
        return plot_of(frame, {}, usual_y)
    except BadInput:
        return None
