"""The losses of training runs beside those of their references, the pictures that they make, and how well they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image as images
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.figures.grid import log_y
from numdev.report.figures.style import GREY, PAGE
from numdev.report.reading.frames import RUN, Results
from numdev.report.reading.scenarios import of, ordered
from numdev.report.statistics.estimates import mean, significant
from numdev.report.studies.groups import Group
from numdev.report.studies.rungs import names_of

_ACROSS = 4
_MOST = 20  # pictures of a figure


def _runs(rows: pd.DataFrame) -> Iterator[tuple[str, Group, pd.DataFrame]]:
    """The rows of each rung of each scenario, with its name and its group, in the order of `Group`."""
    scenarios = ordered(rows)
    for scenario in scenarios:
        own = of(rows, scenario)
        for key, (name, group) in names_of(own).items():
            before = f"{scenario.title}: " if len(scenarios) > 1 else ""
            yield f"{before}{name}", group, own[own["key"] == key]


def _grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, four beside one another."""
    down = -(-count // _ACROSS)
    figure = Figure(figsize=(PAGE, 0.5 + height * down), layout="constrained")
    grid: Any = figure.subplots(down, _ACROSS, squeeze=False)
    every = [axes for row in grid for axes in row]
    for axes in every[count:]:
        axes.remove()
    return figure, every[:count]


def draw_losses(rows: pd.DataFrame) -> Figure:
    """A panel for each rung: the loss of every replicate over the steps, and that of its reference in grey."""
    found = list(_runs(rows))
    figure, panels = _grid(len(found), 1.5)
    values = rows[["loss", "baseline_loss"]].to_numpy(dtype=float)
    finite = values[(values > 0) & (values < math.inf)]
    for place, (axes, (name, group, own)) in enumerate(zip(panels, found, strict=True)):
        axes.set_title(_folded(name), loc="left", fontsize=7, fontweight="bold")
        for _, run in own.groupby("seed", sort=True):
            axes.plot(run["step"], run["baseline_loss"], color=GREY, linewidth=0.9, alpha=0.7)
            axes.plot(run["step"], run["loss"], color=_shade(group), linewidth=0.45)
        if len(finite):
            log_y(axes, float(finite.min()) / 1.1, float(finite.max()) * 1.1)
        axes.tick_params(labelleft=not place % _ACROSS)
    keys = [Line2D([], [], color=GREY, linewidth=1.2), Line2D([], [], color="black", linewidth=0.6)]
    words = ["the reference", "the run, in the colour of what differs; a line per replicate"]
    figure.legend(keys, words, loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel("training steps", fontsize=8)
    figure.supylabel("training loss", fontsize=8)
    return figure


def _shade(group: Group) -> str:
    """A colour that can be seen on grey."""
    return "black" if group is Group.SHAM else group.shade


def _folded(name: str) -> str:
    """A name in lines that fit a panel."""
    from textwrap import fill

    return fill(name, 22)


def draw_samples(rows: pd.DataFrame) -> Figure:
    """What the first replicate of each rung makes of held-out captions, by the files that the column `samples` names."""
    found = [(name, _picture(own)) for name, _, own in _runs(rows)]
    shown = [(name, picture) for name, picture in found if picture is not None][:_MOST]
    if not shown:
        figure = Figure(figsize=(PAGE, 0.5), layout="constrained")
        figure.text(0.5, 0.5, "no run has stored pictures", ha="center", va="center", color=GREY, fontsize=8)
        return figure
    tall, wide = shown[0][1].shape[:2]
    figure, panels = _grid(len(shown), PAGE / _ACROSS * tall / wide + 0.3)
    for axes, (name, picture) in zip(panels, shown, strict=True):
        axes.imshow(picture, interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(_folded(name), loc="left", fontsize=7, fontweight="bold")
    return figure


def _picture(rows: pd.DataFrame) -> Any:
    """The picture of the first replicate that has one; None where none has, or its file is gone."""
    names = [str(name) for name in rows.sort_values("seed")["samples"].dropna() if str(name)]
    path = next((Path(name) for name in names if Path(name).is_file()), None)
    return None if path is None else images.imread(path)


_FIGURES = {
    "held-out loss": "held_out_loss",
    "score": "score",
    "s per step": "seconds_per_step",
}


def run_table(results: Results, study: str) -> pd.DataFrame:
    """A row per rung: held-out loss and score, means over replicates with those of the reference behind them, as text."""
    return pd.DataFrame([{"run": name} | _cells(own) for name, _, own in _runs(results.study(study, RUN))])


def _cells(own: pd.DataFrame) -> dict[str, str]:
    cells = {f"{words} (reference)": _beside(own, column) for words, column in _FIGURES.items()}
    stops = [str(reason) for reason in own["stopped"].dropna().unique() if str(reason)]
    return cells | {"same bits": f"{int(own['same_bits'].sum())} of {len(own)}", "stopped": "; ".join(stops) or "no"}


def _beside(own: pd.DataFrame, column: str) -> str:
    """The mean of a run with its interval, and that of the reference."""
    run, reference = (own[name].dropna().astype(float).tolist() for name in (column, f"baseline_{column}"))
    behind = f" ({significant(math.fsum(reference) / len(reference), 3)})" if reference else ""
    return (mean(run).text().replace(" in every replicate", "") if run else "none") + behind
