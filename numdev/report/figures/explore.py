"""Figures of the notebooks: total beside arithmetic error, and which change adds most error."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.errors import BadInput
from numdev.measurement.deviation.metrics import METRICS
from numdev.report.figures.grid import chosen, replicates, whiskers
from numdev.report.figures.labels import WHITE
from numdev.report.figures.style import BLUE, PAGE, SMALL, VERMILION, laid_out
from numdev.report.reading.scenarios import ENTRY_ROLE, LABEL, of, ordered
from numdev.report.reading.wording import Wording
from numdev.report.statistics import Interval, significant
from numdev.results.manifest import EntryRole

SUBJECTS = {"variant": "measured", "baseline": "baseline"}
REFERENCES = {"golden": ("total error", BLUE), "golden_same_inputs": ("arithmetic error", VERMILION)}
_SHADES_OF = (BLUE, VERMILION)  # of the scenarios of `blame`, in the order of the study
_UNCHANGED = "without the change"


@laid_out
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


@laid_out
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
    total, label = chosen(rows, reference="golden"), f"{LABEL}{axis}"
    if label not in total:
        known = [str(name) for name in total if str(name).startswith(LABEL)]
        raise BadInput("axis", axis, f"the study has {', '.join(known) or 'no labels'}")
    scenarios = ordered(total)
    if len(scenarios) > len(_SHADES_OF):
        raise BadInput("rows", f"{len(scenarios)} scenarios", "blame draws one or two; select those of interest")
    is_control = total.reindex(columns=[f"{ENTRY_ROLE}{axis}"]).iloc[:, 0] == EntryRole.CONTROL.value
    names = total[label][~is_control].unique().tolist()
    figure = Figure(figsize=(PAGE, 0.8 + 0.28 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    keys: list[Line2D] = []
    for shift, scenario, shade in zip((-0.15, 0.15) if len(scenarios) > 1 else (0.0,), scenarios, _SHADES_OF, strict=False):
        own = of(total, scenario)
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
