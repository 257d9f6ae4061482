"""Shows points, as they are measured, timed or trained, and studies on a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from numdev.cli import honoured, nodes
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
_LEFT: dict[str, Any] = {"title_justify": "left", "box": SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
Figures = dict[tuple[str, str], dict[str, str]]  # (subject, reference) to metric to text


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
        read, variant = honoured.reads(request), honoured.kind_of(request)
        shown = {variant.partition("=")[0]: variant} if "=" in variant else {}
        for group, option in request.options.items():
            is_read = any(name == group or name.startswith(f"{group}.") for name in read)
            is_said = any(one.name == group for one in request.said.values())
            if is_said or (is_read and group != "baseline" and option != _USUAL):
                shown.setdefault(group, f"{group}={option}")
        if _SIZE in request.raw:
            shown[_SIZE] = f"{_SIZE}={written(nodes.at(request.config, _SIZE))}"
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
    console.print(status(record, already=already))
    console.print(f"record {record.key} in {path}", style="dim", soft_wrap=True)


def status(record: Record, *, already: bool) -> Text:
    """How a point ended, in one line."""
    seeds = record.config["seeds"]
    line = Text.assemble(status_text(record.status))
    line.append(f", {seeds} replicate{'s' * (seeds != 1)}, {record.seconds:.2f} s")
    line.append(f": {record.reason}" if record.reason and not record.rows else "")
    line.append("; already measured (fresh=true measures again)" if already else "")
    return line


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


@dataclass(frozen=True)
class Compared:
    """The first chief figure of a record's primary output: from golden, of the variant and of the baseline, and their ratio."""

    metric: str
    output: str
    variant: Interval
    baseline: Interval | None
    quotient: Interval | None

    @classmethod
    def of(cls, record: Record) -> Compared:
        """The figure in the rows of a record; without a baseline it has no ratio."""
        metric, output = next(column.name for column in record.primary if column.use is Use.CHIEF), record.outputs[0]
        rows = {subject: _rows(record, subject, output) for subject in ("variant", "baseline")}
        values = {subject: [row[metric] for row in own] for subject, own in rows.items()}
        clusters = {subject: [row["cluster"] for row in own] for subject, own in rows.items()}
        variant = mean(values["variant"], clusters=clusters["variant"])
        if not rows["baseline"]:
            return cls(metric, output, variant, None, None)
        quotient = ratio(values["variant"], values["baseline"], clusters=clusters["variant"])
        return cls(metric, output, variant, mean(values["baseline"], clusters=clusters["baseline"]), quotient)


def _rows(record: Record, subject: str, output: str) -> list[Mapping[str, Any]]:
    own = (row for row in record.rows if (row["subject"], row["reference"], row["output"]) == (subject, "golden", output))
    return sorted(own, key=lambda row: int(row["seed"]))


def sentences(record: Record, variant: str, baseline: str) -> list[str]:
    """How far variant and baseline lie from golden, and their ratio, a line each, by the names that the user has for the two.

    No verdict follows from an output that holds NaN or Inf, or zeros alone; `record.reason` says how many.
    """
    one = Compared.of(record)
    head = f"{one.metric} of {one.output} from golden: {variant} {significant(one.variant.estimate, 3)}"
    if record.status is Status.NONFINITE:
        head = f"Of the other elements, {head}"
    if one.baseline is None or one.quotient is None:
        return [f"{head}, {_interval(one.variant)}."]
    return [
        f"{head}, baseline ({baseline}) {significant(one.baseline.estimate, 3)}.",
        f"{variant} / baseline = {_quotient(one.quotient, variant, judged=record.status is Status.OK)}.",
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
    one = Compared.of(record)
    if one.baseline is None or one.quotient is None:
        return significant(one.variant.estimate, 3), "", ""
    quotient = one.quotient.text() if one.quotient.count > 1 else significant(one.quotient.estimate, 3)
    if record.status is not Status.OK:
        quotient = ""  # no verdict follows from the elements that are left
    return significant(one.variant.estimate, 3), significant(one.baseline.estimate, 3), quotient


def _deviation(record: Record, names: PointNames, metrics: Metrics) -> Iterator[RenderableType]:
    yield from sentences(record, names.variant, names.baseline)
    if metrics is Metrics.ALL:
        yield from _every_metric(record)
    else:
        yield Text(f"mean ± half its 95 % confidence interval; {_MORE}", style="italic")
        yield _chief(record)


def _chief(record: Record) -> Table:
    """The chief figures of every output, as narrow as a terminal of 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    of_output = {output: _figures(record, output) for output in dict.fromkeys(row["output"] for row in record.rows)}
    pairs = [pair for pair in _COLUMNS if any(pair in figures for figures in of_output.values())]
    names = [column.name for column in record.primary if column.use is Use.CHIEF]
    table.add_column("", no_wrap=True)
    table.add_column("metric", vertical="bottom", no_wrap=True)
    for pair in pairs:
        table.add_column(_COLUMNS[pair], justify="right", no_wrap=True)
    for output, figures in of_output.items():
        for name in names if output == record.outputs[0] else names[:_OF_OTHERS]:
            values = (figures.get(pair, {}).get(name, "").replace(" ± ", "±") for pair in pairs)
            table.add_row(output if name == names[0] else "", name, *values)
    return table


def _every_metric(record: Record) -> Iterator[Table]:
    for output in dict.fromkeys(row["output"] for row in record.rows):
        figures = _figures(record, output)
        table = Table(title=f"{output}: mean over replicates ± half its 95 % confidence interval", **_LEFT)
        for header in ("metric", "unit"):
            table.add_column(header, vertical="bottom", no_wrap=True)
        for pair in figures:
            table.add_column(_COLUMNS[pair], justify="right")
        for column in _measured(record):
            table.add_row(column.name, column.unit, *(by_metric[column.name] for by_metric in figures.values()))
        yield table
    if any(len(counted) > 1 for counted in record.table(COUNTERS)):
        yield _counters(record)


def _figures(record: Record, output: str) -> Figures:
    """Each figure of an output with its interval; of finite results NaN says only that it is not defined in a replicate."""
    figures: Figures = {}
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


def _counters(record: Record) -> Table:
    table = Table("counter", "mean", "meaning", title="what the runs counted: mean over replicates", **_LEFT)
    rows, meanings = record.table(COUNTERS), {column.name: column.meaning for column in record.columns[COUNTERS]}
    for name in dict.fromkeys(name for counted in rows for name in counted if name != "seed"):
        values = [float(counted[name]) for counted in rows if name in counted]
        table.add_row(name, _mean_text(name, values), meanings.get(name, ""))
    return table


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
    yield f"{names.variant}: {', '.join(_speed_words(rows[0]))} from golden."
    title = "; ".join(filter(None, [record.kernel, _MORE if metrics is Metrics.CHIEF else ""]))
    table = Table("figure", "unit", title=title or None, **_LEFT)
    for row in rows:
        table.add_column(f"seed {row['seed']}", justify="right")
    figures = {column.name: (column.unit, column.meaning) for column in record.primary if column.use is Use.FIGURE} | FOLLOWING
    if metrics is Metrics.ALL:
        table.add_column("meaning")
    for name in _CHIEF_OF_SPEED if metrics is Metrics.CHIEF else figures:
        if name in rows[0]:
            unit, text = figures[name]
            table.add_row(name, unit, *(_text(row[name]) for row in rows), *([text] if metrics is Metrics.ALL else []))
    yield table


def _speed_words(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"{1e3 * row['latency']:.3g} ms a call"
    if math.isfinite(row["tflops"]):  # of an operation that says how many operations it needs
        yield f"{row['tflops']:.3g} TFLOP/s ({100 * row['share']:.0f} % of a matrix product)"
    yield f"{row['peak_bytes'] / 2**20:.3g} MiB"
    yield f"RMSE {row['rmse']:.2g}"


def _speed_cells(record: Record) -> tuple[str, ...]:
    row = derived(record.rows[0])
    rate = (f"{row['tflops']:.3g}", f"{100 * row['share']:.0f} %") if math.isfinite(row["tflops"]) else ("", "")
    return f"{1e3 * row['latency']:.3g}", *rate, f"{row['peak_bytes'] / 2**20:.3g}", f"{row['rmse']:.2g}"


@dataclass(frozen=True)
class _Trained:
    """A record of training: rows of all weights of the model, and of the run."""

    record: Record
    weights: list[dict[str, Any]]
    runs: list[dict[str, Any]]

    @classmethod
    def of(cls, record: Record) -> _Trained:
        from numdev.training.weights import MODEL, RUN, WEIGHTS  # late: it imports every model

        return cls(record, [row for row in record.table(WEIGHTS) if row["tensor"] == MODEL], record.table(RUN))

    @property
    def last(self) -> int:
        return int(max(row["step"] for row in self.weights))

    @property
    def has_same_bits(self) -> bool:
        return all(row["same_bits"] for row in self.runs)

    def mean(self, name: str, step: int) -> float:
        return summary([row[name] for row in self.weights if row["step"] == step]).mean

    def of_run(self, name: str) -> float:
        return summary([row[name] for row in self.runs]).mean


def _training(record: Record, _: PointNames, metrics: Metrics) -> Iterator[RenderableType]:
    """How far weights and losses differ from the reference's, and the figures over the steps."""
    own = _Trained.of(record)
    if own.has_same_bits:
        yield f"After {own.last} steps the weights of the rung have the same bits as those of its reference."
    else:
        largest, relative = (own.mean(name, own.last) for name in ("max_difference", "relative_frobenius"))
        differ = f"differ from the reference's by up to {largest:.3g}, relative norm {relative:.3g}"
        yield f"After {own.last} steps the weights {differ}."
    ours, theirs = own.of_run("held_out_loss"), own.of_run("baseline_held_out_loss")
    yield f"Loss on held-out data: {ours:.4g}, reference {theirs:.4g}; {own.of_run('seconds_per_step'):.3g} s a step."
    uses = (Use.CHIEF,) if metrics is Metrics.CHIEF else (Use.CHIEF, Use.FIGURE)
    names = [column.name for column in record.primary if column.use in uses]
    title = "all weights of the rung against those of its reference: mean over replicates"
    table = Table(
        "step", *names, title=title, caption=_MORE if metrics is Metrics.CHIEF else None, caption_justify="left", **_LEFT
    )
    for step in sorted({row["step"] for row in own.weights}):
        table.add_row(str(step), *(_text(own.mean(name, step)) for name in names))
    yield table
    if metrics is Metrics.ALL:
        yield _runs(own)


def _runs(own: _Trained) -> Table:
    from numdev.training.weights import RUN

    table = Table("of the run", "unit", **_LEFT)
    for row in own.runs:
        table.add_column(f"replicate {row['seed']}", justify="right")
    table.add_column("meaning")
    for column in own.record.columns[RUN]:
        if column.use is Use.FIGURE or (column.use is Use.NOTE and "checksum" not in column.name):
            table.add_row(column.name, column.unit, *(_text(row[column.name]) for row in own.runs), column.meaning)
    return table


def _training_cells(record: Record) -> tuple[str, ...]:
    own = _Trained.of(record)
    differences = (f"{own.mean(name, own.last):.3g}" for name in ("max_difference", "relative_frobenius"))
    return str(own.last), *differences, "yes" if own.has_same_bits else "no"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
