"""The speed of attention: tables by shape, crossovers with vanilla attention, and figures of speed and memory over N."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.measurement.metrics import METRICS
from numdev.report.figures.marks import at_least_a_decade, grid, legend, log_y, plain_ticks, swatch
from numdev.report.figures.plot import Plot
from numdev.report.figures.theme import BLACK, GREY, SERIES, SMALL
from numdev.report.reading.frames import COMPARISON, Results
from numdev.report.statistics import significant
from numdev.report.studies import TEXTS
from numdev.report.studies.attention import LENGTH as N
from numdev.report.studies.kernels import KERNEL, ROLE
from numdev.results.manifest import EntryRole

NAME = "series"  # the column that says what is measured
_NOT_HERE = {*COMPARISON, "max_index", *METRICS} - {"seed", "rmse", "max_difference", "max_u"}

SHAPE = (
    *("scenario", "scenario.title", "phase", "format", "problem.shape.head_dim", "problem.shape.heads", "problem.shape.kv_heads"),
    *("problem.mask.causal", "problem.mask.window"),
)
"""The columns that measurements on one line over N have in common, beside `series`."""


def shape_text(shape: Mapping[Any, Any]) -> str:
    """The values of `SHAPE`, in few words: `d = 64, causal, bf16, 32 heads`."""
    window = shape["problem.mask.window"]
    windowed = "" if window is None or math.isnan(window) else f"window {window:g}"  # NaN where a table has none
    causal = "causal" if shape["problem.mask.causal"] else ""
    mask = " ".join(part for part in (causal, windowed) if part) or "no mask"
    heads, kv_heads = shape["problem.shape.heads"], shape["problem.shape.kv_heads"]
    counted = "1 head" if heads == 1 else f"{heads} heads"
    grouped = counted if heads == kv_heads else f"{counted} on {kv_heads}"
    return f"d = {shape['problem.shape.head_dim']}, {mask}, {shape['format']}, {grouped}"


def _titled(shape: Mapping[Any, Any]) -> str:
    return ": ".join(part for part in (shape["scenario.title"], shape_text(shape)) if part)


def frame(results: Results) -> pd.DataFrame:
    """One row per point and replicate of studies of speed, with derived figures; `series` names what is measured.

    Of attention `phase` is `decode` for one query, else `prefill`.
    """
    own = [name for name, manifest in results.manifests.items() if manifest["kind"] == "speed"]
    rows = results.primary.frame(names=[name for name in results.primary.columns if name not in _NOT_HERE])
    rows = rows[rows["study"].isin(own)]
    if rows.empty:
        return rows.iloc[:0].assign(phase="", series="", operation="")
    name = rows["attention"] if "attention" in rows else pd.Series("", rows.index)
    operation = results.points.drop_duplicates("key").set_index("key")["operation"]
    queries = rows["problem.shape.queries"] if "problem.shape.queries" in rows else pd.Series(pd.NA, rows.index)
    phase = queries.map(lambda count: "" if pd.isna(count) else "decode" if count == 1 else "prefill")
    label = rows.get(KERNEL, name).fillna(name)
    return rows.assign(phase=phase, operation=rows["key"].map(operation), **{NAME: label})


def of_attention(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `frame` that are of attention."""
    return rows[rows["operation"] == "attention"]


def crossovers(rows: pd.DataFrame) -> pd.DataFrame:
    """The number of keys from which a tiled algorithm is faster than vanilla attention, for each of them and each shape.

    `crossover` is where the two lines cross between measured lengths, straight on log axes; the least measured length where
    the tiled one is faster everywhere (`from_the_start`); NaN where it is not faster at the longest.
    """
    columns, lines = ["study", *SHAPE, NAME, "crossover", "from_the_start", "longest", "times_at_longest"], []
    for place, group in _shapes(rows):
        # The others are held against the control that the study declares, or else against vanilla attention.
        declared = group[ROLE] == EntryRole.CONTROL.value if ROLE in group else pd.Series(data=False, index=group.index)
        vanilla = _times(group[declared if bool(declared.any()) else group["attention"] == "vanilla"])
        for name, own in group[group["algorithm"] == "tiled"].groupby(NAME, sort=False):
            pairs = [(n, vanilla[n] / time) for n, time in _times(own).items() if n in vanilla]
            lines += [place | {NAME: name} | _crossing(pairs)] if pairs else []
    return pd.DataFrame(lines, columns=columns)


def _shapes(rows: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The rows of each study and shape; none of another operation, whose rows have no columns of shapes."""
    if len(rows):
        for place, group in rows.groupby(["study", *SHAPE], sort=False, dropna=False):
            yield dict(zip(["study", *SHAPE], place, strict=True)), group


def _times(rows: pd.DataFrame) -> dict[int, float]:
    """The median latency over replicates at each number of keys, ascending."""
    medians = rows.groupby(N, sort=True)["latency"].median()
    return {int(str(n)): float(time) for n, time in medians.items()}


def _crossing(pairs: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Finds the crossover in pairs (N, speed-up) in ascending order of N."""
    longest, times = pairs[-1]
    at = {"longest": longest, "times_at_longest": times, "from_the_start": False}
    slower = [i for i, (_, speedup) in enumerate(pairs) if speedup <= 1]
    if not slower:
        return at | {"crossover": float(pairs[0][0]), "from_the_start": True}
    last = slower[-1]
    if last == len(pairs) - 1:
        return at | {"crossover": math.nan}
    (n0, r0), (n1, r1) = pairs[last], pairs[last + 1]
    share = -math.log(r0) / (math.log(r1) - math.log(r0))
    return at | {"crossover": n0 * (n1 / n0) ** share}


_PLACE = ("study", "shape", "N", "attention")


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians of speed, memory and deviation at the greatest length of each shape, of each attention, as text."""
    lines = []
    for place, group in _shapes(rows):
        n = group[N].max()
        for name, own in group[group[N] == n].groupby(NAME, sort=False):
            median = own[["latency", "tflops", "share", "peak_bytes", "rmse"]].median()
            figures = (f"{1e3 * median['latency']:.3g} ms", significant(median["tflops"], 3), f"{100 * median['share']:.0f} %")
            where = (str(place["study"]), _titled(place), str(n), str(name))
            lines.append((*where, *figures, _mebibytes(median["peak_bytes"]), significant(median["rmse"], 3)))
    columns = (*_PLACE, "time", "TFLOP/s", "of matmul", "peak memory", "RMSE")
    return pd.DataFrame(lines, columns=list(columns))


def _mebibytes(value: float) -> str:
    return "" if math.isnan(value) else f"{value / 2**20:.3g} MiB"


def crossings(rows: pd.DataFrame) -> pd.DataFrame:
    """`crossovers` as text."""
    lines = []
    for row in crossovers(rows).to_dict("records"):
        where = "never" if math.isnan(row["crossover"]) else f"{row['crossover']:.0f}"
        where = f"≤ {where}" if row["from_the_start"] else where
        lines.append((row["study"], _titled(row), row[NAME], where, f"{row['times_at_longest']:.2f} times"))
    return pd.DataFrame(lines, columns=["study", "shape", "attention", "crossover", "at the longest"])


TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "At the greatest length": latest,
    "From which number of keys a tiled algorithm is faster than vanilla attention": crossings,
}
"""The tables that the report of speed prints, by title."""

_CONTROL, _ASIDE = (GREY, "s"), (BLACK, "D")
_SUBJECTS = tuple(zip(SERIES, "^v<>oXP", strict=True))
_WORDS: dict[str, Any] = {"textcoords": "offset points", "fontsize": SMALL, "color": GREY}
Looks = Mapping[str, tuple[str, str]]


def looks(rows: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Colour and marker of each attention: those of its role in the study, and of its place among the subjects."""
    roles = rows[ROLE] if ROLE in rows else pd.Series(None, rows.index, dtype="str")
    declared = dict(zip(rows[NAME], roles, strict=True))
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
    seen = looks(rows)
    inside = _WORDS | {"xycoords": "axes fraction"}

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        common = own.groupby(N)[NAME].nunique()
        n = int(str(common[common == common.max()].index.max()))
        axes.annotate(f"N = {n}", (1, 1), (0, -2), ha="right", va="top", **inside)
        middle = own[own[N] == n].groupby(NAME, sort=False)[["tflops", "rmse"]].median()
        inexact = middle[middle["rmse"] > 0]
        if len(inexact) < len(middle):
            words = f"{len(middle) - len(inexact)} without a deviation"
            axes.annotate(words, (0, 0), (2, 2), ha="left", va="bottom", **inside)
        for name, (x, y) in inexact.iterrows():
            shade, marker = seen[str(name)]
            axes.plot(x, y, marker=marker, color=shade, linestyle="", markersize=5, label=str(name))
        axes.margins(x=0.2)
        low, high = (inexact["rmse"].min() / 1.5, inexact["rmse"].max() * 1.5) if len(inexact) else (0.1, 1.0)
        log_y(axes, *at_least_a_decade(low, high))

    return _panels(rows, draw, ("TFLOP/s", "RMSE of O from golden, absolute"), sharey=False, over_n=False)


SPEED_FIGURES = {draw.__name__: Plot(draw, **TEXTS["speed"][draw.__name__]) for draw in (throughput, memory, tradeoff)}


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
    firsts = [group.iloc[0].to_dict() for group in groups]
    heads = [f"{first['scenario.title']}: " if rows["scenario"].nunique() > 1 else "" for first in firsts]
    titles = [f"{head}{shape_text(first)}" for head, first in zip(heads, firsts, strict=True)]
    figure, panels = grid(titles, 2, 2.3, texts, sharey=sharey)
    for axes, own in zip(panels, groups, strict=True):
        draw(axes, own)
        if over_n:
            plain_ticks(axes, own[N].unique().astype(float).tolist())
    keys = {name: swatch(shade, marker, linestyle="-") for name, (shade, marker) in looks(rows).items()}
    legend(figure, keys, min(len(keys), 5 if len(groups) > 1 else 3), "outside upper center")
    return figure


def _lines(axes: Axes, own: pd.DataFrame, column: str, seen: Looks) -> None:
    for name, group in own.groupby(NAME, sort=False):
        shade, marker = seen[str(name)]
        table = group.groupby(N, sort=True)[[column, "latency", "latency_low", "latency_high"]].median()
        value, spread = table[column], None
        if column in ("tflops", "bandwidth"):  # in proportion to 1 / latency
            high, low = value * table["latency"] / table["latency_low"], value * table["latency"] / table["latency_high"]
            spread = [value - low, high - value]
        axes.errorbar(table.index, value, yerr=spread, color=shade, marker=marker, capsize=1.5, label=str(name))


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
        axes.annotate(text, (lengths[-1], end), (3, 0), ha="left", va="center", **_WORDS)
