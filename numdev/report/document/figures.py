"""The figures of a report as PNG and SVG: those that studies name or describe, the usual one, and one of somebody's choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from numdev.errors import BadInput
from numdev.report.claims.verdicts import ClaimResult
from numdev.report.figures.plot import Plot, plot_of
from numdev.report.figures.theme import to_png, to_svg
from numdev.report.reading.frames import SPEED, TITLE, TRAINING, Results, with_overrides
from numdev.report.reading.view import tidy
from numdev.report.studies.registry import FIGURES, own_plots
from numdev.report.studies.speed import SPEED_FIGURES, of_attention
from numdev.results.record import write_atomically


@dataclass(frozen=True)
class Picture:
    """A figure, drawn by `plot` from `rows`."""

    plot: Plot
    rows: pd.DataFrame
    path: Path = Path()  # of its files, without the suffix
    title: str = ""  # that of the plot unless given
    findings: tuple[str, ...] = ()  # sentences that end its description
    about: str = ""  # its description below it in a document, where the title says less

    @property
    def caption(self) -> str:
        return self.title or self.plot.title

    @property
    def alt(self) -> str:
        return " ".join([self.plot.alt, *self.findings])

    @property
    def svg(self) -> Path:
        return self.path.with_name(f"{self.path.name}.svg")

    def write(self) -> Picture:
        """Write PNG and SVG, which are the same bytes for the same rows."""
        figure = self.plot(self.rows)
        write_atomically(self.path.with_name(f"{self.path.name}.png"), to_png(figure))
        write_atomically(self.svg, to_svg(figure, self.caption, self.alt))
        return self


def write_figures(
    results: Results, claims: Sequence[ClaimResult], folder: Path, chosen: Picture | None = None
) -> tuple[dict[str, list[Picture]], list[str]]:
    """Draw the figures of every study; returns those of each, and a note on each that could not be drawn.

    The figure `chosen`, of all studies, is `plot` and stands in the section of the first.

    Raises:
        StoreError: if a file cannot be written.
    """
    every = {study: list(_of_study(results, study, claims)) for study in results.manifests}
    if chosen is not None:
        next(iter(every.values())).append(replace(chosen, path=Path("plot")))
    notes = [f"{study}: {own}" for study, pictures in every.items() for own in pictures if isinstance(own, str)]
    drawn = {study: [own for own in pictures if isinstance(own, Picture)] for study, pictures in every.items()}
    return {study: [replace(own, path=folder / own.path).write() for own in pictures] for study, pictures in drawn.items()}, notes


def _of_study(results: Results, study: str, claims: Sequence[ClaimResult]) -> Iterator[Picture | str]:
    """The figures of a study; in place of one that cannot be drawn, why."""
    manifest = results.manifests[study]
    for place, name in enumerate(_names(results, study)):
        picture = _picture(results, study, name)
        if isinstance(picture, str):
            yield picture
            continue
        is_first = place == 0 and name not in SPEED_FIGURES
        shown = (own.findings for own in claims if own.study == study and own.claim.figure == name)
        findings = tuple(f"{scenario.title}: {finding.figure}." for own in shown for scenario, finding in own.items())
        title = with_overrides(manifest["title"] if is_first else picture.plot.title or manifest["title"], manifest)
        yield replace(picture, path=Path(study if is_first else f"{study}_{name}"), title=title, findings=findings)


def _names(results: Results, study: str) -> list[str]:
    """The figures of a study: what it names or describes, those of its claims, and more; else the usual one, which is ''."""
    manifest = results.manifests[study]
    first = [manifest["figure"]] if manifest["figure"] else [""] if manifest.get("plot") else []
    names = [*first, *(name for name in manifest["claims"] if name in FIGURES), *manifest.get("more", ())]
    if results.kind == SPEED:
        is_attention = "attention" in results.points["operation"][results.points["study"] == study].tolist()
        names += [""] if manifest["swept"] else [*SPEED_FIGURES] if manifest["swept"] is None and is_attention else []
    elif not names:
        names = ["training_ladder" if results.kind == TRAINING and manifest["swept"] is None else ""]
    return list(dict.fromkeys(names))


def _picture(results: Results, study: str, name: str) -> Picture | str:
    """A figure of a study, the usual one where `name` is empty; or why it is not drawn."""
    plots = FIGURES | SPEED_FIGURES | own_plots(results.manifests[study])
    if name and name not in plots:
        return f"there is no figure {name}; there are {', '.join(plots)}"
    if name:
        rows = of_attention(results, study) if name in SPEED_FIGURES else results.study(study, plots[name].table)
    else:
        rows = tidy(results, results.primary.where(study=study))
    if rows.empty:
        return f"nothing is measured, so {f'figure {name}' if name else 'its figure'} is not drawn"
    try:
        plot = plots[name] if name else plot_of(rows, _view(results.manifests[study].get("plot") or {}, rows))
    except BadInput as error:
        return f"its figure is not drawn: {error}"
    if lacking := plot.lacks(rows):
        return f"figure {name} needs points with the labels {', '.join(lacking)}"
    return Picture(plot, rows, about=plot.alt if name and name not in SPEED_FIGURES else "")


def _view(plot: Mapping[str, Any], rows: pd.DataFrame) -> Mapping[str, Any]:
    """What a study says of its figure; each scenario has a panel unless it says otherwise."""
    shown = {plot.get("x"), *plot.get("colour", ()), *plot.get("facet", ())}
    apart = plot and TITLE not in shown and rows[TITLE].nunique() > 1
    return {**plot, "facet": [TITLE, *plot.get("facet", ())]} if apart else plot
