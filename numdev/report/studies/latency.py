"""What studies of the speed of attention say: figures by shape, crossovers with vanilla attention, and traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from numdev.measurement.deviation.metrics import METRICS
from numdev.measurement.speed.columns import derived
from numdev.report.reading.frames import COMPARISON, Results
from numdev.report.statistics.estimates import significant
from numdev.report.studies.entries import KERNEL, ROLE
from numdev.results.manifest import EntryRole

N, SERIES = "problem.shape.keys", "series"
OPERATION = "attention"
_NOT_HERE = {*COMPARISON, "max_index", *METRICS} - {"seed", "rmse", "max_difference", "max_u"}

SHAPE = (
    *("scenario", "scenario.title", "phase", "format", "problem.shape.head_dim", "problem.shape.heads", "problem.shape.kv_heads"),
    *("problem.mask.causal", "problem.mask.window"),
)
"""What measurements have in common that lie on one line over N, but for what is measured."""


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


def frame(results: Results) -> pd.DataFrame:
    """One row per point and replicate of studies of speed, with what follows from the figures; `series` names what is measured.

    Derived figures are those of `numdev.measurement.speed.columns.derived`, and of attention `phase`: `decode` for one query,
    else `prefill`.
    """
    own = [name for name, manifest in results.manifests.items() if manifest["kind"] == "speed"]
    every = results.primary
    names = [name for name in every.columns if name not in _NOT_HERE]
    rows = every.frame(every.column("study").isin(own).to_numpy(dtype=bool), names)
    if rows.empty:
        return rows.iloc[:0].assign(phase="", series="", operation="")
    derive = [derived({str(name): value for name, value in row.items()}) for row in rows.to_dict("records")]
    found = pd.DataFrame(derive).astype(rows.dtypes.to_dict())
    name = found["attention"] if "attention" in found else pd.Series("", found.index)
    label = found.get(KERNEL, name)
    measured = results.points.drop_duplicates("key").set_index("key")["operation"]
    queries = found["problem.shape.queries"] if "problem.shape.queries" in found else pd.Series(pd.NA, found.index)
    phase = queries.map(lambda count: "" if pd.isna(count) else "decode" if count == 1 else "prefill")
    return found.assign(phase=phase, operation=found["key"].map(measured), **{SERIES: label.fillna(name)})


def of_attention(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `frame` that are of attention."""
    return rows[rows["operation"] == OPERATION]


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
        vanilla = _times(group[_is_vanilla(group)])
        for name, own in group[group["algorithm"] == "tiled"].groupby(SERIES, sort=False):
            pairs = [(n, vanilla[n] / time) for n, time in _times(own).items() if n in vanilla]
            if pairs:
                head = dict(zip(["study", *SHAPE], place, strict=True))
                yield head | {SERIES: name} | _crossing(pairs)


def _is_vanilla(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are of what the others are held against: the control that the study declares, else vanilla attention."""
    declared = rows[ROLE] == EntryRole.CONTROL.value if ROLE in rows else pd.Series(data=False, index=rows.index)
    return declared if bool(declared.any()) else rows["attention"] == "vanilla"


def _times(rows: pd.DataFrame) -> dict[int, float]:
    """The median latency over replicates at each number of keys, ascending."""
    medians = rows.groupby(N, sort=True)["latency"].median()
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


_PLACE = ("study", "shape", "N", "attention")


def _longest(rows: pd.DataFrame, figures: list[str]) -> Iterator[tuple[tuple[str, ...], Mapping[str, float]]]:
    """At the greatest length of each shape, of each attention: its `_PLACE`, and the medians of some figures."""
    if rows.empty:  # of another operation, whose rows have no columns of shapes
        return
    for place, group in rows.groupby(["study", *SHAPE], sort=False, dropna=False):
        n = group[N].max()
        for name, own in group[group[N] == n].groupby(SERIES, sort=False):
            shape = shape_of(dict(zip(SHAPE, place[1:], strict=True)))
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


def shape_of(shape: Mapping[Any, Any]) -> str:
    return ": ".join(part for part in (shape["scenario.title"], shape_text(shape)) if part)


def crossings(rows: pd.DataFrame) -> pd.DataFrame:
    """`crossovers` as text."""
    found = []
    for row in crossovers(rows).to_dict("records"):
        where = "never" if math.isnan(row["crossover"]) else f"{row['crossover']:.0f}"
        where = f"≤ {where}" if row["from_the_start"] else where
        found.append((row["study"], shape_of(row), row[SERIES], where, f"{row['times_at_longest']:.2f} times"))
    return pd.DataFrame(found, columns=["study", "shape", "attention", "crossover", "at the longest"])


TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "At the greatest length": latest,
    "Bytes moved at the greatest length, by the cost model and by the GPU's counters": traffic,
    "From which number of keys a tiled algorithm is faster than vanilla attention": crossings,
}
"""What the report of speed prints, by title."""
