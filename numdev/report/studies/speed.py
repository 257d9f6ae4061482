"""The speed of attention: a table by shape, and figures of speed and memory over N."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from numdev.measurement.metrics import METRICS
from numdev.report.figures.plot import Plot, draw
from numdev.report.reading.frames import COMPARISON, Results
from numdev.report.statistics import significant
from numdev.report.studies import TEXTS
from numdev.report.studies.attention import LENGTH as N
from numdev.report.studies.kernels import KERNEL

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


def of_attention(results: Results, study: str = "") -> pd.DataFrame:
    """The rows of `frame` that are of attention, of one study where it is named."""
    rows = frame(results)
    return rows[(rows["operation"] == "attention") & (rows["study"].eq(study) | (not study))]


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians of speed, memory and deviation at the greatest length of each shape, of each attention, as text."""
    lines = []
    for (study, *place), group in rows.groupby(["study", *SHAPE], sort=False, dropna=False) if len(rows) else ():
        n = group[N].max()
        for name, own in group[group[N] == n].groupby(NAME, sort=False):
            median = own[["latency", "tflops", "share", "peak_bytes", "rmse"]].median()
            figures = (f"{1e3 * median['latency']:.3g} ms", significant(median["tflops"], 3), f"{100 * median['share']:.0f} %")
            memory = "" if math.isnan(median["peak_bytes"]) else f"{median['peak_bytes'] / 2**20:.3g} MiB"
            where = (study, _titled(dict(zip(SHAPE, place, strict=True))), str(n), name)
            lines.append((*where, *figures, memory, significant(median["rmse"], 3)))
    columns = ["study", "shape", "N", "attention", "time", "TFLOP/s", "of matmul", "peak memory", "RMSE"]
    return pd.DataFrame(lines, columns=columns)


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
