"""Two results side by side with common axes: where each deviates, by how many ulp, and one metric over all replicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.report.figures.elements import BINS, COLUMN, ROW, SHADES, element_errors, end_of, words_of
from numdev.report.figures.explore import REFERENCES, SUBJECTS, axis_of, dot
from numdev.report.figures.grid import chosen, highest, lowest, name_steps, replicates
from numdev.report.figures.style import GREY, PAGE, PALE, styled, to_png
from numdev.report.statistics import Interval

_NARROW = 3.0  # a metric whose values differ by less than this factor has a linear axis
_SIZE = (PAGE, 5.3)
# Margins in place of a layout engine, which would draw the figure twice: it is drawn anew at every change of a widget.
_MARGINS = {"left": 0.135, "right": 0.89, "top": 0.95, "bottom": 0.085, "hspace": 0.62, "wspace": 0.1}
_TITLE: dict[str, Any] = {"y": 1.0}  # stated, since matplotlib measures all tick labels of an axes to find it
_SHIFT = 0.21  # of the two errors of one subject, apart from its line: so far that their figures do not overlap


@dataclass(frozen=True)
class Side:
    """One of the two results.

    Attributes:
        title: the policy in words.
        out: O of one head, `[rows, columns]`.
        golden: exact attention on the same inputs.
        rows: of the record, over all replicates.
    """

    title: str
    out: Tensor
    golden: Tensor
    rows: Sequence[dict[str, Any]]

    def errors(self, fmt: Format) -> pd.DataFrame:
        """The error of every element in units of a format."""
        return element_errors(self.out, self.golden, fmt)

    def intervals(self, metric: str) -> list[tuple[str, str, Interval | None]]:
        """Subject, reference and figure of each comparison with golden."""
        pairs = ((subject, reference) for subject in SUBJECTS for reference in REFERENCES)
        frame = pd.DataFrame(self.rows)
        return [(subject, reference, replicates(chosen(frame, subject, reference), metric)) for subject, reference in pairs]


@dataclass(frozen=True)
class Axis:
    """The limits of the axes, so that another picture can have the same.

    Attributes:
        error_u: where the colours end, in u.
        error_ulp: where the histograms end, in ulp.
        smallest: where the shares of the histograms begin.
        metric: that of the last panel, whose axis goes from `low` to `high`.
        logarithmic: whether that axis is.
    """

    error_u: float
    error_ulp: float
    smallest: float
    metric: str
    low: float
    high: float
    logarithmic: bool

    def with_metric(self, other: Axis) -> Axis:
        """A copy that has the metric of another picture, with its limits."""
        return replace(self, metric=other.metric, low=other.low, high=other.high, logarithmic=other.logarithmic)


def axes_for(sides: Sequence[Side], metric: str, fmt: Format) -> Axis:
    """The axes that show what all sides have to show."""
    tables = [side.errors(fmt) for side in sides]
    u, ulp = (max(end_of(errors[name].to_numpy()) for errors in tables) for name in ("error_u", "error_ulp"))
    smallest = 0.5 / max(map(len, tables))
    intervals = [interval for side in sides for *_, interval in side.intervals(metric) if interval is not None]
    return Axis(u, max(1.0, ulp), smallest, metric, *_span(intervals))


def _span(intervals: Sequence[Interval]) -> tuple[float, float, bool]:
    """From where to where the axis of the metric goes, and whether it is logarithmic."""
    if not intervals:
        return 0.0, 1.0, False
    low, high = min(map(lowest, intervals)), max(map(highest, intervals))
    if low > 0 and high > _NARROW * low:
        return low / 1.3, high * 1.9, True
    low = min(0.0, *(interval.low if math.isfinite(interval.low) else interval.estimate for interval in intervals))
    margin = (max(0.0, high) - low) / 8 or 1.0
    return low - margin if low < 0 else low, max(0.0, high) + margin, False


def side_by_side(left: Side, right: Side, metric: str, fmt: Format, axes: Axis | None = None) -> Figure:
    """Maps above, histograms below them, and one metric of both over all replicates.

    Errors of both sides are in u and ulp of one format, so that the same place on an axis is the same error.

    Args:
        left: drawn on the left.
        right: drawn on the right.
        metric: of `Deviation`, in the last panel, where ulp and u are those of each side's own output.
        fmt: in whose u and ulp errors of elements are.
        axes: those of another picture; what both sides need, unless given.
    """
    axes = axes or axes_for((left, right), metric, fmt)
    with styled():
        figure = Figure(figsize=_SIZE)
        spec = figure.add_gridspec(3, 2, height_ratios=(1.25, 1.1, 1.0), **_MARGINS)
        for place, side in enumerate((left, right)):
            errors = side.errors(fmt)
            above, below = figure.add_subplot(spec[0, place]), figure.add_subplot(spec[1, place])
            _map(above, errors, axes)
            above.set_title(_short(side.title), loc="left", fontweight="bold", **_TITLE)
            _histogram(below, errors, axes)
            below.set_xlabel(f"error in ulp of {fmt.name}; grey: ± ½ ulp")
            for own in (above, below):
                if place:
                    own.yaxis.set_major_locator(NullLocator())
            if place == 0:
                above.set_ylabel("column of O")
                below.set_ylabel("share of elements")
        beside = spec[0, 1].get_position(figure)
        bar = figure.add_axes((beside.x1 + 0.015, beside.y0, 0.012, beside.height))
        figure.colorbar(figure.axes[2].images[0], cax=bar, extend="both", label=f"error in u, {fmt.name}")
        _metric(figure.add_subplot(spec[2, :]), (left, right), metric, axes)
    return figure


def picture(left: Side, right: Side, metric: str, fmt: Format, axes: Axis) -> bytes:
    """The figure as PNG."""
    return to_png(side_by_side(left, right, metric, fmt, axes))


def _short(title: str) -> str:
    return title if len(title) <= 52 else f"{title[:51]}…"


def _map(axes: Axes, errors: pd.DataFrame, ends: Axis) -> None:
    shape = int(errors[ROW].max()) + 1, int(errors[COLUMN].max()) + 1
    shown = np.ma.masked_invalid(errors["error_u"].to_numpy().reshape(shape).T)
    end = ends.error_u
    axes.imshow(shown, cmap=SHADES, vmin=-end, vmax=end, aspect="auto", interpolation="nearest", origin="lower")
    axes.grid(visible=False)
    axes.set_xlabel("row of O")


def _histogram(axes: Axes, errors: pd.DataFrame, ends: Axis) -> None:
    error: NDArray[np.float64] = errors["error_ulp"].to_numpy()
    finite, end = error[np.isfinite(error)], ends.error_ulp
    counts, edges = np.histogram(finite, BINS, (-end, end))
    axes.axvspan(-0.5, 0.5, color=PALE, zorder=0)
    axes.stairs(np.maximum(counts / len(error), ends.smallest), edges, baseline=ends.smallest, fill=True)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlim(-end, end)
    axes.set_ylim(ends.smallest, 1.0)
    axes.set_title("\n".join(words_of(error, end)), loc="left", fontsize=7, color=GREY, **_TITLE)


def _metric(axes: Axes, sides: Sequence[Side], metric: str, ends: Axis) -> None:
    """Total and arithmetic error of each side and of its baseline: geometric means over replicates with 95 % intervals."""
    names = []
    for place, (where, side) in enumerate(zip(("left", "right"), sides, strict=True)):
        for subject, reference, interval in side.intervals(metric):
            height = place * len(SUBJECTS) + list(SUBJECTS).index(subject)
            shift = -_SHIFT if reference == next(iter(REFERENCES)) else _SHIFT
            dot(axes, height + shift, interval, REFERENCES[reference][1])
        names += [f"{where}: {name}" for name in SUBJECTS.values()]
    if ends.logarithmic:
        axes.set_xscale("log")
        name_steps(axes.xaxis)
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.ticklabel_format(axis="x", scilimits=(-3, 4))
    axes.set_xlim(ends.low, ends.high)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.axhline(len(SUBJECTS) - 0.5, color=GREY, linewidth=0.5)
    axes.set_xlabel(axis_of(metric))
    keys = [Line2D([], [], color=shade, marker="o", linestyle="none") for _, shade in REFERENCES.values()]
    axes.legend(
        keys, [words for words, _ in REFERENCES.values()], loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False
    )
