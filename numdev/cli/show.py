"""What a measurement and a study look like on a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from numdev.cli.asked import Asked
from numdev.cli.headline import compared, sentences
from numdev.cli.sweeptable import status_text
from numdev.measurement.deviation.measurement import COUNTERS
from numdev.results.record import Column, Record, Status, Use, points_by_kernel, summary
from numdev.results.store import Store
from numdev.results.study import Outcome, Replaced

_COLUMNS = {
    ("variant", "golden"): "variant\nvs golden",
    ("variant", "golden_same_inputs"): "vs golden of\nsame inputs",
    ("variant", "baseline"): "variant\nvs baseline",
    ("baseline", "golden"): "baseline\nvs golden",
}
_OF_OTHERS = 2  # chief figures of each output but the primary one, so that a point fits a screen of 24 lines
MORE = "metrics=all prints every metric"
Figures = dict[tuple[str, str], dict[str, str]]  # (subject, reference) to metric to text


class Metrics(Enum):
    """What a point prints."""

    CHIEF = "chief"
    ALL = "all"


def record(console: Console, found: Record, path: Path, asked: Asked, *, already: bool, metrics: Metrics = Metrics.CHIEF) -> None:
    """One point: what was measured, what was found, and its chief figures or all of them."""
    opening(console, found, asked)
    if found.rows:
        for sentence in sentences(found, asked.variant, asked.baseline):
            console.print(sentence, markup=False)
        if metrics is Metrics.ALL:
            console.print(*_tables(found))
        else:
            console.print(f"mean ± half its 95 % confidence interval; {MORE}", style="italic")
            console.print(_chief(found))
    footer(console, found, path, already=already)


def opening(console: Console, found: Record, asked: Asked) -> None:
    """What was measured, and what is wrong with an output that has figures."""
    console.print(asked.line, style="bold", markup=False)
    if found.rows and found.reason:
        console.print(f"{found.reason[0].upper()}{found.reason[1:]}.", style="red", markup=False)


def footer(console: Console, found: Record, path: Path, *, already: bool) -> None:
    """How the point ended, and where its record lies. `opening` has the reason of one with figures."""
    console.print(status(found, already=already))
    console.print(f"record {found.key} in {path}", style="dim", soft_wrap=True)


def status(found: Record, *, already: bool) -> Text:
    """How a point ended, in one line."""
    seeds = found.config["seeds"]
    replicates = f"{seeds} replicate{'s' * (seeds != 1)}"
    line = Text.assemble(status_text(found.status))
    line.append(f", {replicates}, {found.seconds:.2f} s" + (f": {found.reason}" if found.reason and not found.rows else ""))
    if already:
        line.append("; already measured (fresh=true measures again)")
    return line


def cells(found: Record) -> tuple[str, ...]:
    """The figures of one point of a sweep, as `numdev.cli.sweeptable.HEADINGS` names them."""
    from numdev.report.statistics import significant  # late: a report's libraries

    if not found.rows:
        return ()
    one = compared(found)
    if one.baseline is None or one.quotient is None:
        return significant(one.variant.estimate, 3), "", ""
    quotient = one.quotient.text() if one.quotient.count > 1 else significant(one.quotient.estimate, 3)
    if found.status is not Status.OK:
        quotient = ""  # no verdict follows from the elements that are left
    return significant(one.variant.estimate, 3), significant(one.baseline.estimate, 3), quotient


def outcome(name: str, done: Outcome) -> Text:
    """What a run of a study did, in one line; of compiled code of numdev it names how many points it ran."""
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
    mend = "reports will show these. Use another results= to keep both."
    return Text(f"note: {store.path} holds {name} with {lost.stored} points, this run has {here}; {mend}")


def failures(failed: Iterable[tuple[str, Status, str]]) -> Table:
    """Every point that did not end well."""
    table = Table("point", "status", "reason", title="points that are not ok", title_justify="left", box=SIMPLE_HEAD)
    for point, ended, reason in failed:
        table.add_row(Text(point), Text(*status_text(ended)), Text(reason))
    return table


def _chief(found: Record) -> Table:
    """The chief figures of every output, as narrow as a terminal of 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    outputs = list(dict.fromkeys(row["output"] for row in found.rows))
    of_output = {output: _figures(found, output) for output in outputs}
    pairs = [pair for pair in _COLUMNS if any(pair in figures for figures in of_output.values())]
    names = [column.name for column in found.primary if column.use is Use.CHIEF]
    table.add_column("", no_wrap=True)
    table.add_column("metric", vertical="bottom", no_wrap=True)
    for pair in pairs:
        table.add_column(_COLUMNS[pair], justify="right", no_wrap=True)
    for output, figures in of_output.items():
        for name in names if output == found.outputs[0] else names[:_OF_OTHERS]:
            values = (figures.get(pair, {}).get(name, "").replace(" ± ", "±") for pair in pairs)
            table.add_row(output if name == names[0] else "", name, *values)
    return table


def _tables(found: Record) -> Iterator[RenderableType]:
    for output in dict.fromkeys(row["output"] for row in found.rows):
        figures = _figures(found, output)
        title = f"{output}: mean over replicates ± half its 95 % confidence interval"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for header in ("metric", "unit"):
            table.add_column(header, vertical="bottom", no_wrap=True)
        for pair in figures:
            table.add_column(_COLUMNS[pair], justify="right")
        for column in _measured(found):
            table.add_row(column.name, column.unit, *(by_metric[column.name] for by_metric in figures.values()))
        yield table
    if any(len(counted) > 1 for counted in found.table(COUNTERS)):
        yield _counters(found)


def _figures(found: Record, output: str) -> Figures:
    figures: Figures = {}
    for pair in _COLUMNS:
        rows = [r for r in found.rows if r["output"] == output and (r["subject"], r["reference"]) == pair]
        if rows:
            names = [column.name for column in _measured(found)]
            figures[pair] = {name: _interval(name, _defined(found, [float(row[name]) for row in rows])) for name in names}
    return figures


def _defined(found: Record, values: list[float]) -> list[float]:
    """The values of a figure, without the replicates in which it is not defined: of finite results NaN says nothing else."""
    return [value for value in values if not math.isnan(value)] if found.status is Status.OK else values


def _measured(found: Record) -> list[Column]:
    """The columns of figures."""
    return [column for column in found.primary if column.use in (Use.CHIEF, Use.FIGURE)]


def _counters(found: Record) -> Table:
    title = "what the runs counted: mean over replicates"
    table = Table("counter", "mean", "meaning", title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows, meanings = found.table(COUNTERS), {column.name: column.meaning for column in found.columns[COUNTERS]}
    for name in dict.fromkeys(name for counted in rows for name in counted if name != "seed"):
        values = [float(counted[name]) for counted in rows if name in counted]
        table.add_row(name, _interval(name, values), meanings.get(name, ""))
    return table


def _interval(metric: str, values: list[float]) -> str:
    """The mean, and half the confidence interval where there are replicates that differ; nothing without values."""
    if not values:
        return ""
    from numdev.report.statistics import significant  # late: a report's libraries

    found = summary(values)
    half = (found.high - found.low) / 2
    if metric == "cosine_similarity":  # the one that is close to 1
        mean = f"{found.mean:.9f}"
    else:
        mean = significant(found.mean, 3) if math.isfinite(found.mean) else f"{found.mean:g}"
    return mean + (f" ± {significant(half, 1)}" if math.isfinite(half) and half else "")
