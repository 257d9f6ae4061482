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

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from numdev.cli import build, schema
from numdev.cli.compose import Request, at
from numdev.cli.progress import output
from numdev.measurement.deviation import COUNTERS
from numdev.measurement.speed import FOLLOWING, derived
from numdev.measurement.studies import Outcome, Plan
from numdev.report.statistics import mean, ratio, significant
from numdev.results.claim import Pilot
from numdev.results.record import Record, Status, Use, summary
from numdev.results.store import Store
from numdev.results.study import Study

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
            names[_SIZE] = f"{_SIZE}={schema.written(at(request.config, _SIZE))}"
        return cls(" ".join((names | said).values()), variant.rpartition("=")[2], request.options.get("baseline", "baseline"))


def point(
    console: Console, record: Record, path: Path, names: PointNames, *, already: bool, metrics: Metrics = Metrics.CHIEF
) -> None:
    """One point: what was measured, its chief figures or all of them, how it ended, and where its record lies."""
    console.print(names.line, style="bold", markup=False)
    if record.rows:
        is_chief = metrics is Metrics.CHIEF
        if record.reason:
            console.print(f"{record.reason[0].upper()}{record.reason[1:]}.", style="red", markup=False)
        for sentence in sentences(record, names):
            console.print(sentence, markup=False)
        more = "; metrics=all prints every metric" if is_chief else ""
        console.print(f"mean ± half its 95 % confidence interval{more}", style="italic")
        _print_means(console, record, _KINDS[record.kind].columns(record), is_chief=is_chief)
    seeds = record.config["seeds"]
    status = record.status.value, _STYLES.get(record.status.value, "red")
    line = Text.assemble(status, f", {seeds} replicate{'s' * (seeds != 1)}, {record.seconds:.2f} s")
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
    lines = [[{**own, **row}.get(name, "") for name in header] for own, (_, row) in zip(settings, jobs, strict=True)]
    title = next((kind.title for kind in _KINDS.values() if kind.command == command), "nothing is measured")
    output().print(Text("; ".join(filter(None, [title, " ".join(shared)]))), soft_wrap=True)
    _print_table(output(), header, lines, names=len(axes))


def outcomes(ended: Mapping[str, Outcome], store: Store) -> None:
    """The result of each study in one line, then every point that did not end well."""
    console = output()
    for name, done in ended.items():
        statuses, count = Counter(status for _, status, _ in done.failures), done.measured + done.skipped
        parts = [f": {count} point{'s' * (count != 1)}", f"{done.measured} measured in {done.seconds:.1f} s"]
        parts += [f"{done.skipped} already there"] if done.skipped else []
        parts += [f"{statuses[status]} {status.value}" for status in Status if status in statuses]
        console.print(Text.assemble((name, "bold"), ", ".join(parts)))
    failed = [(f"  {name}: {point}", status, why) for name, done in ended.items() for point, status, why in done.failures]
    if failed:
        console.print("points that are not ok")
        _print_table(console, ["  point", "status"], [[text, f"{status.value}, {reason}"] for text, status, reason in failed])
    if store.torn:
        console.print(f"{len(store.torn)} damaged files in {store.path} were measured again, such as {store.torn[0].name}")


def power(study: Study, store: Store, stated: Pilot | None) -> None:
    """Which claims the planned replicates can decide, by the records that there are, or by what the study's file states."""
    from numdev.report.claims.power import MOST, POWER, prospects  # late, as all of the report: pandas and matplotlib
    from numdev.report.reading.frames import load
    from numdev.report.studies.registry import planned_claims

    console, claims = output(), planned_claims(study)
    if not claims:
        return
    results = load(store, [study.name]) if study.name in store.studies() else None
    seeds = Counter((point.scenario, *point.labels.values()) for point in study.points).most_common(1)[0][1]
    note = "In parentheses by the upper 80 % confidence limit of the pilot's spread, else by that of 50 %. All are lower bounds."
    table = Table(title=f"What {seeds} replicates can decide", title_justify="left", show_lines=True, caption=note)
    for name, width in (("claim", 4), ("pilot", 4), (f"decided with {seeds}", 2), (f"replicates for {POWER:.0%}", 2)):
        table.add_column(name, ratio=width, overflow="fold")
    for one in prospects(claims, study.name, seeds, results, stated):
        both = one.likely, one.cautious
        likely, cautious = ("> 99%" if chance.power > 0.99 else f"{chance.power:.0%}" for chance in both)
        needed, most = (f"{chance.needed:,}" if chance.needed <= MOST else f"> {MOST:,}" for chance in both)
        cells = [one.pilot, f"{one.verdict.value}: {likely} ({cautious})", f"{needed} ({most})"]
        cells = cells if one.pilot else ["none", "unknown", "unknown"]
        table.add_row(one.claim, *([one.pilot, "seen, not inferred", "1"] if one.is_seen else cells))
    console.print(table)
    sources = [f"the records of {study.name} in {store.path}"] if results else []
    sources += [f"{stated.source} ({stated.seeds} replicates), as the study's file states"] if stated else []
    console.print(f"pilot: {'; else '.join(sources) or 'none'}", markup=False, highlight=False)


def plan_row(plan: Plan) -> dict[str, str]:
    """A plan as text by column, for the table of a sweep or of several studies."""
    memory = (decimal(plan.bytes) if plan.bytes else "unknown") if plan.replicates else ""
    status = "to measure" if plan.replicates else "measured already"
    return {"points": str(plan.points), "replicates": str(plan.replicates), "memory": memory, "status": status}


def plan(plans: Iterable[Plan]) -> str:
    """What a dry run counted, in a sentence."""
    whole = sum(plans, Plan())
    left = f"{whole.replicates} replicates to measure, memory of the largest point {plan_row(whole)['memory']}"
    text = f"{whole.points} point{'s' * (whole.points != 1)}, {whole.there} measured already"
    return f"{text}; {left if whole.replicates else 'nothing is left to measure'}.\nNothing was measured or written."


def _print_table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> None:
    """Rows below a header. The first columns, `names` of them, are text, others numbers; a status at the end has any length."""
    height = max(name.count("\n") for name in header)
    above = zip(*(("\n" * (height - name.count("\n")) + name).split("\n") for name in header), strict=True)
    lines, with_status = [*above, *rows], header[-1] == "status"
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for place, cells in enumerate(lines):  # no table of rich, which pads or cuts a long reason
        *padded, last = (c.ljust(w) if i < names else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        last = last.strip() if with_status else last
        style = "bold" if place <= height else _STYLES.get(last.partition(",")[0], "red") if with_status else ""
        console.print(Text("  ").join([*map(Text, padded), Text(last, style)]), style="bold" * (place <= height), soft_wrap=True)


Columns = list[tuple[str, Mapping[str, Any]]]  # rows of a record, each with the heading of the column where it is shown


def _print_means(console: Console, record: Record, columns: Columns, *, is_chief: bool) -> None:
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
    names = ["", "metric", *([] if is_chief else ["unit"])]
    _print_table(console, [*names, *headings], lines, len(names))


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
    """The chief figures; of a deviation those of variant and baseline, and their ratio, by the names that the user has."""
    kind = _KINDS[record.kind]
    cells = kind.cells(record)
    if kind.cells is not _deviation:
        yield f"{names.variant}: {', '.join(f'{name} {text}' for name, text in cells.items())} ({kind.title})."
        yield from filter(None, [record.kernel])
        return
    metric = next(column.name for column in record.primary if column.use is Use.CHIEF)
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


def _mismatch(record: Record) -> dict[str, str]:
    """The difference of log-probabilities, and the shares of the operations in its variance, where they are known."""
    shares: dict[str, list[float]] = {}
    for row in record.table("effects"):
        if row["order"] != 2:
            shares.setdefault(row["effect"], []).append(row["share"])
    chief = [column.name for column in record.primary if column.use is Use.CHIEF]
    cells = {name: f"{summary([row[name] for row in record.rows]).mean:.3g}" for name in chief}
    return cells | {name: f"{summary(own).mean:.0%}" for name, own in shares.items()}


class _Kind(NamedTuple):
    command: str  # that measures points of the kind
    title: str  # of the table of a sweep
    cells: Callable[[Record], dict[str, str]]  # chief figures as text, by column of that table
    columns: Callable[[Record], Columns]  # of the table of means


def _sides(record: Record) -> Columns:
    return [(_COLUMNS[of], row) for row in record.rows if (of := (row["subject"], row["reference"])) in _COLUMNS]


def _seeds(record: Record) -> Columns:
    return [(f"seed {row['seed']}", derived(row)) for row in record.rows]


def _replicates(record: Record) -> Columns:
    return [("sampler from trainer", row) for row in record.rows]


_KINDS = {
    "deviation": _Kind("measure", "max_difference from golden, variant / baseline with its 95 % interval", _deviation, _sides),
    "speed": _Kind("speed", "time of one call, and its root mean square error", _speed, _seeds),
    "training": _Kind("train", "difference of the weights from those of the reference", _training, _last_steps),
    "mismatch": _Kind("measure", "difference of log-probabilities, and shares of its variance", _mismatch, _replicates),
}
