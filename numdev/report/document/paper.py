"""The report of some studies, made again from their results: tables, figures, claims. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from numdev.measurement.deviation.measurement import KIND as DEVIATION
from numdev.report.claims.verdicts import ClaimResult, judge, unknown
from numdev.report.claims.verdicts import note as note_on
from numdev.report.document.export import write_tables
from numdev.report.document.speed import draw
from numdev.report.document.tables import claims_table, failures_table, worst_table
from numdev.report.document.training import write_training_tables
from numdev.report.figures.plot import Plot
from numdev.report.figures.points import POINTS
from numdev.report.figures.style import to_png, to_svg
from numdev.report.reading.frames import Results, load
from numdev.report.reading.scenarios import ROLES
from numdev.report.reading.training import KIND as TRAINING
from numdev.report.reading.training import load_training
from numdev.report.studies.latency import frame
from numdev.report.studies.registry import CLAIMS, FIGURES
from numdev.results.store import Store, write_atomically


def make_report(
    results: Path,
    out: Path,
    studies: Sequence[str] | None = None,
    parquet: bool = False,
    console: Console | None = None,
    *,
    pdf: bool = False,
    html: bool = False,
) -> None:
    """Write tables, figures and claims of stored studies into `out`, and print the claims.

    Args:
        results: folder of a `Store`.
        out: folder of the report; files of the same name are replaced.
        studies: their names; all unless given.
        parquet: also write results.parquet.
        console: where to print.
        pdf: also set report.pdf.
        html: also write report.html, one file with the claims, the figures and a table of the rows.

    Raises:
        BadInput: if there are no results, or not those asked for.
        StoreError: if a file cannot be written.
    """
    console, store = console or Console(), Store(results)
    own, others = _of_training(store, studies)
    if others or not own:
        loaded = load(store, others if own else studies, kind="deviation")
        claims = judge(CLAIMS, loaded)
        write_tables(loaded, claims, out, parquet)
        shown = [failures_table(loaded), worst_table(loaded)]
        _documents(loaded, claims, store.path, out, (console, shown), speed=results / "speed", pdf=pdf, html=html)
    if own:
        folder = out / TRAINING if others else out  # the tables of both have the same names
        loaded = load_training(store, own)
        claims = judge(CLAIMS, loaded)
        write_training_tables(loaded, claims, folder, parquet)
        _documents(loaded, claims, store.path, folder, (console, [failures_table(loaded)]), pdf=pdf, html=html)


def _of_training(store: Store, studies: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The names of the studies of training among those wanted, and the others."""
    kinds = {name: manifest.get("kind") for name, manifest in store.studies().items()}
    wanted = list(kinds) if studies is None else studies
    own = [name for name in wanted if kinds.get(name) == TRAINING]
    return own, [name for name in wanted if name not in own and (studies is not None or kinds[name] == DEVIATION)]


def _documents(
    loaded: Results,
    claims: list[ClaimResult],
    results: Path,
    out: Path,
    printed: tuple[Console, list[Table | None]],
    *,
    pdf: bool,
    html: bool,
    speed: Path | None = None,
) -> None:
    """Write claims.md, figures and, if wanted, report.pdf and report.html into `out`; print the tables and the claims."""
    console, tables = printed
    write_atomically(out / "claims.md", claims_markdown(claims).encode())
    drawn = write_figures(loaded, claims, out / "figures", results)
    notes = [*loaded.notes, *unknown(CLAIMS, loaded.manifests), *drawn]
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    timed = _speed(speed, out / "figures") if speed is not None and (pdf or html) else None
    if html:
        from numdev.report.document.html import write_html  # late: nothing else needs templates of pages

        write_atomically(out / "report.html", write_html(loaded, claims, out / "figures", notes, timed))
    if pdf:
        from numdev.report.document.pdf import write_pdf  # late: the typesetter is large

        write_atomically(out / "report.pdf", write_pdf(loaded, claims, out / "figures", timed))
    for table in (*tables, claims_table(claims) if claims else None):
        if table is not None:
            console.print(table)
    console.print(f"report: {out}", markup=False, highlight=False)


def _speed(path: Path, folder: Path) -> Results | None:
    """Loads the results of `numdev speed` and draws their figures; None if there are none."""
    store = Store(path)
    if not any(manifest.get("kind") == "speed" for manifest in store.studies().values()):
        return None
    loaded = load(store, kind="speed")
    draw(loaded, frame(loaded), folder)
    return loaded


def write_figures(results: Results, claims: list[ClaimResult], folder: Path, home: Path = Path()) -> list[str]:
    """Draws the figures of every study as PNG and SVG; returns a note on each that could not be drawn.

    `home` is the folder of the results, in which columns of paths (`Plot.files`) name files.
    """
    notes = []
    for study, manifest in results.manifests.items():
        names = _figures(manifest)
        for name in names:
            plot = FIGURES.get(name) if name else POINTS
            rows = _drawn(results.study(study, plot.table if plot else ""), plot, home)
            lacking = plot.lacks(rows) if plot else []
            if plot is None:
                notes.append(f"{study}: there is no figure {name}; there are {', '.join(FIGURES)}")
            elif rows.empty:
                notes.append(f"{study}: nothing is measured, so {f'figure {name}' if name else 'its figure'} is not drawn")
            elif plot.files and (rows[list(plot.files)] == "").all(axis=None):
                notes.append(f"{study}: no record names a file for figure {name}")
            elif lacking:
                notes.append(f"{study}: figure {name} needs points with the labels {', '.join(lacking)}")
            else:
                figure = plot(rows)
                file, title = (study, manifest["title"]) if name == names[0] else (f"{study}_{name}", plot.title)
                alt = " ".join([plot.alt, *_findings(claims, study, name)])
                write_atomically(folder / f"{file}.png", to_png(figure))
                write_atomically(folder / f"{file}.svg", to_svg(figure, title or manifest["title"], alt))
    return notes


def _drawn(rows: pd.DataFrame, plot: Plot | None, home: Path) -> pd.DataFrame:
    """Rows with the paths of files as they can be opened."""
    columns = [column for column in (plot.files if plot else ()) if column in rows]
    named = {column: [str(home / name) if name else "" for name in rows[column].fillna("")] for column in columns}
    return rows.assign(**named) if named else rows


_DEFAULT = {TRAINING: "training_ladder"}  # of a kind of measurement whose rows `POINTS` cannot draw


def _figures(manifest: dict[str, Any]) -> list[str]:
    """The figure that a study names, those of its claims, and further ones; where there is none that of its kind, or `POINTS`."""
    named = [manifest["figure"]] if manifest["figure"] else []
    claimed = (name for name in manifest["claims"] if name in FIGURES)
    return list(dict.fromkeys([*named, *claimed, *manifest.get("more", ())])) or [_DEFAULT.get(manifest["kind"], "")]


def _findings(claims: list[ClaimResult], study: str, figure: str) -> Iterator[str]:
    """The findings that a figure shows, for its description."""
    for result in claims:
        if result.study == study and result.claim.figure == figure:
            yield from (f"{scenario.title}: {finding.figure}." for scenario, finding in result.findings.items())


def claims_markdown(claims: list[ClaimResult]) -> str:
    """The claims as Markdown: a table of all, then each with its scenarios."""
    return "\n".join(_markdown(claims)) + "\n"


def _markdown(claims: list[ClaimResult]) -> Iterator[str]:
    yield "# Claims"
    yield ""
    yield note_on(claims)
    yield from ("", "| claim | source | measured | verdict |", "|---|---|---|---|")
    for result in claims:
        figure = f"{result.main.title}: {result.findings[result.main].figure}"
        yield f"| {_cell(result.claim.text)} | {_cell(result.claim.source)} | {_cell(figure)} | {_cell(result.brief)} |"
    for result in claims:
        yield from ("", f"## {result.claim.text}", "")
        yield f"{result.claim.source}. Study `{result.study}`. **{result.overall[0].upper()}{result.overall[1:]}.**"
        yield from ("", "| scenario | verdict | found | generalises |", "|---|---|---|---|")
        for scenario, finding in result.findings.items():
            role = ROLES[scenario.role]
            cells = (f"{scenario.title} ({role})" if role else scenario.title, finding.told, finding.sentence, finding.over)
            yield f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.replace("|", chr(92) + "|")
