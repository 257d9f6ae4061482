"""Shows points, sweeps and studies on a terminal.

A point has sentences on its chief figures, and a table of means. What is measured, timed or trained differs in `_KINDS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from numdev.cli import build
from numdev.cli.compose import Request, at, written
from numdev.cli.exit_codes import Ended
from numdev.cli.progress import output
from numdev.measurement.deviation import COUNTERS
from numdev.measurement.speed import FOLLOWING, derived
from numdev.measurement.studies import Outcome, Plan
from numdev.report.statistics import mean, ratio, significant
from numdev.results.record import Record, Status, Use, summary
from numdev.results.store import Store

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
_STYLES = {"ok": "green", "unsupported": "yellow"}
_NOT_IN_TITLE = ("dry_run", "out")  # of the settings that all jobs of a sweep share


class Metrics(Enum):
    """Which metrics of a point are printed."""

    CHIEF = "chief"
    ALL = "all"


class PointNames(NamedTuple):
    """A point by the names that the user knows."""

    line: str  # groups, the size of the problem and every stated setting, as overrides
    variant: str  # the option that is measured, such as `tiled`
    baseline: str  # the option of the baseline, such as `eager`

    @classmethod
    def of(cls, request: Request) -> PointNames:
        """The names of what a request measures."""
        variant, said = build.kind_of(request), {one.name: str(one) for one in request.said.values()}
        groups = {name.partition(".")[0] for name in build.reads(request)} - {"baseline"}
        names = {variant.partition("=")[0]: variant} if "=" in variant else {}
        names |= {group: f"{group}={one}" for group, one in request.options.items() if group in groups and one != _USUAL}
        names |= {group: said[group] for group in request.options if group in said}
        if _SIZE in request.raw:
            names[_SIZE] = f"{_SIZE}={written(at(request.config, _SIZE))}"
        return cls(" ".join((names | said).values()), variant.rpartition("=")[2], request.options.get("baseline", "baseline"))


def point(
    console: Console, record: Record, path: Path, names: PointNames, *, already: bool, metrics: Metrics = Metrics.CHIEF
) -> None:
    """One point: what was measured, its chief figures or all of them, how it ended, and where its record lies."""
    console.print(names.line, style="bold", markup=False)
    if record.rows:
        kind, is_chief = _KINDS[record.kind], metrics is Metrics.CHIEF
        if record.reason:
            console.print(f"{record.reason[0].upper()}{record.reason[1:]}.", style="red", markup=False)
        for sentence in kind.sentences(record, names):
            console.print(sentence, markup=False)
        more = "; metrics=all prints every metric" if is_chief else ""
        console.print(f"mean ± half its 95 % confidence interval{more}", style="italic")
        console.print(_means(record, kind.columns(record), is_chief=is_chief))
    seeds = record.config["seeds"]
    line = Text.assemble(_styled(record.status), f", {seeds} replicate{'s' * (seeds != 1)}, {record.seconds:.2f} s")
    line.append(f": {record.reason}" if record.reason and not record.rows else "")
    line.append("; already measured (fresh=true measures again)" if already else "")
    console.print(line)
    console.print(f"record {record.key} in {path}", style="dim", soft_wrap=True)


def row(record: Record, *, already: bool) -> dict[str, str]:
    """The row of a point in the table of its sweep."""
    remark = record.reason or ("measured already" if already else f"{record.seconds:.2f} s")
    return (_KINDS[record.kind].cells(record) if record.rows else {}) | {"status": f"{record.status.value}, {remark}"}


def sweep(command: str, jobs: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
    """The table of a sweep: a line for each job, of its overrides those that differ, then its row; `command` may be dry_run."""
    settings = [dict(text.lstrip("+").partition("=")[::2] for text in overrides) for overrides, _ in jobs]
    names = dict.fromkeys(name for own in settings for name in own)
    axes = [name for name in names if len({own.get(name) for own in settings}) > 1]
    shared = [f"{name}={value}" for name, value in settings[0].items() if name not in (*axes, *_NOT_IN_TITLE)]
    header = [*axes, *dict.fromkeys(name for _, row in jobs for name in row if name != "status"), "status"]
    lines = [header, *([{**own, **row}.get(name, "") for name in header] for own, (_, row) in zip(settings, jobs, strict=True))]
    widths, console = [max(map(len, column)) for column in zip(*lines, strict=True)], output()
    title = next((kind.title for kind in _KINDS.values() if kind.command == command), "nothing is measured")
    console.print(Text("; ".join(filter(None, [title, " ".join(shared)]))), soft_wrap=True)
    for *cells, status in lines:  # no rich table, which pads or cuts a long reason
        padded = [c.ljust(w) if i < len(axes) else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=False))]
        style = "bold" if status == "status" else _STYLES.get(status.partition(",")[0], "red")
        console.print(Text.assemble("  ".join([*padded, ""]), (status, style)), soft_wrap=True)


def outcomes(ended: Mapping[str, Outcome], store: Store) -> None:
    """The result of each study in one line, then every point that did not end well."""
    console = output()
    for name, done in ended.items():
        statuses, count = Counter(status for _, status, _ in done.failures), done.measured + done.skipped
        parts = [f": {count} point{'s' * (count != 1)}", f"{done.measured} measured in {done.seconds:.1f} s"]
        parts += [f"{done.skipped} already there"] if done.skipped else []
        parts += [f"{statuses[status]} {status.value}" for status in Status if status in statuses]
        console.print(Text.assemble((name, "bold"), ", ".join(parts)))
    failed = [(f"{name}: {point}", status, why) for name, done in ended.items() for point, status, why in done.failures]
    if failed:
        rows = ((Text(text), Text(*_styled(status)), Text(reason)) for text, status, reason in failed)
        console.print(_table(["point", "status", "reason"], rows, title="points that are not ok"))
    if store.torn:
        console.print(f"{len(store.torn)} damaged files in {store.path} were measured again, such as {store.torn[0].name}")


def planned(plan: Plan, *, in_sweep: bool) -> Ended:
    """The end of a job of a dry run."""
    return Ended(plan=plan, row=plan_row(plan) if in_sweep else {})


def plan_row(plan: Plan) -> dict[str, str]:
    """A plan as text by column, for the table of a sweep or of several studies."""
    memory = (decimal(plan.bytes) if plan.bytes else "unknown") if plan.replicates else ""
    status = "to measure" if plan.replicates else "measured already"
    return {"points": str(plan.points), "replicates": str(plan.replicates), "memory": memory, "status": status}


def plan(whole: Plan) -> str:
    """What a dry run counted, in a sentence."""
    left = f"{whole.replicates} replicates to measure, memory of the largest point {plan_row(whole)['memory']}"
    text = f"{whole.points} point{'s' * (whole.points != 1)}, {whole.there} measured already"
    return f"{text}; {left if whole.replicates else 'nothing is left to measure'}.\nNothing was measured or written."


def _styled(status: Status) -> tuple[str, str]:
    return status.value, _STYLES.get(status.value, "red")


def _table(header: Sequence[str], rows: Iterable[Sequence[str | Text]], *, figures: Sequence[str] = (), **about: Any) -> Table:
    """A table whose columns of `figures` are numbers; `about` it as `rich.table.Table` takes it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", **about)
    for name in header:
        justify: Any = "right" if name in figures else "left"
        table.add_column(name, justify=justify, vertical="bottom", no_wrap=name in ("metric", "unit"))
    for row in rows:
        table.add_row(*row)
    return table


Columns = list[tuple[str, Mapping[str, Any]]]  # rows of a record, each with the heading of the column where it is shown


def _means(record: Record, columns: Columns, *, is_chief: bool) -> Table:
    """Figures of each output, chief ones or all, as means over replicates ± half their intervals, with a column for each heading.

    Behind all of them stands what the runs counted. In a point without NaN and Inf a figure that is NaN says only that it is
    not defined in a replicate.
    """
    chief = [column.name for column in record.primary if column.use is Use.CHIEF]
    tables = (*record.primary, *record.columns.get(COUNTERS, ()))
    units = {column.name: column.unit for column in tables if column.use in (Use.CHIEF, Use.FIGURE)}
    units |= {name: unit for name, (unit, _) in FOLLOWING.items() if name in columns[0][1]}
    counted = [] if is_chief else [(columns[0][0], {"output": "counted", **row}) for row in record.table(COUNTERS)]
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for heading, row in [*columns, *counted]:
        is_primary = row.get("output", record.outputs[0]) == record.outputs[0]
        chosen = (chief if is_primary else chief[:_OF_OTHERS]) or _CHIEF_OF_SPEED
        for name in chosen if is_chief else units:
            if isinstance(value := row.get(name), (int, float)) and not (math.isnan(value) and record.status is Status.OK):
                values.setdefault((row.get("output", ""), name), {}).setdefault(heading, []).append(float(value))
    headings = list(dict.fromkeys(heading for heading, _ in columns))
    lines, last = [], ""
    for (place, name), of_line in values.items():
        means = (_mean_text(name, of_line.get(each, [])) for each in headings)
        lines.append([place if place != last else "", name, *([] if is_chief else [units[name]]), *means])
        last = place
    return _table(["", "metric", *([] if is_chief else ["unit"]), *headings], lines, figures=headings, show_edge=False)


def _mean_text(metric: str, values: list[float]) -> str:
    """The mean, and half the confidence interval where there are replicates that differ; nothing without values."""
    if not values:
        return ""
    of = summary(values)
    half = (of.high - of.low) / 2
    text = f"{of.mean:.9f}" if metric == "cosine_similarity" else significant(of.mean, 3)  # that one is close to 1
    return text + (f"±{significant(half, 1)}" if math.isfinite(half) and half else "")


def _deviation(record: Record) -> dict[str, str]:
    """The first chief figure of the primary output from golden, of variant and baseline, and their ratio with its verdict.

    No verdict follows from an output that holds NaN or Inf, or zeros alone; `record.reason` says how many.
    """
    metric = next(column.name for column in record.primary if column.use is Use.CHIEF)
    own = [row for row in record.rows if (row["reference"], row["output"]) == ("golden", record.outputs[0])]
    own.sort(key=lambda row: int(row["seed"]))
    ours, theirs = ([row[metric] for row in own if row["subject"] == subject] for subject in ("variant", "baseline"))
    clusters = [row["cluster"] for row in own if row["subject"] == "variant"]
    variant = mean(ours, clusters=clusters)
    if not theirs:
        return {"variant": variant.text()}
    cells = {"variant": significant(variant.estimate, 3), "baseline": significant(mean(theirs, clusters=clusters).estimate, 3)}
    if record.status is not Status.OK:
        return cells
    quotient = ratio(ours, theirs, clusters=clusters)
    if quotient.count < 2:
        verdict = ""
    elif quotient.low == quotient.high == 1:
        verdict = "deviates equally"
    elif quotient.outside(1.0, 1.0):
        verdict = f"deviates {'more' if quotient.estimate > 1 else 'less'}"
    else:
        verdict = "no difference is shown"
    excluded = f", without {quotient.excluded} zero or not finite" if quotient.excluded else ""
    return cells | {"variant / baseline": f"{quotient.text()}{excluded}", "verdict": verdict}


def sentences(record: Record, names: PointNames) -> Iterator[str]:
    """How far variant and baseline lie from golden, and their ratio, by the names that the user has for the two."""
    metric, cells = next(column.name for column in record.primary if column.use is Use.CHIEF), _deviation(record)
    baseline = f", baseline ({names.baseline}) {cells['baseline']}" if "baseline" in cells else ""
    of_others = "of the other elements, " if record.status is Status.NONFINITE else ""
    yield f"{of_others}{metric} of {record.outputs[0]} from golden: {names.variant} {cells['variant']}{baseline}."
    if "verdict" in cells:
        verdict = f": {cells['verdict']}" if cells["verdict"] else ""
        yield f"{names.variant} / baseline = {cells['variant / baseline']}{verdict}."


def _speed(record: Record) -> dict[str, str]:
    row = derived(record.rows[0])
    rate = {"TFLOP/s": f"{row['tflops']:.3g}", "of matmul": f"{100 * row['share']:.0f} %"} if math.isfinite(row["tflops"]) else {}
    return {"ms": f"{1e3 * row['latency']:.3g}", **rate, "MiB": f"{row['peak_bytes'] / 2**20:.3g}", "RMSE": f"{row['rmse']:.2g}"}


def _training(record: Record) -> dict[str, str]:
    """Of all weights after the last step, and of the losses on held-out data."""
    last, runs = _last_steps(record)[-1][1]["step"], record.table("run")
    of_weights = [row for _, row in _last_steps(record) if row["step"] == last]
    names: dict[str, Sequence[Mapping[str, Any]]] = dict.fromkeys(("max_difference", "relative_frobenius"), of_weights)
    names |= dict.fromkeys(("held_out_loss", "baseline_held_out_loss", "seconds_per_step"), runs)
    means = {name: f"{summary([row[name] for row in rows]).mean:.4g}" for name, rows in names.items()}
    return {"step": str(last), **means, "same bits": "yes" if all(row["same_bits"] for row in runs) else "no"}


def _last_steps(record: Record) -> Columns:
    """Of all weights together, after some of the steps, in their order."""
    rows = sorted((row for row in record.rows if row["tensor"] == "model"), key=lambda row: int(row["step"]))
    steps = list(dict.fromkeys(row["step"] for row in rows))[-_STEPS:]
    return [(f"step {row['step']}", row) for row in rows if row["step"] in steps]


class _Kind(NamedTuple):
    command: str  # that measures points of the kind
    title: str  # of the table of a sweep
    cells: Callable[[Record], dict[str, str]]  # chief figures as text, by column of that table
    columns: Callable[[Record], Columns]  # of the table of means

    def sentences(self, record: Record, names: PointNames) -> Iterable[str]:
        if self.cells is _deviation:
            return sentences(record, names)
        cells = ", ".join(f"{name} {text}" for name, text in self.cells(record).items())
        return [f"{names.variant}: {cells} ({self.title}).", *filter(None, [record.kernel])]


def _sides(record: Record) -> Columns:
    return [(_COLUMNS[of], row) for row in record.rows if (of := (row["subject"], row["reference"])) in _COLUMNS]


def _seeds(record: Record) -> Columns:
    return [(f"seed {row['seed']}", derived(row)) for row in record.rows]


_RATIO = "max_difference from golden, and variant / baseline with its 95 % interval"
_KINDS = {
    "deviation": _Kind("measure", _RATIO, _deviation, _sides),
    "speed": _Kind("speed", "time of one call, and its root mean square error", _speed, _seeds),
    "training": _Kind("train", "difference of the weights from those of the reference", _training, _last_steps),
}
