"""The report of some studies, made again from their results: tables, figures, claims. Nothing is measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import KIND as DEVIATION
from numdev.report.claims.verdicts import ClaimResult, judge, unknown
from numdev.report.document.asked import Asked, asked_of
from numdev.report.document.drawing import Picture, write_all
from numdev.report.document.export import write_tables
from numdev.report.document.kinds import load_own, write_own_tables
from numdev.report.document.markdown import claims_markdown
from numdev.report.document.part import Part
from numdev.report.document.speed import draw, judged, make_speed_report
from numdev.report.document.tables import bad_outputs, claims_table, failures_table, worst_table
from numdev.report.document.training import write_training_tables
from numdev.report.document.usual import usual
from numdev.report.figures.plot import Plot
from numdev.report.reading.frames import Results, load
from numdev.report.reading.kinds import SPEED
from numdev.report.reading.training import KIND as TRAINING
from numdev.report.reading.training import load_training
from numdev.report.studies.latency import frame
from numdev.report.studies.registry import FIGURES, claims_of
from numdev.results.store import Store, write_atomically


def make_report(
    results: Path,
    out: Path,
    studies: Sequence[str] | None = None,
    console: Console | None = None,
    *,
    formats: Collection[str] = (),
    plot: Mapping[str, Any] | None = None,
    title: str = "",
    author: str = "",
) -> bool:
    """Write tables, figures and claims of stored studies and sweeps into `out`, and print the claims.

    The first kind of measurement is written into `out`, each further one into a folder of its name. The documents have all of
    them but speed, and beside studies of a paper what `numdev train` and `numdev speed` left in the folders `training` and
    `speed` of `results`.

    Args:
        results: folder of a `Store`.
        out: folder of the report; files of the same name are replaced.
        studies: their names; all unless given.
        console: where to print.
        formats: beside the tables and figures: of `pdf`, report.pdf; of `html`, report.html, one file with the claims, the
            figures and a table of the rows; of `csv`, results.csv in place of results.parquet.
        plot: what a figure is asked to show, as `numdev.report.figures.sweep.plot_of` takes it.
        title: of the documents; names what was measured unless given.
        author: of the documents.

    Returns:
        Whether every output is finite and a result; see `numdev.report.document.tables.bad_outputs`.

    Raises:
        BadInput: if there are no results, or not those asked for, or if `plot` names what they do not have.
        StoreError: if a file cannot be written.
    """
    console, store = console or Console(), Store(results)
    wanted = _by_kind(store, studies)
    if plot and len(wanted) > 1:
        raise BadInput("plot", ", ".join(plot.values()), f"a figure is of one kind; name the studies of {' or '.join(wanted)}")
    timed = wanted.pop(SPEED, [])
    documents = [name for name in ("pdf", "html") if name in formats]
    if timed and not wanted and documents:
        raise BadInput("format", documents[0], "results of speed alone have tables and figures and no document; leave it out")
    parts: list[Part] = []
    notes: list[str] = []
    for kind in sorted(wanted, key=_place) if wanted or timed else (DEVIATION,):
        folder = out / kind if parts else out  # the tables of all kinds have the same names
        part, found = _report(store, kind, wanted.get(kind, studies), (folder, console), plot, csv="csv" in formats)
        parts.append(part)
        notes += found
    if parts and documents:
        beside = [kind for kind in (TRAINING, SPEED) if kind not in wanted] if _is_paper(parts[0]) else []
        _documents([*parts, *_beside(results, out, beside)], notes, out, documents, (title, author))
    sound = not any(bad_outputs(part.results) for part in parts)
    return (not timed or make_speed_report(results, out / SPEED if parts else out, console, timed, plot)) and sound


def _place(kind: str) -> tuple[bool, bool]:
    """Deviation first, then training, then kinds of the user's own."""
    return kind != DEVIATION, kind != TRAINING


def _is_paper(part: Part) -> bool:
    """Whether a part makes figures of a paper again, beside which those of training and of speed belong."""
    return not part.is_of_training and any(not found.claim.is_ours for found in part.claims)


def _report(
    store: Store,
    kind: str,
    names: Sequence[str] | None,
    written: tuple[Path, Console],
    plot: Mapping[str, Any] | None,
    *,
    csv: bool,
) -> tuple[Part, list[str]]:
    """Write the tables, the claims and the figures of one kind of measurement into the folder `written`, and print; notes too."""
    out, console = written
    loaded = _LOAD.get(kind, partial(load_own, kind=kind))(store, studies=names)
    asked = asked_of(loaded, plot) if plot else None  # checked before anything is written
    claims = judge(claims_of(loaded), loaded)
    _TABLES.get(kind, write_own_tables)(loaded, claims, out, csv)
    worst = worst_table(loaded) if kind == DEVIATION else None
    part = Part(loaded, claims, out / "figures")
    return part, _write_part(part, store.path, asked, console, failures_table(loaded), worst)


_LOAD: Mapping[str, Callable[..., Results]] = {DEVIATION: partial(load, kind=DEVIATION), TRAINING: load_training}
_TABLES = {DEVIATION: write_tables, TRAINING: write_training_tables}


def _by_kind(store: Store, studies: Sequence[str] | None) -> dict[str, list[str]]:
    """The names of the studies and sweeps wanted, by kind; of one that is not there as if it were of deviation, for the error."""
    kinds = {name: str(manifest.get("kind", DEVIATION)) for name, manifest in store.studies().items()}
    found: dict[str, list[str]] = {}
    for name in kinds if studies is None else studies:
        found.setdefault(kinds.get(name, DEVIATION), []).append(name)
    return found


def _write_part(part: Part, home: Path, asked: Asked | None, console: Console, *tables: Table | None) -> list[str]:
    """Write claims.md and the figures of a part; print and return notes, and print the tables and the claims.

    `home` is the folder of the results, `asked` a figure beside those of the studies.
    """
    out, claims, results = part.figures.parent, list(part.claims), part.results
    write_atomically(out / "claims.md", claims_markdown(claims).encode())
    drawn = write_figures(results, claims, part.figures, home, asked)
    notes = [*filter(None, [bad_outputs(results)]), *results.notes, *unknown(claims_of(results), results.manifests), *drawn]
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    for table in (*tables, claims_table(claims) if claims else None):
        if table is not None:
            console.print(table)
    return notes


def _documents(parts: list[Part], notes: list[str], out: Path, formats: Collection[str], head: tuple[str, str]) -> None:
    """Write report.pdf and report.html, whichever is wanted; `head` is their title and author."""
    if "html" in formats:
        from numdev.report.document.html import write_html  # late: nothing else needs templates of pages

        write_atomically(out / "report.html", write_html(parts, notes, *head))
    if "pdf" in formats:
        from numdev.report.document.pdf import write_pdf  # late: the typesetter is large

        write_atomically(out / "report.pdf", write_pdf(parts, *head))


def _beside(results: Path, out: Path, kinds: Iterable[str]) -> Iterator[Part]:
    """What commands of other kinds of measurement left in folders of the results, with figures drawn for the document."""
    for kind in kinds:
        store = Store(results / kind)
        if not any(manifest.get("kind") == kind for manifest in store.studies().values()):
            continue
        if kind == TRAINING:
            loaded = load_training(store)
            part = Part(loaded, judge(claims_of(loaded), loaded), out / "figures")
            write_figures(loaded, list(part.claims), part.figures, store.path)
        else:
            loaded = load(store, kind=kind)
            part = Part(loaded, judged(loaded), out / "figures")
            draw(loaded, frame(loaded), part.figures)
        yield part


def write_figures(
    results: Results, claims: list[ClaimResult], folder: Path, home: Path = Path(), asked: Asked | None = None
) -> list[str]:
    """Draws the figures of every study as PNG and SVG; returns a note on each that could not be drawn.

    `home` is the folder of the results, in which columns of paths (`Plot.files`) name files. The figure `asked` takes the place
    of that of a single study or sweep which names none, and else stands beside the others.
    """
    notes: list[str] = []
    pictures: list[Picture] = []
    only = next(iter(results.manifests)) if len(results.manifests) == 1 else ""
    for study, manifest in results.manifests.items():
        names = _figures(manifest)
        if asked is not None and study == only and names == [""]:
            asked.write(folder / study)
            return notes
        for name in names:
            try:
                plot, rows = _named(results, study, name, home) if name else usual(results, study)
            except BadInput as reason:
                notes.append(f"{study}: its figure is not drawn: {reason}")
                continue
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
                file, title = (study, manifest["title"]) if name == names[0] else (f"{study}_{name}", plot.title)
                told = tuple(_findings(claims, study, name))
                pictures.append(Picture(folder / file, plot, rows, title or manifest["title"], told))
    write_all(pictures)
    if asked is not None:
        asked.write(folder / (f"{only}_plot" if only else "plot"))
    return notes


def _named(results: Results, study: str, name: str, home: Path) -> tuple[Plot | None, pd.DataFrame]:
    """A figure of numdev, None for one that there is not, and its rows with the paths of files as they can be opened."""
    plot = FIGURES.get(name)
    if plot is None:
        return None, pd.DataFrame()
    rows = results.study(study, plot.table)
    columns = [column for column in plot.files if column in rows]
    named = {column: [str(home / name) if name else "" for name in rows[column].fillna("")] for column in columns}
    return plot, rows.assign(**named) if named else rows


_DEFAULT = {TRAINING: "training_ladder"}  # of a kind of measurement whose rows `POINTS` cannot draw


def _figures(manifest: dict[str, Any]) -> list[str]:
    """The figure that a study names or describes, those of its claims, and more; without any that of its kind, or `POINTS`."""
    named = [manifest["figure"]] if manifest["figure"] else [""] if manifest.get("plot") else []
    claimed = (name for name in manifest["claims"] if name in FIGURES)
    usual = "" if manifest["swept"] is not None else _DEFAULT.get(manifest["kind"], "")
    return list(dict.fromkeys([*named, *claimed, *manifest.get("more", ())])) or [usual]


def _findings(claims: list[ClaimResult], study: str, figure: str) -> Iterator[str]:
    """The findings that a figure shows, for its description."""
    for result in claims:
        if result.study == study and result.claim.figure == figure:
            yield from (f"{scenario.title}: {finding.figure}." for scenario, finding in result.findings.items())
