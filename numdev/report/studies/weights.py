"""Figures 7 and 8: how the weights of training runs part from those of their reference; and their losses and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.image as images
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from numdev.report.figures.grid import highest, log_y, lowest, scientific, whiskers
from numdev.report.figures.labels import WHITE
from numdev.report.figures.style import GREY, PAGE, PALE, SMALL, TILED
from numdev.report.reading.scenarios import of, ordered
from numdev.report.statistics import Interval, mean, significant
from numdev.report.studies.marks import BESIDE, Look, lay_rows, legend, name_ends, no_figure, titled
from numdev.report.studies.marks import measured as value_of
from numdev.report.studies.training import LARGEST, SIZE, WASSERSTEIN, Group, Rung, rungs, runs_of

_STYLES = ("-", "--", ":", "-.")
_TITLES = {WASSERSTEIN: "Wasserstein distance", LARGEST: "Max difference of one weight"}
_IN_LADDER = {WASSERSTEIN: "Wasserstein distance, as in the paper", LARGEST: "Max difference", SIZE: "Relative norm"}
_TITLE: dict[str, Any] = {"loc": "left", "fontweight": "bold", "fontsize": 8}

Drawn = Sequence[tuple[Rung, Look]]


def draw_weights(rows: pd.DataFrame) -> Figure:
    """Max difference and Wasserstein distance from baseline attention over the steps, a line for each kernel."""
    scenarios = ordered(rows)
    figure = Figure(figsize=(PAGE, 0.75 + 2.35 * len(scenarios)), layout="constrained")
    grid: Any = figure.subplots(len(scenarios), 2, squeeze=False)
    looks: dict[str, Look] = {}
    for pair, scenario in zip(grid, scenarios, strict=True):
        own = [rung for rung in rungs(of(rows, scenario)) if rung.group in (Group.FLASH, Group.ULP)]
        for rung in own:
            place, is_flash = len(looks), rung.group is Group.FLASH  # controls are black and have no markers
            look = Look(TILED if is_flash else rung.group.shade, _STYLES[place % 4], "os^vD"[place % 5] if is_flash else "")
            looks.setdefault(rung.name, look)
        for axes, metric in zip(pair, (LARGEST, WASSERSTEIN), strict=True):
            axes.set_title(f"{scenario.title}\n{_TITLES[metric]}" if len(scenarios) > 1 else _TITLES[metric], **_TITLE)
            _over_steps(axes, [(rung, looks[rung.name]) for rung in own], metric)
            _exponents(axes, [(rung, looks[rung.name]) for rung in own], metric)
    keys = {name: Line2D([], [], **look._asdict()) for name, look in looks.items()}
    legend(figure, keys, min(len(looks), 3) or 1, "outside upper center")
    figure.supxlabel("training steps", fontsize=8)
    figure.supylabel("difference from the weights of baseline attention", fontsize=8)
    return figure


def _over_steps(axes: Axes, drawn: Drawn, metric: str, *, logarithmic: bool = True) -> None:
    """Median lines, and bands from the least to the greatest replicate, on log axes or on linear ones."""
    ends: list[float] = []
    for rung, look in drawn:
        curve = rung.curve(metric)
        if curve.empty:
            continue
        axes.plot(curve.index, curve["median"], markersize=2.5, **look._asdict())
        low = curve["min"].where(curve["min"] > 0, curve["median"])
        axes.fill_between(curve.index, low, curve["max"], color=look.color, alpha=0.2, linewidth=0)
        ends += [float(low.min()), float(curve["max"].max())]
    axes.set_xscale("log" if logarithmic else "linear")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if ends and not logarithmic:
        axes.set_ylim(0, max(ends) * 1.05)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: scientific(value) if value else "0"))
    elif ends:
        log_y(axes, min(ends) / 1.5, max(ends) * 1.5)
    else:
        axes.annotate("no difference", (0.5, 0.5), xycoords="axes fraction", ha="center", color=GREY, fontsize=SMALL)
        axes.set_yticks([])


def _exponents(axes: Axes, drawn: Drawn, metric: str) -> None:
    """The power of the step behind the end of each line."""
    steps = [step for rung, _ in drawn for step in rung.steps()]
    ends = []
    for rung, look in drawn:
        if len(curve := rung.curve(metric)):
            power = rung.exponent(metric).estimate
            words = f"$\\propto t^{{{significant(power)}}}$" if math.isfinite(power) else ""
            ends.append((max(steps), float(curve["median"].iloc[-1]), words, look.color))
    if ends:
        axes.set_xlim(min(steps) / 1.2, max(steps) * (max(steps) / min(steps)) ** 0.3)
        name_ends(axes, ends, 0.07, 6, fontsize=8)


def draw_ladder(rows: pd.DataFrame) -> Figure:
    """Every rung over the steps by three metrics; below, its difference at the last step, and how fast that grows."""
    blocks = [(scenario, rungs(of(rows, scenario))) for scenario in ordered(rows)]
    below = [0.65 + 0.19 * len(every) for _, every in blocks]
    heights = [(0.2 if i else 2.1) + each for i, each in enumerate(below)]  # the first alone has lines: a figure keeps to a page
    figure = Figure(figsize=(PAGE, 0.6 + sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)
    for i, ((scenario, every), (part,)) in enumerate(zip(blocks, parts, strict=True)):
        if len(blocks) > 1:
            part.suptitle(titled(scenario), fontsize=8, fontweight="bold", x=0.01, ha="left")
        rest = part.subfigures(1 if i else 2, 1, height_ratios=[below[i]] if i else [2.1, below[i]], squeeze=False)
        if not i:
            _lines(rest[0][0], every)
        _last(rest[-1][0], every)
    groups = dict.fromkeys(rung.group for _, every in blocks for rung in every if rung.group is not Group.SHAM)
    keys: dict[str, Any] = {group.words: Line2D([], [], color=group.shade, linewidth=2) for group in groups}
    if any(_band(every) for _, every in blocks):
        keys["2 to 5 times below FP16, the paper's range"] = Patch(color=PALE)
    legend(figure, keys, 3, "outside upper center")
    return figure


def _lines(part: Any, every: Sequence[Rung]) -> None:
    """The lines of a scenario; rungs of a group share a colour and differ in style."""
    grid: Any = part.subplots(1, 3, width_ratios=[2, 1, 1])
    seen: list[Group] = []
    drawn = []
    for rung in every:
        drawn.append((rung, Look(rung.group.shade, _STYLES[seen.count(rung.group) % 4])))
        seen.append(rung.group)
    for axes, (metric, title) in zip(grid, _IN_LADDER.items(), strict=True):
        axes.set_title(title, **_TITLE)
        _over_steps(axes, drawn, metric, logarithmic=metric != WASSERSTEIN)
        axes.set_xlabel("training steps")


def _last(part: Any, every: Sequence[Rung]) -> None:
    """A row per rung of a scenario: its difference at the last step, and its growth per step."""
    last, rate = part.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    band = _band(every)
    if band is not None:
        last.axvspan(*band, color=PALE, zorder=0, linewidth=0)
    _dots(last, [(rung, value_of(rung.end_of), _zeros(rung)) for rung in every], "exactly 0")
    _dots(rate, [(rung, value_of(mean, rung.rates().tolist()), "") for rung in every], "does not grow")
    lay_rows(last, [rung.name for rung in every])
    last.set_title(f"At the last step, {every[0].end:,}" if every else "At the last step", **_TITLE)
    rate.set_title("Growth per step", **_TITLE)
    last.set_xlabel("Wasserstein distance")
    rate.set_xlabel("Wasserstein distance per step")


def _band(every: Sequence[Rung]) -> tuple[float, float] | None:
    """A fifth to a half of what FP16 in place of FP32 does: where the source sees flash attention."""
    halves = (value_of(rung.end_of) for rung in every if rung.group is Group.PRECISION and rung.name.startswith("FP16"))
    known = [half.estimate for half in halves if half is not None and half.estimate > 0]
    return (known[0] / 5, known[0] / 2) if known else None


def _zeros(rung: Rung) -> str:
    """A note behind the value at the last step where some replicates, not all, end with the weights of their references."""
    last = rung.rows.loc[rung.rows["step"] == rung.end, WASSERSTEIN]
    count = int((last == 0).sum())
    return f" (0 in {count} of {len(last)} replicates)" if 0 < count < len(last) else ""


def _dots(axes: Axes, drawn: Sequence[tuple[Rung, Interval | None, str]], zero: str) -> None:
    """A row per rung: interval, value on a log axis and a note of its own; words where no value is positive."""
    axes.set_xscale("log")
    known = [value for _, value, _ in drawn if value is not None and value.estimate > 0]
    if known:
        low, high = min(map(lowest, known)), max(map(highest, known))
        wide = max(high / low, 10.0)  # then a power of ten is inside, and has a name
        axes.set_xlim(low / wide**0.15, high * wide**0.3)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    for place, (rung, value, note) in enumerate(drawn):
        look: dict[str, Any] = BESIDE | {"color": rung.group.shade, "bbox": WHITE}
        if value is None or not value.estimate > 0:
            words = "stopped early" if value is None else zero
            axes.annotate(words, (0, place), (4, 0), ("axes fraction", "data"), **look)
            continue
        low = value.low if value.low > 0 else value.estimate  # where a log axis can show it
        shown = Interval(value.estimate, low, value.high, value.count)
        axes.errorbar(value.estimate, place, xerr=whiskers([shown]), color=rung.group.shade, marker="o")
        axes.annotate(scientific(value.estimate) + note, (highest(value), place), (5, 0), **look)


_ACROSS, _MOST = 4, 20  # panels beside one another, and pictures of a figure


def _grid(names: Sequence[str], height: float) -> tuple[Figure, Iterator[Axes]]:
    """A figure with a panel for each name, four beside one another."""
    down = -(-len(names) // _ACROSS)
    figure = Figure(figsize=(PAGE, 0.5 + height * down), layout="constrained")
    every: list[Axes] = list(figure.subplots(down, _ACROSS, squeeze=False).flat)
    for axes in every[len(names) :]:
        axes.remove()
    for axes, name in zip(every, names, strict=False):
        axes.set_title(fill(name, 22), loc="left", fontsize=7, fontweight="bold")
    return figure, iter(every[: len(names)])


def draw_losses(rows: pd.DataFrame) -> Figure:
    """A panel for each rung: the loss of every replicate over the steps, and that of its reference in grey."""
    every = list(runs_of(rows))
    figure, panels = _grid([name for name, *_ in every], 1.5)
    values = rows[["loss", "baseline_loss"]].to_numpy(dtype=float)
    finite = values[(values > 0) & (values < math.inf)]
    for place, (axes, (_, group, own)) in enumerate(zip(panels, every, strict=True)):
        shade = "black" if group is Group.SHAM else group.shade  # which can be seen on grey
        for _, run in own.groupby("seed", sort=True):
            axes.plot(run["step"], run["baseline_loss"], color=GREY, linewidth=0.9, alpha=0.7)
            axes.plot(run["step"], run["loss"], color=shade, linewidth=0.45)
        if len(finite):
            log_y(axes, float(finite.min()) / 1.1, float(finite.max()) * 1.1)
        axes.tick_params(labelleft=not place % _ACROSS)
    keys = {"the reference": Line2D([], [], color=GREY, linewidth=1.2)}
    keys["the run, in the colour of what differs; a line per replicate"] = Line2D([], [], color="black", linewidth=0.6)
    legend(figure, keys, 2, "outside upper center")
    figure.supxlabel("training steps", fontsize=8)
    figure.supylabel("training loss", fontsize=8)
    return figure


def draw_samples(rows: pd.DataFrame) -> Figure:
    """The pictures that the first replicate of each rung makes of held-out captions, by the files of the column `samples`."""
    every = [(name, _picture(own)) for name, _, own in runs_of(rows)]
    shown = [(name, picture) for name, picture in every if picture is not None][:_MOST]
    if not shown:
        return no_figure("no run has stored pictures")
    tall, wide = shown[0][1].shape[:2]
    figure, panels = _grid([name for name, _ in shown], PAGE / _ACROSS * tall / wide + 0.3)
    for axes, (_, picture) in zip(panels, shown, strict=True):
        axes.imshow(picture, interpolation="nearest")
        axes.set_axis_off()
    return figure


def _picture(rows: pd.DataFrame) -> Any:
    """The picture of the first replicate that has one; None where none has, or its file is gone."""
    names = [str(name) for name in rows.sort_values("seed")["samples"].dropna() if str(name)]
    path = next((Path(name) for name in names if Path(name).is_file()), None)
    return None if path is None else images.imread(path)
