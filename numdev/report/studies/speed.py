"""Speed over N, memory over N, and deviation over speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.figures.grid import at_least_a_decade, log_y, plain_ticks
from numdev.report.figures.labels import Name, name_points
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import BLACK, GREY, PAGE, SERIES, SMALL
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.entries import ROLE
from numdev.report.studies.latency import SHAPE, N, shape_text
from numdev.results.manifest import EntryRole

_CONTROL, _ASIDE = (GREY, "s"), (BLACK, "D")
_SUBJECTS = tuple(zip(SERIES, "^v<>oXP", strict=True))


def looks(rows: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Colour and marker of each attention: those of its role in the study, and of its place among the subjects."""
    roles = rows[ROLE] if ROLE in rows else pd.Series(None, rows.index, dtype="str")
    declared = dict(zip(rows["series"], roles, strict=True))
    known = {EntryRole.CONTROL.value: _CONTROL, EntryRole.ASIDE.value: _ASIDE}
    others = [name for name, role in declared.items() if role not in known]
    shown = {name: _SUBJECTS[i % len(_SUBJECTS)] for i, name in enumerate(others)}
    return {str(name): known.get(role) or shown[name] for name, role in declared.items()}


def throughput(rows: pd.DataFrame) -> Figure:
    """Operations per second over N; for one query, where memory is the limit, bytes per second that no algorithm can avoid."""
    seen = looks(rows)
    decode = bool((rows["phase"] == "decode").all())
    column, text = ("bandwidth", "q, k, v and O, GB/s") if decode else ("tflops", "TFLOP/s")

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        _lines(axes, own, column, seen)
        axes.margins(y=0.08)

    figure = _panels(rows, draw, ("keys" if decode else "sequence length N", text), sharey=not decode)
    for axes in figure.axes:  # last: a limit that is set no longer follows the lines of later panels
        axes.set_ylim(bottom=0)
    return figure


def memory(rows: pd.DataFrame) -> Figure:
    """The most memory that a call takes beyond its inputs, its result among it, over N; thin lines have slopes 1 and 2.

    Per batch entry, since a study may keep the number of tokens.
    """
    seen = looks(rows)

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        held = own.assign(mib=own["peak_bytes"] / own["problem.shape.batch"] / 2**20)
        axes.set_yscale("log")
        _lines(axes, held, "mib", seen)
        _guide(axes, held)

    return _panels(rows, draw, ("sequence length N", "peak memory beyond the inputs,\nMiB per sequence"), sharey=True)


def tradeoff(rows: pd.DataFrame) -> Figure:
    """RMSE from golden over speed, a point for each attention, at the greatest N that all of a panel have."""
    names: dict[Axes, list[Name]] = {}
    seen = looks(rows)

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        common = own.groupby(N)["series"].nunique()
        n = int(str(common[common == common.max()].index.max()))
        axes.annotate(f"N = {n}", (1, 1), (0, -2), **_inside("right", "top"))
        middle = own[own[N] == n].groupby("series", sort=False)[["tflops", "rmse"]].median()
        inexact = middle[middle["rmse"] > 0]
        if len(inexact) < len(middle):
            axes.annotate(f"{len(middle) - len(inexact)} without a deviation", (0, 0), (2, 2), **_inside("left", "bottom"))
        names[axes] = [(x, y, str(name), seen[str(name)][0]) for name, (x, y) in inexact.iterrows()]
        for x, y, name, shade in names[axes]:
            axes.plot(x, y, marker=seen[name][1], color=shade, linestyle="", markersize=5)
        axes.margins(x=0.2)
        low, high = (inexact["rmse"].min() / 1.5, inexact["rmse"].max() * 1.5) if len(inexact) else (0.1, 1.0)
        log_y(axes, *at_least_a_decade(low, high))

    figure = _panels(rows, draw, ("TFLOP/s", "RMSE of O from golden, absolute"), sharey=False, over_n=False)
    figure.draw_without_rendering()
    for axes, found in names.items():
        name_points(axes, found)
    return figure


SPEED_FIGURES: dict[str, Plot] = {
    "throughput": Plot(
        throughput,
        "Lines of speed over the sequence length N, one per attention, a panel for each shape and mask; bars are quartiles.",
        title="Speed over the sequence length; bars are quartiles",
    ),
    "memory": Plot(
        memory,
        "Lines of the peak memory of one sequence over its length N on log axes, one per attention, with guides of slopes N "
        "and N squared.",
        title="Peak memory of one sequence over its length",
    ),
    "tradeoff": Plot(
        tradeoff,
        "One point per attention, with its name: its RMSE from golden on a log axis of a decade or more over its speed, at "
        "the greatest sequence length.",
        title="Deviation from golden over speed",
    ),
}


def _panels(
    rows: pd.DataFrame,
    draw: Callable[[Axes, pd.DataFrame], None],
    texts: tuple[str, str],
    *,
    sharey: bool,
    over_n: bool = True,
) -> Figure:
    """A panel for each scenario and shape, two in a row, under one legend."""
    groups = [group for _, group in rows.groupby(list(SHAPE), sort=False, dropna=False)]
    across = min(2, len(groups))
    down = -(-len(groups) // across)
    figure = Figure(figsize=(PAGE if across > 1 else PAGE * 0.65, 2.3 * down + 0.5), layout="constrained")
    grid: Any = figure.subplots(down, across, sharey=sharey, squeeze=False)
    every = [axes for row in grid for axes in row]
    for axes, own in zip(every, groups, strict=False):
        first = own.iloc[0].to_dict()
        title = f"{first['scenario.title']}: " if rows["scenario"].nunique() > 1 else ""
        axes.set_title(f"{title}{shape_text(first)}", loc="left", fontweight="bold")
        draw(axes, own)
        if over_n:
            plain_ticks(axes, own[N].unique().astype(float).tolist())
    for axes in every[len(groups) :]:
        axes.remove()
    if over_n:
        _legend(figure, looks(rows), columns=2 * across + 1)
    figure.supxlabel(texts[0], fontsize=8)
    figure.supylabel(texts[1], fontsize=8)
    return figure


def _legend(figure: Figure, seen: Mapping[str, tuple[str, str]], columns: int) -> None:
    keys = [Line2D([], [], color=shade, marker=marker) for shade, marker in seen.values()]
    figure.legend(keys, list(seen), loc="outside upper center", ncols=min(len(seen), columns), frameon=False)


def _lines(axes: Axes, own: pd.DataFrame, column: str, seen: Mapping[str, tuple[str, str]]) -> None:
    for name, group in own.groupby("series", sort=False):
        shade, marker = seen[str(name)]
        table = group.groupby(N, sort=True)[[column, "latency", "latency_low", "latency_high"]].median()
        value = table[column]
        spread = None
        if column in ("tflops", "bandwidth"):  # in proportion to 1 / latency
            high, low = value * table["latency"] / table["latency_low"], value * table["latency"] / table["latency_high"]
            spread = [value - low, high - value]
        axes.errorbar(table.index, value, yerr=spread, color=shade, marker=marker, capsize=1.5)


def _guide(axes: Axes, own: pd.DataFrame) -> None:
    """Slopes of N and of N^2 through the lowest and the highest point on the left."""
    lengths = sorted(own[N].unique())
    first = own[own[N] == lengths[0]]["mib"]
    if len(lengths) < 2 or not first.min() > 0:
        return
    grown = lengths[-1] / lengths[0]
    for start, power, text in ((first.min(), 1, "N"), (first.max(), 2, "N²")):
        end = start * grown**power
        axes.plot([lengths[0], lengths[-1]], [start, end], color=GREY, linewidth=0.5, linestyle=":", zorder=0)
        axes.annotate(text, (lengths[-1], end), (3, 0), **_beside(GREY) | {"ha": "left", "va": "center"})


def _beside(shade: str) -> dict[str, Any]:
    return {"textcoords": "offset points", "fontsize": SMALL, "color": shade, "ha": "center"}


def _inside(ha: str, va: str) -> dict[str, Any]:
    return _beside(GREY) | {"xycoords": "axes fraction", "ha": ha, "va": va}


CHAPTERS = (
    Chapter(
        place=120,
        study="speed_prefill",
        title="Speed and memory over the sequence length",
        question="How fast is each kernel, how much memory does it need, and what does its speed cost in accuracy?",
        measured="The same number of tokens, and of columns of all heads, at every $N$; times by CUDA events with inputs in "
        "memory, without the host's share.",
        paper="Tiled attention moves $Theta(N^2 d^2 \\/ M)$ elements where vanilla attention moves $Theta(N d + N^2)$ (Dao et "
        "al. 2022, Theorem 2).",
    ),
    Chapter(
        place=130,
        study="speed_decode",
        title="Speed of one query",
        question="What bandwidth does each kernel reach with one query per sequence, where reading keys and values is all "
        "there is?",
        measured="One query for each sequence; query heads share KV heads. Times by CUDA events with inputs in memory, "
        "without the host's share.",
        paper="With few queries parallelism must come from splitting the keys (Dao 2023, section 3.2).",
    ),
    Chapter(
        place=140,
        study="speed_cpu",
        title="Vanilla and tiled attention on a CPU",
        question="What does tiling gain without a fused kernel?",
        measured="`tiled` is the emulation in pure tensors.",
        paper="Vanilla attention holds $Theta(N^2)$ scores, tiled attention none of them (Dao et al. 2022).",
    ),
)
