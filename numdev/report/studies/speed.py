"""The speed of attention: tables by shape, crossovers with vanilla attention, and figures of speed and memory over N."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from numdev.measurement.metrics import METRICS
from numdev.report.figures.plot import Plot, draw
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


def throughput(rows: pd.DataFrame) -> Figure:
    """Operations per second over N; for one query, where memory is the limit, bytes per second that no algorithm can avoid."""
    if (rows["phase"] == "decode").all():
        return _over_n(rows, "bandwidth", "q, k, v and O, GB/s")
    return _over_n(rows, "tflops", "TFLOP/s")


def memory(rows: pd.DataFrame) -> Figure:
    """The most memory that a call takes beyond its inputs, its result among it, over N.

    Per batch entry, since a study may keep the number of tokens.
    """
    held = rows.assign(mib=rows["peak_bytes"] / rows["problem.shape.batch"] / 2**20)
    return _over_n(held, "mib", "peak memory beyond the inputs, MiB per sequence")


def _over_n(rows: pd.DataFrame, column: str, text: str) -> Figure:
    """A line for each attention, a panel for each scenario and shape."""
    name = _titled if rows["scenario"].nunique() > 1 else shape_text
    own = rows.assign(shape=[name(shape) for shape in rows[list(SHAPE)].to_dict("records")])
    return draw(own, x=N, y={text: column}, colour=[NAME], facet=["shape"], text=("keys, or sequence length N", text))


SPEED_FIGURES = {draws.__name__: Plot(draws, **TEXTS["speed"][draws.__name__]) for draws in (throughput, memory)}
