"""Shows points, as they are measured, timed or trained, sweeps and studies on a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from numdev.cli.progress import output
from numdev.measurement.deviation import COUNTERS
from numdev.measurement.speed import FOLLOWING, derived
from numdev.report.statistics import Interval, mean, ratio, significant
from numdev.results.record import Record, Rows, Status, Use, summary
from numdev.results.study import Outcome

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
_STEPS = 5  # snapshots of a training run, the last ones
_MORE = "metrics=all prints every metric"
_STYLES = {"ok": "green", "unsupported": "yellow"}
_TITLES = {
    "measure": "max_difference from golden, and variant / baseline with its 95 % interval",
    "speed": "time of one call, and its root mean square error",
    "train": "difference of the weights from those of the reference after the last step",
    "dry_run": "nothing is measured",
}
_NOT_IN_TITLE = ("dry_run", "plot", "out")  # of the settings that all jobs of a sweep share


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
        variant, said = build.kind_of(request), {one.name: str(one) for one in request.said.values()}
        groups = {name.partition(".")[0] for name in build.reads(request)} - {"baseline"}
        read = {group: f"{group}={one}" for group, one in request.options.items() if group in groups and one != _USUAL}
        shown = {variant.partition("=")[0]: variant} if "=" in variant else {}
        size = {_SIZE: f"{_SIZE}={written(build.at(request.config, _SIZE))}"} if _SIZE in request.raw else {}
        chosen = {group: said[group] for group in request.options if group in said}
        line = " ".join((shown | read | chosen | size | said).values())
        return cls(line, variant.rpartition("=")[2], request.options.get("baseline", "baseline"))


def _styled(status: Status) -> tuple[str, str]:
    return status.value, _STYLES.get(status.value, "red")


def _table(header: Sequence[str], rows: Iterable[Sequence[str | Text]], figures: int, **about: Any) -> Table:
    """A table whose columns from `figures` on are numbers; `about` it as `rich.table.Table` takes it."""
    usual: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "title_justify": "left"}
    table = Table(**usual | about)
    for i, name in enumerate(header):
        is_number = i >= figures and name not in ("meaning", "status")
        table.add_column(name, justify="right" if is_number else "left", vertical="bottom", no_wrap=name in ("metric", "unit"))
    for row in rows:
        table.add_row(*row)
    return table


def sweep(command: str, jobs: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
    """The table of a sweep: a line for each job, of its overrides those that differ, then its row.

    `command` is one of `_TITLES`.
    """
    settings = [dict(text.lstrip("+").partition("=")[::2] for text in overrides) for overrides, _ in jobs]
    names = dict.fromkeys(name for own in settings for name in own)
    axes = [name for name in names if len({own.get(name) for own in settings}) > 1]
    shared = [f"{name}={value}" for name, value in settings[0].items() if name not in (*axes, *_NOT_IN_TITLE)]
    figures = [name for name in dict.fromkeys(name for _, row in jobs for name in row) if name != "status"]
    lines = [[*axes, *figures, "status"]]
    for own, (_, row) in zip(settings, jobs, strict=True):
        lines.append([*(own.get(name, "") for name in axes), *(row.get(name, "") for name in figures), row["status"]])
    widths, console = [max(map(len, column)) for column in zip(*lines, strict=True)], output()
    console.print(Text("; ".join(filter(None, [_TITLES[command], " ".join(shared)]))), soft_wrap=True)
    for *cells, status in lines:
        padded = (c.ljust(w) if i < len(axes) else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths[:-1], strict=True)))
        style = "bold" if status == "status" else _STYLES.get(status.partition(",")[0], "red")
        console.print(Text.assemble("  ".join([*padded, ""]), (status, style)), soft_wrap=True)


def point(
    console: Console, record: Record, path: Path, names: PointNames, *, already: bool, metrics: Metrics = Metrics.CHIEF
) -> None:
    """One point: what was measured, its chief figures or all of them, how it ended, and where its record lies."""
    console.print(names.line, style="bold", markup=False)
    if record.rows:
        if record.reason:
            console.print(f"{record.reason[0].upper()}{record.reason[1:]}.", style="red", markup=False)
        body = {"speed": _speed, "training": _training}.get(record.kind, _deviation)
        for part in body(record, names, is_chief=metrics is Metrics.CHIEF):
            console.print(part, markup=False)
    seeds = record.config["seeds"]
    line = Text.assemble(_styled(record.status), f", {seeds} replicate{'s' * (seeds != 1)}, {record.seconds:.2f} s")
    line.append(f": {record.reason}" if record.reason and not record.rows else "")
    line.append("; already measured (fresh=true measures again)" if already else "")
    console.print(line)
    console.print(f"record {record.key} in {path}", style="dim", soft_wrap=True)


def row(record: Record, *, already: bool) -> dict[str, str]:
    """The row of a point in the table of its sweep."""
    of_kind = {"speed": _speed_row, "training": _training_row}.get(record.kind, _deviation_row)
    remark = record.reason or ("measured already" if already else f"{record.seconds:.2f} s")
    return (of_kind(record) if record.rows else {}) | {"status": f"{record.status.value}, {remark}"}


def outcome(name: str, done: Outcome) -> Text:
    """The result of a run of a study, in one line."""
    parts = [f"{done.measured} measured in {done.seconds:.1f} s"]
    if done.skipped:
        parts.append(f"{done.skipped} already there")
    ended = Counter(status for _, status, _ in done.failures)
    parts += [f"{ended[status]} {status.value}" for status in Status if status in ended]
    count = done.measured + done.skipped
    return Text.assemble((name, "bold"), f": {count} point{'s' * (count != 1)}, ", ", ".join(parts))


def failures(failed: Iterable[tuple[str, Status, str]]) -> Table:
    """Every point that did not end well."""
    rows = ((Text(text), Text(*_styled(ended)), Text(reason)) for text, ended, reason in failed)
    return _table(["point", "status", "reason"], rows, 3, title="points that are not ok")


def _compared(record: Record) -> tuple[str, Interval, Interval | None, Interval | None]:
    """The first chief figure of the primary output from golden: its name, of variant, of baseline, and their ratio."""
    metric = next(column.name for column in record.primary if column.use is Use.CHIEF)
    own = [row for row in record.rows if (row["reference"], row["output"]) == ("golden", record.outputs[0])]
    own.sort(key=lambda row: int(row["seed"]))
    variant, baseline = ([row for row in own if row["subject"] == subject] for subject in ("variant", "baseline"))
    ours, theirs = [row[metric] for row in variant], [row[metric] for row in baseline]
    clusters = [row["cluster"] for row in variant]
    if not baseline:
        return metric, mean(ours, clusters=clusters), None, None
    return metric, mean(ours, clusters=clusters), mean(theirs, clusters=clusters), ratio(ours, theirs, clusters=clusters)


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
    text = f"{significant(quotient.estimate, 3)}, {_interval(quotient)}" if quotient.count else "unknown"
    if record.status is not Status.OK:
        verdict = "; no verdict follows"
    elif quotient.count < 2:
        verdict = ""
    elif quotient.low == quotient.high == 1:
        verdict = ": both deviate equally"
    elif quotient.outside(1.0, 1.0):
        verdict = f": {variant} deviates {'more' if quotient.estimate > 1 else 'less'}"
    else:
        verdict = ": no difference is shown"
    excluded = f"{quotient.excluded} replicate{'s' * (quotient.excluded != 1)}"
    left_out = f"; {excluded} left out (a deviation is zero or not finite)" if quotient.excluded else ""
    return [
        f"{head}, baseline ({baseline}) {significant(of_baseline.estimate, 3)}.",
        f"{variant} / baseline = {text}{verdict}{left_out}.",
    ]


def _interval(of: Interval) -> str:
    if of.count < 2:
        return "no interval from one replicate"
    return f"95 % interval {significant(of.low, 3)} to {significant(of.high, 3)}"


def _deviation_row(record: Record) -> dict[str, str]:
    _, variant, baseline, quotient = _compared(record)
    cells = {"variant": significant(variant.estimate, 3)}
    if baseline is None or quotient is None:
        return cells
    text = quotient.text() if quotient.count > 1 else significant(quotient.estimate, 3)
    judged = record.status is Status.OK  # no verdict follows from the elements that are left
    return cells | {"baseline": significant(baseline.estimate, 3), "variant / baseline": text if judged else ""}


def _speed_row(record: Record) -> dict[str, str]:
    row = derived(record.rows[0])
    rate = {"TFLOP/s": f"{row['tflops']:.3g}", "of matmul": f"{100 * row['share']:.0f} %"} if math.isfinite(row["tflops"]) else {}
    return {"ms": f"{1e3 * row['latency']:.3g}", **rate, "MiB": f"{row['peak_bytes'] / 2**20:.3g}", "RMSE": f"{row['rmse']:.2g}"}


def _training_row(record: Record) -> dict[str, str]:
    from numdev.training.weights import MODEL, RUN  # late: it imports every model

    step = max(row["step"] for row in record.rows)
    last = [row for row in record.rows if (row["step"], row["tensor"]) == (step, MODEL)]
    means = {name: f"{summary([row[name] for row in last]).mean:.3g}" for name in ("max_difference", "relative_frobenius")}
    return {"step": str(step), **means, "same bits": "yes" if all(row["same_bits"] for row in record.table(RUN)) else "no"}


def _deviation(record: Record, names: PointNames, *, is_chief: bool) -> Iterator[RenderableType]:
    """Sentences; of the chief metrics a table as narrow as a terminal of 80 columns, of all of them one for each output."""
    yield from sentences(record, names.variant, names.baseline)
    if is_chief:
        yield Text(f"mean ± half its 95 % confidence interval; {_MORE}", style="italic")
    rows = [row for row in record.rows if (row["subject"], row["reference"]) in _COLUMNS]
    yield _means(record, rows, lambda row: _COLUMNS[row["subject"], row["reference"]], is_chief=is_chief)
    counted, meanings = record.table(COUNTERS), {column.name: column.meaning for column in record.columns[COUNTERS]}
    if counters := [name for name in dict.fromkeys(name for row in counted for name in row) if name != "seed" and not is_chief]:
        values = {name: [float(row[name]) for row in counted if name in row] for name in counters}
        lines = ((name, _mean_text(name, values[name]), meanings.get(name, "")) for name in counters)
        yield _table(["counter", "mean", "meaning"], lines, 3, title="what the runs counted: mean over replicates")


def _speed(record: Record, names: PointNames, *, is_chief: bool) -> Iterator[RenderableType]:
    """Time in words, and a table with a column for each replicate."""
    cells = _speed_row(record)
    rate = f"{cells['TFLOP/s']} TFLOP/s ({cells['of matmul']} of a matrix product), " if "TFLOP/s" in cells else ""
    yield f"{names.variant}: {cells['ms']} ms a call, {rate}{cells['MiB']} MiB, RMSE {cells['RMSE']} from golden."
    rows = [derived(row) for row in record.rows]
    yield "; ".join(filter(None, [record.kernel, _MORE if is_chief else ""]))
    yield _means(record, rows, lambda row: f"seed {row['seed']}", is_chief=is_chief)


def _training(record: Record, _: PointNames, *, is_chief: bool) -> Iterator[RenderableType]:
    """How far weights and losses differ from the reference's, and the figures after some of the steps."""
    from numdev.training.weights import MODEL, RUN

    runs, cells = record.table(RUN), _training_row(record)
    size = f"by up to {cells['max_difference']}, relative norm {cells['relative_frobenius']}"
    ending = (
        "have the same bits as those of its reference" if cells["same bits"] == "yes" else f"differ from its reference's {size}"
    )
    yield f"After {cells['step']} steps the weights of the rung {ending}."
    names = ("held_out_loss", "baseline_held_out_loss", "seconds_per_step")
    ours, theirs, seconds = (summary([row[name] for row in runs]).mean for name in names)
    yield f"Loss on held-out data: {ours:.4g}, reference {theirs:.4g}; {seconds:.3g} s a step."
    yield f"All weights of the rung against those of its reference: mean over replicates{f'; {_MORE}' if is_chief else ''}"
    rows = [row for row in record.rows if row["tensor"] == MODEL]
    last = sorted({row["step"] for row in rows})[-_STEPS:]
    yield _means(record, [row for row in rows if row["step"] in last], lambda row: f"step {row['step']}", is_chief=is_chief)


def _means(record: Record, rows: Rows, heading: Callable[[Mapping[str, Any]], str], *, is_chief: bool) -> Table:
    """Figures of each output, chief ones or all, as means over replicates ± half their intervals, with a column for each heading.

    In a point without NaN and Inf a figure that is NaN says only that it is not defined in a replicate.
    """
    chief = [column.name for column in record.primary if column.use is Use.CHIEF]
    figures = {column.name: column.unit for column in record.primary if column.use in (Use.CHIEF, Use.FIGURE)}
    figures |= {name: unit for name, (unit, _) in FOLLOWING.items() if name in rows[0]}
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        is_primary = row.get("output", record.outputs[0]) == record.outputs[0]
        chosen = (chief if is_primary else chief[:_OF_OTHERS]) or _CHIEF_OF_SPEED
        for name in chosen if is_chief else figures:
            if isinstance(value := row.get(name), (int, float)) and not (math.isnan(value) and record.status is Status.OK):
                values.setdefault((row.get("output", ""), name), {}).setdefault(heading(row), []).append(float(value))
    headings = list(dict.fromkeys(map(heading, rows)))
    lines, last = [], ""
    for (place, name), of_line in values.items():
        means = (_mean_text(name, of_line.get(each, [])).replace(" ± ", "±") for each in headings)
        lines.append([place if place != last else "", name, *([] if is_chief else [figures[name]]), *means])
        last = place
    header = ["", "metric", *([] if is_chief else ["unit"]), *headings]
    return _table(header, lines, len(header) - len(headings), show_edge=False)


def _mean_text(metric: str, values: list[float]) -> str:
    """The mean, and half the confidence interval where there are replicates that differ; nothing without values."""
    if not values:
        return ""
    of = summary(values)
    half = (of.high - of.low) / 2
    text = f"{of.mean:.9f}" if metric == "cosine_similarity" else significant(of.mean, 3)  # that one is close to 1
    return text + (f" ± {significant(half, 1)}" if math.isfinite(half) and half else "")
