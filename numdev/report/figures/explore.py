"""Figures of the notebooks: where one result deviates, by how many ulp, and which change adds most error."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from numdev.errors import BadInput
from numdev.measurement.deviation.metrics import METRICS
from numdev.report.figures.grid import chosen, replicates, whiskers
from numdev.report.figures.labels import WHITE
from numdev.report.figures.style import BLUE, GREY, PAGE, PALE, SMALL, VERMILION, freeze, styled
from numdev.report.reading.elements import COLUMN, ROW
from numdev.report.reading.frames import LABEL
from numdev.report.reading.scenarios import ENTRY_ROLE, of, ordered
from numdev.report.reading.wording import Wording
from numdev.report.statistics.estimates import Interval, significant
from numdev.results.manifest import EntryRole

_P = ParamSpec("_P")
SHADES = LinearSegmentedColormap.from_list("error", [BLUE, "white", VERMILION]).with_extremes(bad="black")
_SHOWN = 0.98  # share of the elements within the scale of a map or histogram: a few large errors would hide the rest
BINS = 121  # odd, so that one bin is centred at zero
SUBJECTS = {"variant": "measured", "baseline": "baseline"}
REFERENCES = {"golden": ("total error", BLUE), "golden_same_inputs": ("arithmetic error", VERMILION)}
_SHADES_OF = (BLUE, VERMILION)  # of the scenarios of `blame`, in the order of the study
_UNCHANGED = "without the change"


def _laid_out(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """A drawing function in the house's style, its figure laid out."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with styled():
            return freeze(draw(*args, **kwargs))

    return drawn


@_laid_out
def map_of(elements: pd.DataFrame, title: str, reference: str) -> Figure:
    """See `numdev.report.offered.error_map`."""
    error = elements.pivot(index=COLUMN, columns=ROW, values="error_u").to_numpy()
    end = end_of(error)
    shown = np.ma.masked_invalid(error)
    figure = Figure(figsize=(PAGE, 2.3), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shown, cmap=SHADES, vmin=-end, vmax=end, aspect="auto", interpolation="nearest", origin="lower")
    if np.isfinite(error).any():
        column, row = np.unravel_index(int(np.ma.abs(shown).argmax()), error.shape)
        axes.plot(row, column, marker="o", color="black", markerfacecolor="none", markersize=7, clip_on=False)
    axes.grid(visible=False)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("row of the output")
    axes.set_ylabel("column of the output")
    figure.colorbar(image, ax=axes, extend="both", label=f"error in u max |{reference}|", pad=0.01)
    return figure


@_laid_out
def histogram_of(elements: pd.DataFrame, title: str) -> Figure:
    """See `numdev.report.offered.error_histogram`."""
    error = elements["error_ulp"].to_numpy()
    finite = error[np.isfinite(error)]
    end = max(1.0, end_of(error))
    figure = Figure(figsize=(PAGE, 2.1), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(-0.5, 0.5, color=PALE, zorder=0)
    axes.hist(finite, bins=BINS, range=(-end, end), color=BLUE, weights=np.full(len(finite), 1 / len(error)))
    axes.set_xlim(-end, end)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_title("\n".join(words_of(error, end)), loc="right" if title else "left", fontsize=7, color=GREY)
    axes.set_xlabel(f"error in ulp of {elements['format'].iloc[0]}; grey: ± ½ ulp, one rounding to nearest")
    axes.set_ylabel("share of elements")
    return figure


def words_of(error: NDArray[np.float64], end: float) -> list[str]:
    """Words on the elements that the histogram leaves out or cannot show."""
    finite = np.abs(error[np.isfinite(error)])
    beyond, outside = ((finite > limit).sum() / len(error) for limit in (0.5, end))
    words = [f"{100 * beyond:.3g} % beyond ½ ulp, {100 * outside:.2g} % outside the axis"]
    lost = len(error) - len(finite)
    return words + ([f"{lost} element{'s are' if lost > 1 else ' is'} NaN or Inf"] if lost else [])


@_laid_out
def total_and_arithmetic(rows: pd.DataFrame, metric: str = "max_difference") -> Figure:
    """Total error (from golden on the unrounded inputs) beside arithmetic error (from golden on the rounded ones).

    Bars of the variant and of its baseline: geometric means over seeds with 95 % intervals. `rows` are those of one
    record, `pd.DataFrame(record.rows)`.
    """
    figure = Figure(figsize=(PAGE, 1.7), layout="constrained")
    axes = figure.add_subplot()
    for place, subject in enumerate(SUBJECTS):
        for shift, (reference, (_, shade)) in zip((-0.2, 0.2), REFERENCES.items(), strict=True):
            interval = replicates(chosen(rows, subject, reference), metric)
            _across(axes, place + shift, interval, shade)
    for words, shade in REFERENCES.values():
        axes.barh(0, 0, color=shade, label=words)
    axes.set_yticks(range(len(SUBJECTS)), list(SUBJECTS.values()))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(axis_of(metric))
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def _across(axes: Axes, place: float, interval: Interval | None, shade: str) -> None:
    """A horizontal bar with its interval and its value; a word where there is nothing to draw."""
    if interval is None:
        axes.annotate("NaN, Inf or not measured", (0, place), (3, 0), textcoords="offset points", va="center", fontsize=SMALL)
        return
    bars = whiskers([interval])
    axes.barh(place, interval.estimate, 0.36, color=shade)
    axes.errorbar(interval.estimate, place, xerr=bars, color="black", linewidth=0.8)
    right, text = interval.estimate + bars[1][0], significant(interval.estimate)
    axes.annotate(text, (right, place), (4, 0), textcoords="offset points", va="center", fontsize=SMALL)


@_laid_out
def blame(rows: pd.DataFrame, metric: str = "max_difference", axis: str = "step") -> Figure:
    """The total error with one thing changed at a time, such as one step of a policy in another format: a dot for each change.

    Geometric means over seeds with 95 % intervals, on a log axis. The legend has the titles of the scenarios. A dashed line is
    the control that the study declares, in which nothing is changed.

    Args:
        rows: of a study of one scenario or two, with an axis of changes.
        metric: of `Deviation`.
        axis: the label that names what was changed; its control has `roles={axis: EntryRole.CONTROL}`.

    Raises:
        BadInput: if the rows have no such label, or more scenarios than two.
    """
    found, label = chosen(rows, reference="golden"), f"{LABEL}{axis}"
    if label not in found:
        known = [str(name) for name in found if str(name).startswith(LABEL)]
        raise BadInput("axis", axis, f"the study has {', '.join(known) or 'no labels'}")
    scenarios = ordered(found)
    if len(scenarios) > len(_SHADES_OF):
        raise BadInput("rows", f"{len(scenarios)} scenarios", "blame draws one or two; select those of interest")
    is_control = found.reindex(columns=[f"{ENTRY_ROLE}{axis}"]).iloc[:, 0] == EntryRole.CONTROL.value
    names = found[label][~is_control].unique().tolist()
    figure = Figure(figsize=(PAGE, 0.8 + 0.28 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    keys: list[Line2D] = []
    for shift, scenario, shade in zip((-0.15, 0.15) if len(scenarios) > 1 else (0.0,), scenarios, _SHADES_OF, strict=False):
        own = of(found, scenario)
        for place, name in enumerate(names):
            dot(axes, place + shift, replicates(own[own[label] == name], metric), shade, nothing=0.0)
        keys.append(Line2D([], [], color=shade, marker="o", linestyle="none", label=scenario.title))
        if (line := replicates(own[is_control[own.index]], metric)) is not None and line.estimate > 0:
            keys.append(
                axes.axvline(line.estimate, color=shade, linewidth=0.9, linestyle=(0, (4, 2)), zorder=0, label=_UNCHANGED)
            )
    axes.set_yticks(range(len(names)), [str(name).replace("_", " ") for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(axis_of(metric))
    figure.legend(handles=keys, loc="outside upper center", ncols=2, frameon=False)
    return figure


def dot(axes: Axes, height: float, interval: Interval | None, shade: str, nothing: float | None = None) -> None:
    """A dot with its interval and its value; a word where there is nothing to draw, also for `nothing`, which has no place."""
    if interval is None or not math.isfinite(interval.estimate) or interval.estimate == nothing:
        word = "NaN, Inf or not measured" if interval is None or not math.isfinite(interval.estimate) else "0"
        place: Any = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
        axes.annotate(word, (0, height), (3, 0), va="center", fontsize=SMALL, color=shade, **place)
        return
    bars = whiskers([interval])
    axes.errorbar(interval.estimate, height, xerr=bars, color=shade, marker="o")
    right, text = interval.estimate + bars[1][0], significant(interval.estimate)
    axes.annotate(text, (right, height), (4, 0), textcoords="offset points", va="center", fontsize=SMALL, bbox=WHITE)


def axis_of(metric: str) -> str:
    return f"{Wording().metric(metric, '', 'golden')}, {METRICS[metric][0]}"


def end_of(error: NDArray[np.float64]) -> float:
    """Where a scale ends, the same on both sides of zero."""
    finite = np.abs(error[np.isfinite(error)])
    return float(np.quantile(finite, _SHOWN, method="higher")) or 1.0 if finite.size else 1.0
