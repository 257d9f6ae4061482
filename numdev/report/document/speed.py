"""The report of speed studies, made from their results: tables and figures. Nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.measurement.deviation.metrics import METRICS
from numdev.measurement.speed.columns import SHAPE, derived, shape_text
from numdev.report.document.export import environments, to_csv
from numdev.report.document.tables import failures_table
from numdev.report.figures.style import to_png, to_svg
from numdev.report.reading.columns import dictionary
from numdev.report.reading.configuration import settings
from numdev.report.reading.frames import COMPARISON, LABEL, Results, load
from numdev.report.statistics.estimates import significant
from numdev.report.studies.speed import SPEED_FIGURES
from numdev.results.store import Store, write_atomically

SERIES = "series"
_NOT_HERE = {*COMPARISON, "max_index", *METRICS} - {"seed", "rmse", "max_difference", "max_u"}


def make_speed_report(results: Path, out: Path, console: Console | None = None) -> None:
    """Write speed.csv, crossover.csv, unsupported.csv, columns.md, environment.json and figures of all speed studies into `out`.

    Raises:
        BadInput: if there are no results.
        StoreError: if a file cannot be written.
    """
    console = console or Console()
    loaded = load(Store(results), kind="speed")
    rows = frame(loaded)
    crossing = crossovers(rows)
    failed = loaded.points[loaded.points["status"] != "ok"]
    labels = [name for name in failed.columns if name.startswith(LABEL)]
    tables = {
        "speed.csv": rows,
        "crossover.csv": crossing,
        "unsupported.csv": failed[["study", "scenario", "key", "attention", *labels, "status", "reason"]],
    }
    for name, table in tables.items():
        write_atomically(out / name, to_csv(table))
    write_atomically(
        out / "columns.md",
        dictionary(
            {name: table.columns for name, table in tables.items()}, loaded.columns | settings(loaded.manifests.values())
        ).encode(),
    )
    write_atomically(out / "environment.json", environments(loaded))
    draw(loaded, rows, out / "figures")
    for note in loaded.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    for shown in (failures_table(loaded), _latest_table(rows), _traffic_table(rows), _crossing_table(crossing)):
        if shown is not None:
            console.print(shown)
    console.print(f"report: {out}", markup=False, highlight=False)


def frame(results: Results) -> pd.DataFrame:
    """One row per point and replicate of studies of speed, with what follows from the figures; `series` names what is measured.

    Derived figures are those of `numdev.measurement.speed.columns.derived`, and `phase`: `decode` for one query, else `prefill`.
    """
    own = [name for name, manifest in results.manifests.items() if manifest["kind"] == "speed"]
    rows = results.rows[results.rows["study"].isin(own)].drop(columns=[name for name in results.rows if name in _NOT_HERE])
    if rows.empty:
        return rows.iloc[:0].assign(phase="", series="")
    derive = [derived({str(name): value for name, value in row.items()}) for row in rows.to_dict("records")]
    found = pd.DataFrame(derive).astype(rows.dtypes.to_dict())
    label = found[f"{LABEL}kernel"] if f"{LABEL}kernel" in found else found["attention"]
    phase = found["problem.shape.queries"].map(lambda queries: "decode" if queries == 1 else "prefill")
    return found.assign(phase=phase, **{SERIES: label.fillna(found["attention"])})


def crossovers(rows: pd.DataFrame) -> pd.DataFrame:
    """The number of keys from which a tiled algorithm is faster than vanilla attention, for each of them and each shape.

    `crossover` is where the two lines cross between measured lengths, straight on log axes; the least measured length where
    the tiled one is faster everywhere (`from_the_start`); NaN where it is not faster at the longest.
    """
    columns = ["study", *SHAPE, SERIES, "crossover", "from_the_start", "longest", "times_at_longest"]
    return pd.DataFrame(list(_crossovers(rows)), columns=columns)


def _crossovers(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    if rows.empty:
        return
    for place, group in rows.groupby(["study", *SHAPE], sort=False, dropna=False):
        vanilla = _times(group[group["attention"] == "vanilla"])
        for name, own in group[group["algorithm"] == "tiled"].groupby(SERIES, sort=False):
            pairs = [(n, vanilla[n] / time) for n, time in _times(own).items() if n in vanilla]
            if pairs:
                head = dict(zip(["study", *SHAPE], place, strict=True))
                yield head | {SERIES: name} | _crossing(pairs)


def _times(rows: pd.DataFrame) -> dict[int, float]:
    """The median latency over replicates at each number of keys, ascending."""
    medians = rows.groupby("problem.shape.keys", sort=True)["latency"].median()
    return {int(str(n)): float(time) for n, time in medians.items()}


def _crossing(pairs: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Finds the crossover in pairs (N, speed-up) in ascending order of N."""
    longest, times = pairs[-1]
    found = {"longest": longest, "times_at_longest": times, "from_the_start": False}
    slower = [i for i, (_, ratio) in enumerate(pairs) if ratio <= 1]
    if not slower:
        return found | {"crossover": float(pairs[0][0]), "from_the_start": True}
    last = slower[-1]
    if last == len(pairs) - 1:
        return found | {"crossover": math.nan}
    (n0, r0), (n1, r1) = pairs[last], pairs[last + 1]
    share = -math.log(r0) / (math.log(r1) - math.log(r0))
    return found | {"crossover": n0 * (n1 / n0) ** share}


def draw(loaded: Results, rows: pd.DataFrame, folder: Path) -> None:
    """The figures of every speed study as PNG and SVG."""
    for study in loaded.manifests:
        own = rows[rows["study"] == study]
        for name, plot in SPEED_FIGURES.items() if len(own) else ():
            figure = plot(own)
            write_atomically(folder / f"{study}_{name}.png", to_png(figure))
            write_atomically(folder / f"{study}_{name}.svg", to_svg(figure, plot.title, plot.alt))


_PLACE = ("study", "shape", "N", "attention")


def _longest(rows: pd.DataFrame, figures: list[str]) -> Iterator[tuple[tuple[str, ...], Mapping[str, float]]]:
    """At the greatest length of each shape, of each attention: its `_PLACE`, and the medians of some figures."""
    for place, group in rows.groupby(["study", *SHAPE], sort=False, dropna=False):
        n = group["problem.shape.keys"].max()
        for name, own in group[group["problem.shape.keys"] == n].groupby(SERIES, sort=False):
            shape = _shape(dict(zip(SHAPE, place[1:], strict=True)))
            yield (str(place[0]), shape, str(n), str(name)), {str(k): float(v) for k, v in own[figures].median().items()}


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """Speed, memory and deviation at the greatest length of each shape, as text."""
    found = []
    for place, mean in _longest(rows, ["latency", "tflops", "share", "peak_bytes", "rmse"]):
        figures = (f"{1e3 * mean['latency']:.3g} ms", significant(mean["tflops"], 3), f"{100 * mean['share']:.0f} %")
        found.append((*place, *figures, _mebibytes(mean["peak_bytes"]), significant(mean["rmse"], 3)))
    columns = (*_PLACE, "time", "TFLOP/s", "of matmul", "peak memory", "RMSE")
    return pd.DataFrame(found, columns=list(columns))


def traffic(rows: pd.DataFrame) -> pd.DataFrame:
    """Bytes by the cost model and by the GPU's counters at the greatest length of each shape, as text; none without counters."""
    names = ["model_bytes", "l2_bytes", "l2_over_model", "dram_read_bytes", "dram_write_bytes"]
    found = []
    for place, mean in _longest(rows, names) if "l2_bytes" in rows else ():
        if not math.isnan(mean["l2_bytes"]):
            model, cache, ratio, read, written = (mean[name] for name in names)
            figures = (_mebibytes(model), _mebibytes(cache), _known(f"{ratio:.2f}", ratio), _mebibytes(read), _mebibytes(written))
            found.append((*place, *figures))
    columns = (*_PLACE, "model", "second-level cache", "over model", "memory read", "memory written")
    return pd.DataFrame(found, columns=list(columns))


def _known(text: str, value: float) -> str:
    return "" if math.isnan(value) else text


def _mebibytes(value: float) -> str:
    return _known(f"{value / 2**20:.3g} MiB", value)


def _latest_table(rows: pd.DataFrame) -> Table | None:
    return _shown(latest(rows), "At the greatest length")


def _traffic_table(rows: pd.DataFrame) -> Table | None:
    return _shown(traffic(rows), "Bytes moved at the greatest length, by the cost model and by the GPU's counters")


def _shown(found: pd.DataFrame, title: str) -> Table | None:
    if found.empty:
        return None
    table = Table(*found.columns, title=title, title_justify="left")
    for row in found.itertuples(index=False):
        table.add_row(*row)
    return table


def _shape(shape: Mapping[Any, Any]) -> str:
    return f"{shape['scenario.title']}: {shape_text(shape)}"


def _crossing_table(crossing: pd.DataFrame) -> Table | None:
    if crossing.empty:
        return None
    title = "From which number of keys a tiled algorithm is faster than vanilla attention"
    table = Table("study", "shape", "attention", "crossover", "at the longest", title=title, title_justify="left")
    for row in crossing.to_dict("records"):
        where = "never" if math.isnan(row["crossover"]) else f"{row['crossover']:.0f}"
        where = f"≤ {where}" if row["from_the_start"] else where
        table.add_row(row["study"], _shape(row), row[SERIES], where, Text(f"{row['times_at_longest']:.2f} times"))
    return table
