"""The report of some studies, made again from their results: tables, figures, claims. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from numdev.report.claims.verdicts import ClaimResult, judge, unknown
from numdev.report.claims.verdicts import note as note_on
from numdev.report.document.export import write_tables
from numdev.report.document.speed import draw
from numdev.report.document.tables import claims_table, failures_table, worst_table
from numdev.report.figures.points import POINTS
from numdev.report.figures.style import to_png, to_svg
from numdev.report.reading.frames import Results, load
from numdev.report.reading.scenarios import ROLES
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
) -> None:
    """Write tables, figures and claims of stored studies into `out`, and print the claims.

    Args:
        results: folder of a `Store`.
        out: folder of the report; files of the same name are replaced.
        studies: their names; all unless given.
        parquet: also write results.parquet.
        console: where to print.
        pdf: also set report.pdf.

    Raises:
        BadInput: if there are no results, or not those asked for.
        StoreError: if a file cannot be written.
    """
    console = console or Console()
    loaded = load(Store(results), studies, kind="deviation")
    claims = judge(CLAIMS, loaded)
    write_tables(loaded, claims, out, parquet)
    write_atomically(out / "claims.md", claims_markdown(claims).encode())
    notes = [*loaded.notes, *unknown(CLAIMS, loaded.manifests), *write_figures(loaded, claims, out / "figures")]
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if pdf:
        from numdev.report.document.pdf import write_pdf  # late: the typesetter is large

        speed = _speed(results / "speed", out / "figures")
        write_atomically(out / "report.pdf", write_pdf(loaded, claims, out / "figures", speed))
    for table in (failures_table(loaded), worst_table(loaded), claims_table(claims) if claims else None):
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


def write_figures(results: Results, claims: list[ClaimResult], folder: Path) -> list[str]:
    """Draws the figures of every study as PNG and SVG; returns a note on each that could not be drawn."""
    notes = []
    for study, manifest in results.manifests.items():
        names = _figures(manifest)
        rows = results.study(study)
        for name in names:
            plot = FIGURES.get(name) if name else POINTS
            lacking = plot.lacks(rows) if plot else []
            if plot is None:
                notes.append(f"{study}: there is no figure {name}; there are {', '.join(FIGURES)}")
            elif rows.empty:
                notes.append(f"{study}: nothing is measured, so {f'figure {name}' if name else 'its figure'} is not drawn")
            elif lacking:
                notes.append(f"{study}: figure {name} needs points with the labels {', '.join(lacking)}")
            else:
                figure = plot(rows)
                file, title = (study, manifest["title"]) if name == names[0] else (f"{study}_{name}", plot.title)
                alt = " ".join([plot.alt, *_findings(claims, study, name)])
                write_atomically(folder / f"{file}.png", to_png(figure))
                write_atomically(folder / f"{file}.svg", to_svg(figure, title or manifest["title"], alt))
    return notes


def _figures(manifest: dict[str, Any]) -> list[str]:
    """The figure that a study names, those of its claims, and further ones; an empty name, for `POINTS`, where there is none."""
    named = [manifest["figure"]] if manifest["figure"] else []
    claimed = (name for name in manifest["claims"] if name in FIGURES)
    return list(dict.fromkeys([*named, *claimed, *manifest.get("more", ())])) or [""]


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
