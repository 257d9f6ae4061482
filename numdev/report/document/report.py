"""The report of some studies, made again from their results: tables, figures, claims. Nothing is measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from numdev.errors import BadInput
from numdev.measurement.deviation import KIND as DEVIATION
from numdev.report.claims.verdicts import ClaimResult, judge, unknown
from numdev.report.document.context import Part
from numdev.report.document.export import write_tables
from numdev.report.document.figures import Picture, write_figures
from numdev.report.document.tables import bad_outputs, claims_table, failures, printed
from numdev.report.figures.plot import plot_of
from numdev.report.reading.frames import SPEED, TRAINING, Results, load
from numdev.report.reading.view import tidy
from numdev.report.studies.registry import claims_of
from numdev.report.studies.speed import latest, of_attention
from numdev.results.record import write_atomically
from numdev.results.store import Store


def make_report(
    results: Path,
    out: Path,
    studies: Sequence[str] | None = None,
    console: Console | None = None,
    *,
    kind: str = "",
    formats: Collection[str] = (),
    plot: Mapping[str, Any] | None = None,
    title: str = "",
    author: str = "",
) -> list[str]:
    """Write tables, figures and claims of stored studies and sweeps into `out`, and print the claims.

    The first kind of measurement is written into `out`, each further one into a folder of its name. The documents have all of
    them but speed, and beside studies of a paper what `numdev train` and `numdev speed` left in the folders `training` and
    `speed` of `results`.

    All studies and kinds are reported unless some are given. Of `formats`, `pdf` adds report.pdf, `html` report.html, one file
    with claims, figures and a table of the rows, and `csv` has results.csv in place of results.parquet. `plot` is a figure beside
    the others, as `numdev.report.figures.plot.plot_of` takes it; without a `title` the documents name what was measured.

    Returns:
        The status of each point of every study, as `numdev.results.record.Status` has it.

    Raises:
        BadInput: if there are no results, or not those asked for, or if `plot` names what they do not have.
        StoreError: if a file cannot be written.
    """
    console, store = console or Console(), Store(results)
    studies_of = {kind: studies} if kind else _by_kind(store, studies)
    if plot and len(studies_of) > 1:
        hint = f"a figure is of one kind; name the studies of {' or '.join(studies_of)}"
        raise BadInput("plot", ", ".join(plot.values()), hint)
    documents = [name for name in ("pdf", "html") if name in formats]
    if list(studies_of) == [SPEED] and documents:
        raise BadInput("format", documents[0], "results of speed alone have tables and figures and no document; leave it out")
    parts: list[Part] = []
    notes: list[str] = []
    for each in sorted(studies_of, key=lambda name: (name == SPEED, name != DEVIATION, name != TRAINING)) or [DEVIATION]:
        folder = out / each if parts else out  # the tables of all kinds have the same names
        loaded = load(store, studies_of.get(each, studies), kind=each)
        part, own_notes = write_part(loaded, folder, console, plot, csv="csv" in formats)
        parts.append(part)
        notes += own_notes if each != SPEED else []
    if documents:
        shown = [part for part in parts if part.results.kind != SPEED]
        is_paper = shown[0].results.kind != TRAINING and any(not result.claim.is_ours for result in shown[0].claims)
        shown += _beside(results, out, [kind for kind in (TRAINING, SPEED) if is_paper and kind not in studies_of])
        from numdev.report.document.pages import write_html, write_pdf  # late: nothing else needs templates of pages

        if "html" in formats:
            write_atomically(out / "report.html", write_html(shown, notes, title, author))
        if "pdf" in formats:
            write_atomically(out / "report.pdf", write_pdf(shown, title, author))
    return [status for part in parts for status in part.results.points.drop_duplicates("key")["status"]]


def _by_kind(store: Store, studies: Sequence[str] | None) -> dict[str, Sequence[str] | None]:
    """The names of some studies and sweeps, by kind; of one that is not there as if it were of deviation, for the error."""
    kinds = {name: str(manifest.get("kind", DEVIATION)) for name, manifest in store.studies().items()}
    by_kind: dict[str, list[str]] = {}
    for name in kinds if studies is None else studies:
        by_kind.setdefault(kinds.get(name, DEVIATION), []).append(name)
    return {**by_kind}


def write_part(
    results: Results, out: Path, console: Console, plot: Mapping[str, Any] | None = None, *, csv: bool = False
) -> tuple[Part, list[str]]:
    """Write the tables, the claims and the figures of one kind of measurement into `out`, and print; returns notes too."""
    chosen = None
    if plot:  # checked before anything is written
        whole = tidy(results)
        chosen = Picture(plot_of(whole, plot), whole)
    claims = _judged(results)
    write_tables(results, claims, out, csv)
    pictures, notes = write_figures(results, claims, out / "figures", chosen)
    notes = [*filter(None, [bad_outputs(results)]), *results.notes, *unknown(claims_of(results), results.manifests), *notes]
    for text in notes:
        console.print(f"note: {text}", markup=False, highlight=False)
    tables = [printed(failures([results]), "Points without a full result")]
    if results.kind == SPEED:
        tables.append(printed(latest(of_attention(results)), "At the greatest length"))
    for table in (*tables, claims_table(claims) if claims else None):
        if table is not None:
            console.print(table)
    return Part(results, claims, pictures), notes


def _judged(results: Results) -> list[ClaimResult]:
    """The claims on some results; none on speed of which nothing is measured."""
    return judge(claims_of(results), results) if len(results.primary) or results.kind != SPEED else []


def _beside(results: Path, out: Path, kinds: Sequence[str]) -> Iterator[Part]:
    """Read the results of other kinds of measurement in their folders, and draw their figures for the document."""
    for kind in kinds:
        store = Store(results / kind)
        if any(manifest.get("kind") == kind for manifest in store.studies().values()):
            loaded = load(store, kind=kind)
            claims = _judged(loaded)
            pictures, _ = write_figures(loaded, claims, out / "figures")
            yield Part(loaded, claims, pictures)
