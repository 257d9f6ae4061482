"""The values of a figure's points in words, where the points lie: what a reader sees who points at one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from numdev.report.statistics import significant

_MOST = 200  # points of a line: what has more is a curve, whose single points say nothing
_LABEL = 40  # characters of a label beside a line; what is longer is a remark
_RADIUS = 4  # points around which a pointer meets a value

_Ends = tuple[float, float] | None


@dataclass(frozen=True)
class Value:
    """A point of a figure: where it lies, in points from the left and from the top, and its value in words."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class _Point:
    """A point in the data of its axes, the colour that a legend names it by, and the ends of its interval along one axis."""

    x: float
    y: float
    colour: str
    ends: _Ends = None


def values(figure: Figure) -> list[Value]:
    """Of every point of every axes that lies inside. The figure must be laid out."""
    points = []
    for axes in figure.axes:
        title = " ".join((axes.get_title("left") or axes.get_title()).split())
        sides = (
            _Side.of(axes.xaxis, axes.get_xlabel() or figure.get_supxlabel()),
            _Side.of(axes.yaxis, axes.get_ylabel() or figure.get_supylabel()),
        )
        names = _names(figure, axes)
        for point, place in _seen(axes):
            x, y = (float(one) * 72 / figure.dpi for one in place)
            points.append(
                Value(x, float(figure.get_figheight()) * 72 - y, _text(point, [title, names.get(point.colour, "")], sides))
            )
    return points


def with_values(svg: str, figure: Figure) -> str:
    """The SVG of a figure with an unseen circle around each point that has its value for a title."""
    shown = values(figure)
    if not shown:
        return svg
    circles = "\n".join(
        f'<circle cx="{value.x:.1f}" cy="{value.y:.1f}" r="{_RADIUS}"><title>{escape(value.text, quote=False)}</title></circle>'
        for value in shown
    )
    head, end, tail = svg.rpartition("</svg>")
    return f'{head}<g class="values" fill="none" pointer-events="all">\n{circles}\n</g>\n{end}{tail}'


def _seen(axes: Axes) -> Iterator[tuple[_Point, Any]]:
    """Points inside the axes, and where; of several in one place one, with the interval that any of them has."""
    by_pixel: dict[tuple[int, int], tuple[_Point, Any]] = {}
    for point in _points(axes):
        place = axes.transData.transform((point.x, point.y))
        if np.isfinite(place).all() and axes.bbox.padded(1).contains(*place):
            first, at = by_pixel.setdefault((round(place[0]), round(place[1])), (point, place))
            by_pixel[round(place[0]), round(place[1])] = replace(first, ends=first.ends or point.ends), at
    yield from by_pixel.values()


def _points(axes: Axes) -> Iterator[_Point]:
    for bars in axes.containers:  # bars first: their intervals are drawn in another colour than that of the legend
        if isinstance(bars, BarContainer):
            for patch in bars.patches:
                yield from _of_bar(patch)
    taken: set[int] = set()
    for container in axes.containers:
        if isinstance(container, ErrorbarContainer) and container.lines[0] is not None:
            line, caps, ends = container.lines
            taken |= {id(line), *map(id, caps)}  # the caps of intervals are markers too
            yield from _of_line(axes, line, [_ends(one, container.has_yerr) for one in ends[0].get_segments()] if ends else [])
    for line in axes.lines:
        marked = line.get_marker() not in ("None", "none", "", " ", None)
        if marked and id(line) not in taken:
            yield from _of_line(axes, line, [])


def _of_line(axes: Axes, line: Line2D, ends: list[_Ends]) -> Iterator[_Point]:
    data: Any = line.get_xydata()
    if len(data) > _MOST or line.get_transform() != axes.transData:
        return
    shade = to_hex(line.get_color())
    for place, (x, y) in enumerate(data):
        yield _Point(float(x), float(y), shade, ends[place] if place < len(ends) and len(ends) == len(data) else None)


def _of_bar(patch: Any) -> Iterator[_Point]:
    """Its end, from whichever axis it stands on; a bar of no length is an entry of a legend."""
    x, y, wide, high = patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()
    if wide and high:
        upright = y == 0 or x != 0
        yield _Point(x + wide / 2 if upright else wide, high if upright else y + high / 2, to_hex(patch.get_facecolor()))


def _ends(segment: Any, upright: bool) -> _Ends:
    low, high = (float(end[1 if upright else 0]) for end in segment)
    return (low, high) if math.isfinite(low) and math.isfinite(high) and low != high else None


def _names(figure: Figure, axes: Axes) -> Mapping[str, str]:
    """The words of legends, and of labels beside lines, by their colours; without colours that have more than one."""
    own = axes.get_legend()
    words_of: dict[str, list[str]] = {}
    for legend in (*figure.legends, *([own] if own is not None else [])):
        for handle, words in zip(legend.legend_handles, _texts(legend), strict=True):
            shade = _shade(handle)
            if shade is not None and words not in words_of.setdefault(shade, []):
                words_of[shade].append(words)
    for text in (text for each in figure.axes for text in each.texts if len(text.get_text()) <= _LABEL):
        shade, words = to_hex(text.get_color()), " ".join(text.get_text().split())
        if words and len({shade[1:3], shade[3:5], shade[5:]}) > 1 and words not in words_of.setdefault(shade, []):  # no grey
            words_of[shade].append(words)
    return {shade: words[0] for shade, words in words_of.items() if len(words) == 1}


def _texts(legend: Legend) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def _shade(handle: Any) -> str | None:
    for name in ("get_color", "get_facecolor"):
        if hasattr(handle, name):
            try:
                return to_hex(getattr(handle, name)())
            except (ValueError, TypeError):  # a handle of several colours
                return None
    return None


def _text(point: _Point, head: list[str], sides: tuple[_Side, _Side]) -> str:
    interval = "" if point.ends is None else f" ({significant(point.ends[0], 3)} to {significant(point.ends[1], 3)})"
    return "; ".join([*filter(None, head), sides[0].words(point.x), sides[1].words(point.y)]) + interval


@dataclass(frozen=True)
class _Side:
    """An axis: its label, the names of its ticks by their places, and whether they stand for what is near by too."""

    label: str
    names: Mapping[float, str]
    of_names: bool

    @classmethod
    def of(cls, axis: Axis, label: str) -> _Side:
        ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False)
        texts = {float(place): " ".join(text.get_text().split()) for place, text in ticks}
        names = {place: text for place, text in texts.items() if text and "$" not in text and not _is_number(text)}
        of_names = len(names) == len(texts) and list(names) == list(range(len(names)))  # such an axis counts its entries
        return cls(" ".join(label.replace("$", "").split()), names, of_names)

    def words(self, value: float) -> str:
        """The label with the value, or with the name of the tick that stands there."""
        near = min(self.names, key=lambda place: abs(place - value), default=math.inf)
        named = abs(near - value) <= (0.5 if self.of_names else 1e-9 * abs(value))
        words = self.names[near] if named else significant(value, 3)
        return f"{self.label}: {words}" if self.label else words


def _is_number(text: str) -> bool:
    try:
        float(text.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return False
    return True
