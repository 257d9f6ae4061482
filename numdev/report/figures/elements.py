"""Single results: the error of every element as table, map, histogram and in words, and two results side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput
from numdev.measurement.metrics import METRICS
from numdev.report.figures.marks import TITLE, Dot, draw_rows, page, replicates, swatch
from numdev.report.figures.theme import BLUE, GREY, PAGE, PALE, VERMILION, freeze, styled, to_png, to_svg
from numdev.report.reading.frames import compared
from numdev.report.reading.wording import Wording
from numdev.report.statistics import Interval, significant
from numdev.results.record import write_atomically

ROW, COLUMN = "row", "column"
_MAP = "Errors of one head by row and column, in u max |{reference}|, blue below zero and red above, a ring at the largest."
_HISTOGRAM = "The share of elements over their error in ulp, with a band of half an ulp on both sides."
_ERROR_COLOURS = LinearSegmentedColormap.from_list("error", [BLUE, "white", VERMILION]).with_extremes(bad="black")
_SHOWN = 0.98  # share of the elements within the scale of a map or histogram: a few large errors would hide the rest
_BINS = 121  # odd, so that one bin is centred at zero
_SUBJECTS = {"variant": "measured", "baseline": "baseline"}
_REFERENCES = {"golden": ("total error", BLUE), "golden_same_inputs": ("arithmetic error", VERMILION)}
_BROKEN = "NaN, Inf or not measured"
_SHIFTS = {"golden": -0.21, "golden_same_inputs": 0.21}  # of the errors of one subject: their figures do not overlap


def element_errors(x: Float[Tensor, "rows columns"], reference: Float[Tensor, "rows columns"], fmt: Format) -> pd.DataFrame:
    """One row per element of an output, in the order of its rows and columns.

    Columns: `row`, `column`, `reference` r, `error` D = x - r, `error_u` D / (u max |r|) and `error_ulp`
    D / ulp(r), the last two in the format `fmt`, whose name is `format`. NaN and Inf stay what they are.

    Raises:
        BadInput: if the shapes differ or are empty.
    """
    if x.shape != reference.shape or x.numel() == 0:
        raise BadInput("reference", tuple(reference.shape), f"give the shape of x, {tuple(x.shape)}, not empty")
    x, reference = x.double().cpu(), reference.double().cpu()
    error = x - reference
    row, column = np.indices(tuple(error.shape))
    largest = float(reference.abs().amax()) or 1.0
    columns = {
        "reference": reference,
        "error": error,
        "error_u": error / (fmt.u * largest),
        "error_ulp": error / fmt.ulp(reference),
    }
    table = {ROW: row.ravel(), COLUMN: column.ravel()} | {name: values.flatten().numpy() for name, values in columns.items()}
    return pd.DataFrame(table).assign(format=fmt.name)


@styled()
def error_map(elements: pd.DataFrame, title: str = "", reference: str = "golden") -> Figure:
    """`D = x - r` of one matrix, in units of `u max |r|`; `elements` are those of `element_errors`.

    The colours end at the 98th percentile of `|D|`. A ring marks the largest `|D|`; NaN and Inf are black. `title`, such as the
    policy in words, is written above; `reference` is what r is called.
    """
    figure = page(2.3)
    axes = figure.add_subplot()
    image = _map(axes, elements, _end_of(elements["error_u"].to_numpy()))
    if len(known := elements[np.isfinite(elements["error_u"])]):
        largest = known.loc[known["error_u"].abs().idxmax()]
        axes.plot(largest[ROW], largest[COLUMN], marker="o", color="black", markerfacecolor="none", markersize=7, clip_on=False)
    axes.set_title(title, **TITLE)
    axes.set(xlabel="row of the output", ylabel="column of the output")
    figure.colorbar(image, ax=axes, extend="both", label=f"error in u max |{reference}|", pad=0.01)
    return freeze(figure)


@styled()
def error_histogram(elements: pd.DataFrame, title: str = "") -> Figure:
    """The distribution of `(x - r) / ulp(r)`, the ulp being that of the format; `elements` are those of `element_errors`.

    A grey band marks +- 1/2 ulp, within which golden rounded once to nearest lies. The axis ends at the 98th percentile.
    `title`, such as the policy in words, is written above.
    """
    error = elements["error_ulp"].to_numpy()
    end = max(1.0, _end_of(error))
    figure = page(2.1)
    axes = figure.add_subplot()
    _histogram(axes, error, end)
    axes.set_title(title, **TITLE)
    axes.set_title(_words_of(error, end), loc="right" if title else "left", fontsize=7, color=GREY)
    axes.set_xlabel(f"error in ulp of {elements['format'].iloc[0]}; grey: ± ½ ulp, one rounding to nearest")
    axes.set_ylabel("share of elements")
    return freeze(figure)


def write_errors(elements: pd.DataFrame, title: str, out: Path, suffix: str = "", reference: str = "golden") -> list[Path]:
    """Write error_map and error_histogram of `element_errors` as PNG and SVG into `out`; returns where.

    Raises:
        StoreError: if a file cannot be written.
    """
    drawn = {
        "error_map": (error_map(elements, title, reference), _MAP.format(reference=reference)),
        "error_histogram": (error_histogram(elements, title), _HISTOGRAM),
    }
    files: dict[Path, bytes] = {}
    for name, (figure, alt) in drawn.items():
        caption = f"{name.replace('_', ' ').capitalize()}: {' '.join(title.split())}"
        files |= {out / f"{name}{suffix}.png": to_png(figure), out / f"{name}{suffix}.svg": to_svg(figure, caption, alt)}
    for path, data in files.items():
        write_atomically(path, data)
    return list(files)


def error_summary(elements: pd.DataFrame, reference: str = "golden") -> Iterator[str]:
    """The largest error with its place, then how the elements spread."""
    finite = elements[np.isfinite(elements["error"])]
    lost = len(elements) - len(finite)
    if finite.empty:
        yield f"all {lost} elements are NaN or Inf"
        return
    worst = finite.loc[finite["error"].abs().idxmax()]
    exact = float(worst["reference"])
    largest, ulp, u, value, r = (
        significant(number, 4)
        for number in (*(abs(worst[name]) for name in ("error", "error_ulp", "error_u")), exact + float(worst["error"]), exact)
    )
    yield f"largest |D|: {largest} at row {worst[ROW]}, column {worst[COLUMN]}, where it is {value} and {reference} is {r}"
    yield f"that is {ulp} ulp of {elements['format'].iloc[0]} there, and {u} u max |{reference}|"
    within = 100 * float((finite["error_ulp"].abs() <= 0.5).mean())
    rmse = significant(float(np.sqrt((finite["error"] ** 2).mean())), 4)
    yield f"RMSE {rmse}; {within:.3g} % of the elements lie within half an ulp"
    if lost:
        yield f"{lost} elements are NaN or Inf, black in the map and in no other figure"


def _map(axes: Axes, elements: pd.DataFrame, end: float) -> Any:
    shape = int(elements[ROW].max()) + 1, int(elements[COLUMN].max()) + 1
    shown = np.ma.masked_invalid(elements["error_u"].to_numpy().reshape(shape).T)
    axes.grid(visible=False)
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "lower"}
    return axes.imshow(shown, cmap=_ERROR_COLOURS, vmin=-end, vmax=end, **look)


def _histogram(axes: Axes, error: NDArray[np.float64], end: float, smallest: float = 0.0) -> None:
    """Shares of the elements, from `smallest` on a log axis where that is above 0."""
    counts, edges = np.histogram(error[np.isfinite(error)], _BINS, (-end, end))
    axes.axvspan(-0.5, 0.5, color=PALE, zorder=0)
    axes.stairs(np.maximum(counts / len(error), smallest), edges, baseline=smallest, fill=True, color=BLUE)
    axes.set_xlim(-end, end)
    if smallest:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(smallest, 1.0)


def _words_of(error: NDArray[np.float64], end: float) -> str:
    """Words on the elements that the histogram leaves out or cannot show."""
    finite = np.abs(error[np.isfinite(error)])
    beyond, outside = ((finite > limit).sum() / len(error) for limit in (0.5, end))
    words = f"{100 * beyond:.3g} % beyond ½ ulp, {100 * outside:.2g} % outside the axis"
    lost = len(error) - len(finite)
    return words + (f"\n{lost} element{'s are' if lost > 1 else ' is'} NaN or Inf" if lost else "")


def _end_of(error: NDArray[np.float64]) -> float:
    """Where a scale ends, the same on both sides of zero."""
    finite = np.abs(error[np.isfinite(error)])
    return float(np.quantile(finite, _SHOWN, method="higher")) or 1.0 if finite.size else 1.0


_KEYS = {words: swatch(shade) for words, shade in _REFERENCES.values()}


_SIZE = (PAGE, 5.3)
# Margins in place of a layout engine, which would draw the figure twice: it is drawn anew at every change of a widget.
_MARGINS = {"left": 0.135, "right": 0.89, "top": 0.95, "bottom": 0.085, "hspace": 0.62, "wspace": 0.1}
_TOP = 1.0  # of titles: stated, since matplotlib measures all tick labels of an axes to find it


@dataclass(frozen=True)
class Side:
    """One of two results beside each other: the policy in words, O and golden of one head, and the rows of the record."""

    title: str
    out: Tensor
    golden: Tensor
    rows: Sequence[dict[str, Any]]

    def errors(self, fmt: Format) -> pd.DataFrame:
        """The error of every element in units of a format."""
        return element_errors(self.out, self.golden, fmt)

    def intervals(self, metric: str) -> dict[tuple[str, str], Interval | None]:
        """Total and arithmetic error of each subject: by subject and reference, geometric means over replicates."""
        rows = pd.DataFrame(self.rows)
        return {pair: replicates(compared(rows, *pair), metric) for pair in product(_SUBJECTS, _REFERENCES)}


@dataclass(frozen=True)
class Scale:
    """Where colours end, where histograms do, and where their shares begin, so that another picture can have the same."""

    error_u: float
    error_ulp: float
    smallest: float

    @staticmethod
    def of(sides: Sequence[Side], fmt: Format) -> Scale:
        """That on which all sides can be seen."""
        tables = [side.errors(fmt) for side in sides]
        u, ulp = (max(_end_of(errors[name].to_numpy()) for errors in tables) for name in ("error_u", "error_ulp"))
        return Scale(u, max(1.0, ulp), 0.5 / max(map(len, tables)))


@styled()
def side_by_side(left: Side, right: Side, metric: str, fmt: Format, scale: Scale | None = None) -> Figure:
    """Maps above, histograms below them, and one metric of both over all replicates.

    Errors of both sides are in u and ulp of one format, so that the same place on an axis is the same error; those of the metric,
    of `Deviation`, are of each side's own output. The scale may be that of another picture.
    """
    scale = scale or Scale.of((left, right), fmt)
    figure = Figure(figsize=_SIZE)
    spec = figure.add_gridspec(3, 2, height_ratios=(1.25, 1.1, 1.0), **_MARGINS)
    names, dots = list[str](), list[Dot]()
    for place, (where, side) in enumerate((("left", left), ("right", right))):
        errors = side.errors(fmt)
        above, below = figure.add_subplot(spec[0, place]), figure.add_subplot(spec[1, place])
        image: Any = _map(above, errors, scale.error_u)
        above.set_title(side.title if len(side.title) <= 52 else f"{side.title[:51]}…", y=_TOP, **TITLE)
        above.set_xlabel("row of O")
        error = errors["error_ulp"].to_numpy()
        _histogram(below, error, scale.error_ulp, scale.smallest)
        below.set_title(_words_of(error, scale.error_ulp), loc="left", fontsize=7, color=GREY, y=_TOP)
        below.set_xlabel(f"error in ulp of {fmt.name}; grey: ± ½ ulp")
        below.locator_params(axis="x", nbins=5)
        for own, words in ((above, "column of O"), (below, "share of elements")):
            if place:
                own.yaxis.set_major_locator(NullLocator())
            else:
                own.set_ylabel(words)
        names += [f"{where}: {name}" for name in _SUBJECTS.values()]
        for (subject, reference), value in side.intervals(metric).items():
            row = place * len(_SUBJECTS) + list(_SUBJECTS).index(subject) + _SHIFTS[reference]
            text = significant(value.estimate) if value and math.isfinite(value.estimate) else ""
            dots.append(Dot(row, value, _REFERENCES[reference][1], text, _BROKEN))
    beside = spec[0, 1].get_position(figure)
    bar = figure.add_axes((beside.x1 + 0.015, beside.y0, 0.012, beside.height))
    figure.colorbar(image, cax=bar, extend="both", label=f"error in u, {fmt.name}")
    last = figure.add_subplot(spec[2, :])
    is_signed = any(dot.value is not None and dot.value.estimate < 0 for dot in dots)
    draw_rows(last, names, dots, log=not is_signed)
    last.xaxis.set_minor_locator(NullLocator())
    if is_signed:
        last.ticklabel_format(axis="x", scilimits=(-3, 4))
        last.margins(x=0.15)
    last.axhline(len(_SUBJECTS) - 0.5, color=GREY, linewidth=0.5)
    last.set_xlabel(f"{Wording().metric(metric, '', 'golden')}, {METRICS[metric][0]}")
    last.legend(_KEYS.values(), _KEYS, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    return figure


def picture(left: Side, right: Side, metric: str, fmt: Format, scale: Scale) -> bytes:
    """The figure as PNG."""
    return to_png(side_by_side(left, right, metric, fmt, scale))
