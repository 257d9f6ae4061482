"""Shows points, as they are measured, timed or trained, and studies on a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from numdev.cli import build
from numdev.cli.compose import Request, written
from numdev.cli.jobs import status_text
from numdev.measurement.deviation.measurement import COUNTERS
from numdev.measurement.speed.columns import FOLLOWING, derived
from numdev.report.statistics import Interval, mean, ratio, significant
from numdev.results.record import Column, Record, Status, Use, points_by_kernel, summary
from numdev.results.store import Store
from numdev.results.study import Outcome, Replaced

_SIZE = "problem.n"
_USUAL = "default"  # an option of this name says nothing that a reader does not expect
_COLUMNS = {
    ("variant", "golden"): "variant\nvs golden",
    ("variant", "golden_same_inputs"): "vs golden of\nsame inputs",
    ("variant", "baseline"): "variant\nvs baseline",
    ("baseline", "golden"): "baseline\nvs golden",
}
_OF_OTHERS = 2  # chief figures of each output but the primary one, so that a point fits a screen of 24 lines
_CHIEF_OF_SPEED = (
    *("latency", "latency_low", "latency_high", "tflops", "share", "bandwidth"),
    *("peak_bytes", "temporary_bytes", "max_difference", "rmse", "max_u"),
)
_MORE = "metrics=all prints every metric"
_LEFT: dict[str, Any] = {"title_justify": "left", "caption_justify": "left", "box": SIMPLE_HEAD, "padding": (0, 1, 0, 0)}


class Metrics(Enum):
    """Which metrics of a point are printed."""

    CHIEF = "chief"
    ALL = "all"


@dataclass(frozen=True)
class PointNames:
    """A point by the names that the user knows.

    Attributes:
        line: groups, the size of the problem and every stated setting, as overrides.
        variant: the option that is measured, such as `tiled`.
        baseline: the option of the baseline, such as `eager`.
    """

    line: str
    variant: str
    baseline: str

    @classmethod
    def of(cls, request: Request) -> PointNames:
        """The names of what a request measures."""
        read, variant = build.reads(request), build.kind_of(request)
        shown = {variant.partition("=")[0]: variant} if "=" in variant else {}
        groups = {name.partition(".")[0] for name in read} - {"baseline"}
        said = {one.name for one in request.said.values()}
        for group, option in request.options.items():
            if group in said or (group in groups and option != _USUAL):
                shown.setdefault(group, f"{group}={option}")
        if _SIZE in request.raw:
            shown[_SIZE] = f"{_SIZE}={written(build.at(request.config, _SIZE))}"
        for one in request.said.values():
            shown.setdefault(one.name, str(one))
        return cls(" ".join(shown.values()), variant.rpartition("=")[2], request.options.get("baseline", "baseline"))


def point(
    console: Console, record: Record, path: Path, names: PointNames, *, already: bool, metrics: Metrics = Metrics.CHIEF
) -> None:
    """One point: what was measured, its chief figures or all of them, how it ended, and where its record lies."""
    console.print(names.line, style="bold", markup=False)
    if record.rows:
        if record.reason:
            console.print(f"{record.reason[0].upper()}{record.reason[1:]}.", style="red", markup=False)
        body = {"speed": _speed, "training": _training}.get(record.kind, _deviation)
        for part in body(record, names, metrics):
            console.print(part, markup=False)
    seeds = record.config["seeds"]
    line = Text.assemble(status_text(record.status), f", {seeds} replicate{'s' * (seeds != 1)}, {record.seconds:.2f} s")
    line.append(f": {record.reason}" if record.reason and not record.rows else "")
    line.append("; already measured (fresh=true measures again)" if already else "")
    console.print(line)
    console.print(f"record {record.key} in {path}", style="dim", soft_wrap=True)


def cells(record: Record) -> tuple[str, ...]:
    """The figures of one point of a sweep, as `numdev.cli.jobs.HEADINGS` names them."""
    if not record.rows:
        return ()
    return {"speed": _speed_cells, "training": _training_cells}.get(record.kind, _deviation_cells)(record)


def outcome(name: str, done: Outcome) -> Text:
    """The result of a run of a study, in one line; of compiled code of numdev it names how many points it ran."""
    parts = [f"{done.measured} measured in {done.seconds:.1f} s"]
    if done.skipped:
        parts.append(f"{done.skipped} already there")
    parts += [f"{count} by {kernel}" for kernel, count in points_by_kernel(done.kernels).items()]
    ended = Counter(status for _, status, _ in done.failures)
    parts += [f"{ended[status]} {status.value}" for status in Status if status in ended]
    count = done.measured + done.skipped
    return Text.assemble((name, "bold"), f": {count} point{'s' * (count != 1)}, ", ", ".join(parts))


def replaced(name: str, lost: Replaced, store: Store) -> Text:
    """Say that reports will no longer show some points, as this run redefines the points of the study."""
    here = f"{lost.ours} point{'s' * (lost.ours != 1)}, {lost.shared or 'none'} of them among those"
    hint = "reports will show these. Use another results= to keep both."
    return Text(f"note: {store.path} holds {name} with {lost.stored} points, this run has {here}; {hint}")


def failures(failed: Iterable[tuple[str, Status, str]]) -> Table:
    """Every point that did not end well."""
    table = Table("point", "status", "reason", title="points that are not ok", title_justify="left", box=SIMPLE_HEAD)
    for text, ended, reason in failed:
        table.add_row(Text(text), Text(*status_text(ended)), Text(reason))
    return table


def _table(title: str | None, header: Sequence[str], rows: Iterable[tuple[str, ...]], figures: int, caption: str = "") -> Table:
    """A table whose columns from `figures` on are numbers."""
    table = Table(title=title or None, caption=caption or None, **_LEFT)
    for i, name in enumerate(header):
        is_number = i >= figures and name != "meaning"
        table.add_column(name, justify="right" if is_number else "left", vertical="bottom", no_wrap=name in ("metric", "unit"))
    for row in rows:
        table.add_row(*row)
    return table


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _compared(record: Record) -> tuple[str, Interval, Interval | None, Interval | None]:
    """The first chief figure of the primary output from golden: its name, of variant, of baseline, and their ratio."""
    metric = next(column.name for column in record.primary if column.use is Use.CHIEF)
    values: dict[str, list[Any]] = {}
    for subject in ("variant", "baseline"):
        place = (subject, "golden", record.outputs[0])
        rows = [row for row in record.rows if (row["subject"], row["reference"], row["output"]) == place]
        rows.sort(key=lambda row: int(row["seed"]))
        values[subject], values[f"{subject} clusters"] = [row[metric] for row in rows], [row["cluster"] for row in rows]
    clusters = values["variant clusters"]
    variant = mean(values["variant"], clusters=clusters)
    if not values["baseline"]:
        return metric, variant, None, None
    baseline = mean(values["baseline"], clusters=values["baseline clusters"])
    return metric, variant, baseline, ratio(values["variant"], values["baseline"], clusters=clusters)


def sentences(record: Record, variant: str, baseline: str) -> list[str]:
    """How far variant and baseline lie from golden, and their ratio, a line each, by the names that the user has for the two.

    No verdict follows from an output that holds NaN or Inf, or zeros alone; `record.reason` says how many.
    """
    metric, of_variant, of_baseline, quotient = _compared(record)
    head = f"{metric} of {record.outputs[0]} from golden: {variant} {significant(of_variant.estimate, 3)}"
    if record.status is Status.NONFINITE:
        head = f"Of the other elements, {head}"
    if of_baseline is None or quotient is None:
        return [f"{head}, {_interval(of_variant)}."]
    return [
        f"{head}, baseline ({baseline}) {significant(of_baseline.estimate, 3)}.",
        f"{variant} / baseline = {_quotient(quotient, variant, judged=record.status is Status.OK)}.",
    ]


def _quotient(quotient: Interval, variant: str, *, judged: bool) -> str:
    excluded = f"{quotient.excluded} replicate{'s' * (quotient.excluded != 1)}"
    left_out = f"; {excluded} left out (a deviation is zero or not finite)" if quotient.excluded else ""
    if not quotient.count:
        return f"unknown{left_out}"
    text = f"{significant(quotient.estimate, 3)}, {_interval(quotient)}"
    if not judged:
        return f"{text}{left_out}; no verdict follows"
    if quotient.count == 1:
        return f"{text}{left_out}"
    if quotient.low == quotient.high == 1:
        return f"{text}: both deviate equally{left_out}"
    if quotient.outside(1.0, 1.0):
        return f"{text}: {variant} deviates {'more' if quotient.estimate > 1 else 'less'}{left_out}"
    return f"{text}: no difference is shown{left_out}"


def _interval(of: Interval) -> str:
    if of.count < 2:
        return "no interval from one replicate"
    return f"95 % interval {significant(of.low, 3)} to {significant(of.high, 3)}"


def _deviation_cells(record: Record) -> tuple[str, ...]:
    _, variant, baseline, quotient = _compared(record)
    if baseline is None or quotient is None:
        return significant(variant.estimate, 3), "", ""
    text = quotient.text() if quotient.count > 1 else significant(quotient.estimate, 3)
    judged = record.status is Status.OK  # no verdict follows from the elements that are left
    return significant(variant.estimate, 3), significant(baseline.estimate, 3), text if judged else ""


def _deviation(record: Record, names: PointNames, metrics: Metrics) -> Iterator[RenderableType]:
    """Sentences; of the chief metrics a table as narrow as a terminal of 80 columns, of all of them one for each output."""
    yield from sentences(record, names.variant, names.baseline)
    of_output = {output: _figures(record, output) for output in dict.fromkeys(row["output"] for row in record.rows)}
    if metrics is Metrics.CHIEF:
        yield Text(f"mean ± half its 95 % confidence interval; {_MORE}", style="italic")
        pairs = [pair for pair in _COLUMNS if any(pair in figures for figures in of_output.values())]
        chief = [column.name for column in record.primary if column.use is Use.CHIEF]
        table = Table("", "metric", *(_COLUMNS[pair] for pair in pairs), box=SIMPLE_HEAD, padding=0, show_edge=False)
        for i, column in enumerate(table.columns):
            column.no_wrap, column.vertical, column.justify = True, "bottom", "right" if i > 1 else "left"
        for output, figures in of_output.items():
            for name in chief if output == record.outputs[0] else chief[:_OF_OTHERS]:
                values = (figures.get(pair, {}).get(name, "").replace(" ± ", "±") for pair in pairs)
                table.add_row(output if name == chief[0] else "", name, *values)
        yield table
        return
    for output, figures in of_output.items():
        rows = ((one.name, one.unit, *(own[one.name] for own in figures.values())) for one in _measured(record))
        title = f"{output}: mean over replicates ± half its 95 % confidence interval"
        yield _table(title, ["metric", "unit", *(_COLUMNS[pair] for pair in figures)], rows, 2)
    counted, meanings = record.table(COUNTERS), {column.name: column.meaning for column in record.columns[COUNTERS]}
    names_of = [name for name in dict.fromkeys(name for row in counted for name in row) if name != "seed"]
    if names_of:
        means = {name: _mean_text(name, [float(row[name]) for row in counted if name in row]) for name in names_of}
        lines = ((name, means[name], meanings.get(name, "")) for name in names_of)
        yield _table("what the runs counted: mean over replicates", ["counter", "mean", "meaning"], lines, 3)


def _figures(record: Record, output: str) -> dict[tuple[str, str], dict[str, str]]:
    """Each figure of an output with its interval; of finite results NaN says only that it is not defined in a replicate."""
    figures: dict[tuple[str, str], dict[str, str]] = {}
    for pair in _COLUMNS:
        rows = [r for r in record.rows if r["output"] == output and (r["subject"], r["reference"]) == pair]
        for column in _measured(record) if rows else ():
            values = [float(row[column.name]) for row in rows]
            values = [value for value in values if not math.isnan(value)] if record.status is Status.OK else values
            figures.setdefault(pair, {})[column.name] = _mean_text(column.name, values)
    return figures


def _measured(record: Record) -> list[Column]:
    """The columns of figures."""
    return [column for column in record.primary if column.use in (Use.CHIEF, Use.FIGURE)]


def _mean_text(metric: str, values: list[float]) -> str:
    """The mean, and half the confidence interval where there are replicates that differ; nothing without values."""
    if not values:
        return ""
    of = summary(values)
    half = (of.high - of.low) / 2
    if metric == "cosine_similarity":  # the one that is close to 1
        text = f"{of.mean:.9f}"
    else:
        text = significant(of.mean, 3) if math.isfinite(of.mean) else f"{of.mean:g}"
    return text + (f" ± {significant(half, 1)}" if math.isfinite(half) and half else "")


def _speed(record: Record, names: PointNames, metrics: Metrics) -> Iterator[RenderableType]:
    """Time in words, and a table with a column for each replicate."""
    rows = [derived(row) for row in record.rows]
    ms, *rate, mib, rmse = _speed_cells(record)
    words = f"{rate[0]} TFLOP/s ({rate[1]} of a matrix product), " if rate[0] else ""
    yield f"{names.variant}: {ms} ms a call, {words}{mib} MiB, RMSE {rmse} from golden."
    is_chief = metrics is Metrics.CHIEF
    title = "; ".join(filter(None, [record.kernel, _MORE if is_chief else ""]))
    figures = {column.name: (column.unit, column.meaning) for column in record.primary if column.use is Use.FIGURE} | FOLLOWING
    shown = [name for name in (_CHIEF_OF_SPEED if is_chief else figures) if name in rows[0]]
    lines = ((name, figures[name][0], *(_text(row[name]) for row in rows), figures[name][1]) for name in shown)
    header = ["figure", "unit", *(f"seed {row['seed']}" for row in rows)]
    yield _table(title, header, (line[:-1] for line in lines), 2) if is_chief else _table(title, [*header, "meaning"], lines, 2)


def _speed_cells(record: Record) -> tuple[str, ...]:
    row = derived(record.rows[0])
    rate = (f"{row['tflops']:.3g}", f"{100 * row['share']:.0f} %") if math.isfinite(row["tflops"]) else ("", "")
    return f"{1e3 * row['latency']:.3g}", *rate, f"{row['peak_bytes'] / 2**20:.3g}", f"{row['rmse']:.2g}"


def _trained(record: Record) -> tuple[list[dict[str, Any]], int, Callable[[str, int], float]]:
    """The rows of the runs, the last step, and the mean of a figure of all weights at a step."""
    from numdev.training.weights import MODEL, RUN, WEIGHTS  # late: it imports every model

    weights = [row for row in record.table(WEIGHTS) if row["tensor"] == MODEL]

    def mean_at(name: str, step: int) -> float:
        return summary([row[name] for row in weights if row["step"] == step]).mean

    return record.table(RUN), int(max(row["step"] for row in weights)), mean_at


def _training(record: Record, _: PointNames, metrics: Metrics) -> Iterator[RenderableType]:
    """How far weights and losses differ from the reference's, and the figures over the steps."""
    from numdev.training.weights import RUN

    runs, last, mean_at = _trained(record)
    if all(row["same_bits"] for row in runs):
        yield f"After {last} steps the weights of the rung have the same bits as those of its reference."
    else:
        largest, relative = (mean_at(name, last) for name in ("max_difference", "relative_frobenius"))
        yield f"After {last} steps the weights differ from the reference's by up to {largest:.3g}, relative norm {relative:.3g}."
    names = ("held_out_loss", "baseline_held_out_loss", "seconds_per_step")
    ours, theirs, seconds = (summary([row[name] for row in runs]).mean for name in names)
    yield f"Loss on held-out data: {ours:.4g}, reference {theirs:.4g}; {seconds:.3g} s a step."
    is_chief = metrics is Metrics.CHIEF
    shown = [one.name for one in record.primary if one.use is Use.CHIEF or (one.use is Use.FIGURE and not is_chief)]
    title = "all weights of the rung against those of its reference: mean over replicates"
    steps = sorted({row["step"] for row in record.rows})
    lines = ((str(step), *(_text(mean_at(name, step)) for name in shown)) for step in steps)
    yield _table(title, ["step", *shown], lines, 0, _MORE if is_chief else "")
    if not is_chief:
        own = [one for one in record.columns[RUN] if one.use in (Use.FIGURE, Use.NOTE) and "checksum" not in one.name]
        values = ((one.name, one.unit, *(_text(row[one.name]) for row in runs), one.meaning) for one in own)
        yield _table(None, ["of the run", "unit", *(f"replicate {row['seed']}" for row in runs), "meaning"], values, 2)


def _training_cells(record: Record) -> tuple[str, ...]:
    runs, last, mean_at = _trained(record)
    differences = (f"{mean_at(name, last):.3g}" for name in ("max_difference", "relative_frobenius"))
    return str(last), *differences, "yes" if all(row["same_bits"] for row in runs) else "no"
