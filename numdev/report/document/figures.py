"""The figures of a report as PNG and SVG: those that studies name or describe, the usual one, and one of somebody's choice."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd

from numdev.errors import BadInput
from numdev.report.claims.verdicts import ClaimResult
from numdev.report.figures.plot import NEEDED, POINTS, Plot, default_of, plot_of
from numdev.report.figures.theme import to_png, to_svg
from numdev.report.reading.frames import SPEED, TRAINING, Results, is_own
from numdev.report.reading.scenarios import LABEL
from numdev.report.reading.view import of_comparison, tidy
from numdev.report.studies.registry import FIGURES, own_plot, own_plots
from numdev.report.studies.speed import SPEED_FIGURES, frame, of_attention
from numdev.results.environment import usable_cores
from numdev.results.files import write_atomically

_FEWEST = 8  # figures; to start processes for fewer takes about as long as it saves
_DEFAULT = {TRAINING: "training_ladder"}  # of a kind of measurement whose rows `POINTS` cannot draw


@dataclass(frozen=True)
class Picture:
    """A figure that is to be drawn: by `plot`, from `rows`.

    Attributes:
        title: of the figure; that of the plot unless given.
        findings: sentences that end its description.
        about: its description below it in a document, where the title says less.
    """

    plot: Plot
    rows: pd.DataFrame
    title: str = ""
    findings: tuple[str, ...] = ()
    about: str = ""

    @property
    def caption(self) -> str:
        return self.title or self.plot.title

    @property
    def alt(self) -> str:
        return " ".join([self.plot.alt, *self.findings])

    def write(self, path: Path) -> None:
        """Write PNG and SVG; `path` is without its suffix."""
        figure = self.plot(self.rows)
        write_atomically(path.with_name(f"{path.name}.png"), to_png(figure))
        write_atomically(path.with_name(f"{path.name}.svg"), to_svg(figure, self.caption, self.alt))


Pictures = dict[str, dict[Path, Picture]]  # of each study, by the path without its suffix


def write_all(pictures: Mapping[Path, Picture], workers: int | None = None) -> None:
    """Write figures by their paths, the same bytes by any number of processes.

    Drawing takes most of a report's time, so there is a process for each usable core if there are many figures, on Linux, unless
    `workers` says how many.

    Raises:
        StoreError: if a file cannot be written.
    """
    _pictures[:] = pictures.items()
    count = workers or (min(usable_cores(), len(pictures) // (_FEWEST // 2)) if sys.platform == "linux" else 1)
    if count < 2 or len(pictures) < 2:
        for path, picture in _pictures:
            picture.write(path)
        return
    with ProcessPoolExecutor(count, get_context("fork")) as pool:
        list(pool.map(_write, range(len(pictures))))


_pictures: list[tuple[Path, Picture]] = []  # a forked process has them; what draws them cannot be sent to it


def _write(place: int) -> None:
    path, picture = _pictures[place]
    picture.write(path)


def figure_of(results: Results, plot: Mapping[str, Any]) -> Picture:
    """The figure that somebody asks for of some studies and sweeps of one kind, over every column that they have.

    Raises:
        BadInput: for a name that they do not have.
    """
    rows = of_comparison(results, plot)
    return Picture(plot_of(rows, plot), rows)


def write_figures(
    results: Results, claims: Sequence[ClaimResult], folder: Path, chosen: Picture | None = None
) -> tuple[Pictures, list[str]]:
    """Draw the figures of every study; returns those of each, and a note on each that could not be drawn.

    The figure `chosen` takes the place of that of a single study or sweep which names none, and else stands beside the others.
    """
    notes: list[str] = []
    only = next(iter(results.manifests)) if len(results.manifests) == 1 else ""
    replaces = chosen is not None and bool(only) and results.kind != SPEED and _names(results.manifests[only]) == [""]
    if results.kind == SPEED:
        made = _timed(results)
    else:
        studies = () if replaces else results.manifests
        made = {study: _of_study(results, study, claims, notes) for study in studies}
    pictures = {study: {folder / name: picture for name, picture in own.items()} for study, own in made.items()}
    if chosen is not None:
        pictures.setdefault(only, {})[folder / (only if replaces else f"{only}_plot" if only else "plot")] = chosen
    write_all({path: picture for own in pictures.values() for path, picture in own.items()})
    return pictures, notes


def _of_study(results: Results, study: str, claims: Sequence[ClaimResult], notes: list[str]) -> dict[str, Picture]:
    """The figures of a study by the names of their files; of what cannot be drawn there is a note."""
    manifest, pictures = results.manifests[study], dict[str, Picture]()
    for name in (names := _names(manifest)):
        picture = _picture(results, study, name)
        if isinstance(picture, str):
            notes.append(f"{study}: {picture}")
            continue
        file, title = (study, manifest["title"]) if name == names[0] else (f"{study}_{name}", picture.plot.title)
        shown = (own.findings for own in claims if own.study == study and own.claim.figure == name)
        findings = tuple(f"{scenario.title}: {finding.figure}." for own in shown for scenario, finding in own.items())
        pictures[file] = replace(picture, title=title or manifest["title"], findings=findings)
    return pictures


def _names(manifest: Mapping[str, Any]) -> list[str]:
    """The figures of a study: what it names or describes, those of its claims, and more; else the usual one, which is ''."""
    first = [manifest["figure"]] if manifest["figure"] else [""] if manifest.get("plot") else []
    of_claims = (name for name in manifest["claims"] if name in FIGURES)
    default = "" if manifest["swept"] is not None else _DEFAULT.get(manifest["kind"], "")
    return list(dict.fromkeys([*first, *of_claims, *manifest.get("more", ())])) or [default]


def _picture(results: Results, study: str, name: str) -> Picture | str:
    """A figure of a study, the usual one where `name` is empty; or a note on why it is not drawn."""
    plots = FIGURES | own_plots(results.manifests[study])
    if name and name not in plots:
        return f"there is no figure {name}; there are {', '.join(plots)}"
    try:
        picture = (
            Picture(plots[name], results.study(study, plots[name].table), about=plots[name].alt)
            if name
            else usual(results, study)
        )
    except BadInput as error:
        return f"its figure is not drawn: {error}"
    plot, rows = picture.plot, picture.rows
    if rows.empty:
        return f"nothing is measured, so {f'figure {name}' if name else 'its figure'} is not drawn"
    if lacking := plot.lacks(rows):
        return f"figure {name} needs points with the labels {', '.join(lacking)}"
    return picture


def usual(results: Results, study: str) -> Picture:
    """The figure that a study describes; else, as of a sweep, its metric over its axes, or every point where it has too many.

    Raises:
        BadInput: if the rows do not have what the study describes, or those of a kind of the user's own differ in nothing.
    """
    manifest = results.manifests[study]
    rows = of_comparison(results, manifest.get("plot") or {}, study)
    plot = own_plot(manifest, rows)
    if plot is None and is_own([manifest]):
        plot = plot_of(rows, {})
    elif plot is None and manifest["swept"] != [] and len(rows):
        plot = default_of(rows)
    if plot is not None:
        return Picture(plot, rows)
    names = [name for name in results.primary.columns if name in ("study", "key", *NEEDED) or name.startswith(LABEL)]
    of_golden = results.primary.where(study=study, primary=True, reference="golden")
    return Picture(POINTS, tidy(results, of_golden, names))


def _timed(results: Results) -> dict[str, dict[str, Picture]]:
    """The figures of studies of speed: those of attention of every study, of a sweep its own, and what a study describes."""
    rows, of_all = of_attention(frame(results)), tidy(results)
    pictures: dict[str, dict[str, Picture]] = {}
    for study, manifest in results.manifests.items():
        of_shapes, own = rows[rows["study"] == study], of_all[of_all["study"] == study]
        is_study = manifest["swept"] is None and len(of_shapes)
        pictures[study] = {f"{study}_{name}": Picture(p, of_shapes) for name, p in SPEED_FIGURES.items() if is_study}
        plot = own_plot(manifest, own) or (default_of(own) if manifest["swept"] and len(own) else None)
        if plot is not None:
            pictures[study][study] = Picture(plot, own, str(manifest["title"]))
    return pictures
