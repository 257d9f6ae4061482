"""Small multiples: one panel per scenario, those that stand for the source first and largest; and log axes with names."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from numdev.arithmetic.formats import Format
from numdev.report.claims.evidence import per_replicate
from numdev.report.figures.labels import room_above
from numdev.report.figures.style import GREY, HALF_PAGE, PAGE, SMALL
from numdev.report.reading.frames import is_broken
from numdev.report.reading.scenarios import ROLES, SCENARIO, compared, formats, is_sources, of, ordered
from numdev.report.statistics import Interval, significant, typical
from numdev.results.manifest import Scenario


@dataclass(frozen=True)
class Panel:
    """One set of axes: its title, what it is in words, its rows, and whether it is a large one."""

    title: str
    note: str
    rows: pd.DataFrame
    large: bool


_TOP, _ROW = 2.25, 1.36  # inches of a large panel, and of a row of small ones below it
_CHARACTERS = 595  # of one point, bold, that stand beside one another on a page within its axes

Draw = Callable[[Axes, Panel], None]
Limits = Callable[[pd.DataFrame], tuple[float, float]]


def by_scenario(rows: pd.DataFrame) -> list[list[Panel]]:
    """Rows of panels: the scenarios that stand for the source, then the others by threes or fours."""
    scenarios = ordered(rows)
    first = [scenario for scenario in scenarios if is_sources(scenario)] or scenarios[:1]
    return [
        [panel_of(rows, scenario, large=True) for scenario in first],
        *wrapped(panel_of(rows, scenario, large=False) for scenario in scenarios if scenario not in first),
    ]


def panel_of(rows: pd.DataFrame, scenario: Scenario, *, large: bool) -> Panel:
    return Panel(scenario.title, ROLES[scenario.role], of(rows, scenario), large)


def wrapped(panels: Iterable[Panel]) -> list[list[Panel]]:
    """Rows of three, or of four where that leaves fewer gaps."""
    every = list(panels)
    across = 3 if len(every) in (1, 2, 3, 5, 6, 9) else 4
    return [every[i : i + across] for i in range(0, len(every), across)]


def draw_grid(
    panels: list[list[Panel]],
    draw: Draw,
    limits: Limits,
    *,
    axes_text: tuple[str, str],
    heights: tuple[float, float] = (2.4, 1.6),
) -> Figure:
    """A figure of rows of panels; see `fill`. `heights` are those of a row of large panels and of small ones, inches."""
    single = len(panels) == 1 and len(panels[0]) == 1
    tall = [heights[0] if row[0].large else heights[1] for row in panels]
    figure = Figure(figsize=(HALF_PAGE if single else PAGE, sum(tall) + 0.35), layout="constrained")
    fill(figure, panels, draw, limits, axes_text, tall)
    return figure


def fill(
    figure: Figure | SubFigure,
    panels: list[list[Panel]],
    draw: Draw,
    limits: Limits,
    axes_text: tuple[str, str],
    tall: Sequence[float] | None = None,
) -> None:
    """Fill a figure, or a part of one, with rows of panels; the large ones share a vertical log axis, and so do the small ones.

    Args:
        figure: is filled.
        panels: rows of them.
        draw: fills one.
        limits: of the vertical axis, from the rows of all panels that share it.
        axes_text: what the horizontal and the vertical axis show, with units.
        tall: the heights of the rows; all alike unless given.
    """
    groups = {large: [row for row in panels if row[0].large == large] for large in (True, False)}
    across = {large: max(map(len, rows), default=1) for large, rows in groups.items()}
    spec = figure.add_gridspec(len(panels), math.lcm(*across.values()), height_ratios=tall)
    shared: dict[bool, Axes] = {}
    for i, row in enumerate(panels):
        large = row[0].large
        span = spec.ncols // across[large]
        for j, panel in enumerate(row):
            axes = figure.add_subplot(spec[i, j * span : (j + 1) * span], sharey=shared.get(large))
            if large not in shared:
                shared[large] = axes
                log_y(axes, *limits(pd.concat([p.rows for own in groups[large] for p in own])))
            head(axes, panel, across[large])
            draw(axes, panel)
            axes.tick_params(labelleft=j == 0)
    figure.supxlabel(axes_text[0], fontsize=8)
    figure.supylabel(axes_text[1], fontsize=8)


@dataclass(frozen=True)
class Lower:
    """The panel below the large one of a figure that is made again: its drawing function, and its height in inches."""

    draw: Callable[[SubFigure], None]
    height: float


def draw_reproduced(rows: pd.DataFrame, top: Callable[[Axes, Axes, Panel], None], lower: Lower | None) -> Figure:
    """A figure of a source, made again: its scenario in a large panel and in a narrow one beside it, then what stands below.

    Args:
        rows: of every scenario; the first by its role stands for the source.
        top: fills the large panel and the narrow one; the titles are set before.
        lower: None where there is nothing more.
    """
    heights = [_TOP, *([lower.height] if lower else [])]
    figure = Figure(figsize=(PAGE, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    large, narrow = parts[0][0].subplots(1, 2, width_ratios=[2, 1])
    panel = panel_of(rows, ordered(rows)[0], large=True)
    head(large, panel, 1)
    top(large, narrow, panel)
    if lower is not None:
        lower.draw(parts[1][0])
    return figure


def multiples(rows: pd.DataFrame, draw: Draw, limits: Limits, axes_text: tuple[str, str]) -> Lower | None:
    """Small panels of every scenario but the source's, with one log axis; None where there is no other."""
    panels = wrapped(panel_of(rows, scenario, large=False) for scenario in ordered(rows)[1:])
    return Lower(lambda part: fill(part, panels, draw, limits, axes_text), _ROW * len(panels) + 0.25) if panels else None


def head(axes: Axes, panel: Panel, beside: int) -> None:
    """Writes the title of a panel and a note below it; `beside` panels share the width of the page."""
    size = 8 if panel.large else SMALL
    title = textwrap.fill(panel.title, int(_CHARACTERS / size / beside))
    axes.set_title(title, loc="left", fontweight="bold", fontsize=size, pad=12 if panel.note else 4)
    axes.annotate(
        panel.note,
        (0, 1),
        (0, 3),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=SMALL,
        color=GREY,
    )


def means(rows: pd.DataFrame, x: str, metric: str) -> list[tuple[float, Interval]]:
    """`replicates` at each x in ascending order, without those that hold NaN or Inf and those that are zero."""
    points = ((float(str(place)), replicates(group, metric)) for place, group in rows.groupby(x, sort=True))
    return [(place, interval) for place, interval in points if interval is not None and interval.estimate > 0]


def replicates(rows: pd.DataFrame, metric: str) -> Interval | None:
    """The geometric mean over replicates, or None where nothing was measured or a replicate holds NaN or Inf."""
    if rows.empty or bool(is_broken(rows).any()):
        return None
    values = per_replicate(rows, metric)
    return typical(values["value"].tolist(), values["cluster"].tolist())


def chosen(rows: pd.DataFrame, subject: str = "variant", reference: str = "baseline") -> pd.DataFrame:
    """The replicates of the primary output for one comparison."""
    return compared(rows, subject, reference)


def whiskers(intervals: list[Interval]) -> list[list[float]]:
    """Error bars for matplotlib; none where one replicate leaves the interval infinite."""
    below = [i.estimate - i.low if math.isfinite(i.high) else 0.0 for i in intervals]  # the low end is then 0, not infinite
    return [below, [highest(i) - i.estimate for i in intervals]]


def highest(interval: Interval) -> float:
    """The upper end of what is drawn of an interval."""
    return interval.high if math.isfinite(interval.high) else interval.estimate


def lowest(interval: Interval) -> float:
    """The lower end of what is drawn of an interval, as far as a log axis shows it."""
    return interval.low if interval.low > 0 and math.isfinite(interval.high) else interval.estimate


def plain_ticks(axes: Axes, places: Iterable[float], turned: bool = False) -> None:
    """A log axis that names its own places, such as 256, 512, 1k."""
    turn: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if turned else {}
    known = sorted(set(places))
    axes.set_xscale("log")
    axes.set_xticks(known, [short(place) for place in known], **turn)
    axes.xaxis.set_minor_locator(NullLocator())


def short(value: float) -> str:
    """A power of two in short: 256, 1k, 16k, 1M."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:g}"


def log_y(axes: Axes, low: float, high: float) -> None:
    """A log axis from low to high; where that is less than three decades, 2 and 5 are named too."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    if math.log10(high / low) < 3:
        name_steps(axes.yaxis)


def at_least_a_decade(low: float, high: float) -> tuple[float, float]:
    """Moves both ends apart by the same factor until they span a decade, so that a few percent do not fill a log axis."""
    missing = math.sqrt(max(1.0, 10 * low / high))
    return low / missing, high * missing


class _Steps(LogLocator):
    def tick_values(self, vmin: float, vmax: float) -> Any:
        """At 1, 2 and 5 of each decade; at the decades alone where there are three or more, or no room for more names."""
        assert isinstance(self.axis, Axis)
        box, is_x = self.axis.axes.get_window_extent(), isinstance(self.axis, XAxis)
        room = (box.width / 24 if is_x else box.height / 9) * 72 / self.axis.axes.figure.dpi  # names of 24 points by 9
        self.set_params(subs=[1, 2, 5] if 3 * math.log10(vmax / vmin) < min(9, room) else [1])
        return super().tick_values(vmin, vmax)


def name_steps(axis: Axis) -> None:
    """Names on a log axis as plain numbers."""
    axis.set_major_locator(_Steps())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    """0.02 or 50, and 2 × 10⁻⁹ where there would be many zeros."""
    if 1e-4 <= value < 1e5:
        return f"{value:g}"
    digits, power = f"{value:.0e}".split("e")
    factor = "" if digits == "1" else rf"{digits} \times "
    return f"${factor}10^{{{int(power)}}}$"


def scientific(value: float, digits: int = 2) -> str:
    """A number with significant digits as a figure shows it: 0.026, and 8.3 × 10⁻¹⁶ instead of 8.3e-16."""
    text = significant(value, digits)
    factor, _, power = text.partition("e")
    return rf"${factor} \times 10^{{{power}}}$" if power else text


def in_u(rows: pd.DataFrame, metrics: tuple[str, ...]) -> pd.DataFrame:
    """Rows with absolute metrics divided by the unit roundoff of their format."""
    scaled = rows.copy()
    units = {name: Format.parse(name).u for name in formats(rows)}
    for metric in metrics:
        scaled[metric] = scaled[metric] / scaled["format"].map(units)
    return scaled


def limits(rows: pd.DataFrame, metrics: tuple[str, ...], *across: str, room: float = 0.0) -> tuple[float, float]:
    """Below and above every interval at values of `across`; the upper share `room` of the axis stays free for words."""
    groups = [group for _, group in rows.groupby(["subject", SCENARIO, "format", *across])]
    every = (replicates(group, metric) for group in groups for metric in metrics)
    intervals = [interval for interval in every if interval is not None and interval.estimate > 0]
    if not intervals:
        return 0.1, 10.0
    low = min(lowest(interval) for interval in intervals) / 1.4
    return low, room_above(low, max(highest(interval) for interval in intervals) * 1.1, room)
