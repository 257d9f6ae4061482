"""Every chapter, claim and figure that the files of the studies that ship with numdev state, and the words of every operation.

A study of a user's own is not among these files: its manifest keeps what its file states, and is read the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pandas as pd
import yaml

import numdev
from numdev.report.claims.evidence import claim_of
from numdev.report.claims.verdicts import Claim
from numdev.report.figures.plot import Plot, plot_of
from numdev.report.reading.frames import RUN, TRAINING, Results
from numdev.report.reading.scenarios import TITLE
from numdev.report.reading.wording import PLAIN, Words, wording_of_study
from numdev.report.studies import attention, training
from numdev.results.claim import ClaimStatement, named

MOST_ENTRIES = 100
"""Entries of an axis that the chapter of a study lists."""
_OPERATION = "override /operation@_global_.operation"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, and not in every build of PyYAML
_DRAW = "numdev.report.figures.plot:draw"  # draws a figure of options alone
_LAST = 1000  # the place of a chapter whose file states none


@dataclass(frozen=True)
class Chapter:
    """A study's part of the report; texts are Typst markup.

    Attributes:
        place: its place among the chapters, which is that of its claims in the table too.
        question, measured, paper: what the study asks, on what, and what the source says.
        by_claim: whether what is found stands under the text of each claim, where there are too many for one paragraph.
        with_points: whether a table of the deviation of every point is shown.
    """

    place: int
    study: str
    title: str
    question: str
    measured: str
    paper: str
    claims: tuple[Claim, ...] = ()
    figures: Mapping[str, Plot] = field(default_factory=dict)
    operation: str = "attention"
    by_claim: bool = False
    with_points: bool = False


WORDS: dict[str, Words] = {words.operation: words for words in (attention.WORDS, attention.BACKWARD, training.WORDS)}


def _folder() -> Path:
    """The studies that ship with numdev: in an installed package, or beside it in a checkout."""
    package = Path(numdev.__file__).resolve().parent
    return next(path for path in (package / "configs/study", package.parent / "configs/study") if path.is_dir())


def _chapter(
    study: str, fields: Mapping[str, Any], claims: Iterable[Claim], operation: str, *, measured: str = "", is_shipped: bool = True
) -> Chapter:
    """The chapter that a study's file or its manifest tells."""
    own = tuple(claims)
    return Chapter(
        fields.get("place", _LAST),
        study,
        fields["title"],
        fields.get("question", ""),
        fields.get("measured") or measured,
        fields.get("source", ""),
        own,
        plots_of(fields),
        operation,
        by_claim=operation == TRAINING or (not is_shipped and len(own) > 1),
        with_points=not is_shipped,
    )


def _shipped_claims(study: str, fields: Mapping[str, Any], words: Words) -> Iterator[Claim]:
    """The claims that a study's file states; their figure is the study's unless they name one."""
    statements = [ClaimStatement.read(one) for one in fields.get("claims", ()) if not isinstance(one, str)]
    for name, own in named(study, tuple(statements)).items():
        if own is not None:
            yield claim_of(name, replace(own, figure=own.figure or fields.get("figure") or ""), words)


def _is_there(function: str) -> bool:
    """Whether there is a function `module:name`; the manifest of an earlier version may name one that has gone."""
    try:
        return callable(resolve_name(function))
    except (ImportError, AttributeError):
        return False


def plots_of(fields: Mapping[str, Any]) -> dict[str, Plot]:
    """The figures that a study's file, or its manifest, says how to draw, by name."""
    plots = {}
    for name, own in (fields.get("figures") or {}).items():
        draw = partial(_draw, own.get("draw", _DRAW), own.get("options") or {})
        plots[name] = Plot(draw, own["about"], tuple(own.get("needs", ())), own.get("title", ""), own.get("table", ""))
    return plots


def own_plots(manifest: Mapping[str, Any]) -> dict[str, Plot]:
    """Those of a study's manifest whose functions are there."""
    functions = {name: own.get("draw", _DRAW) for name, own in (manifest.get("figures") or {}).items()}
    return {name: plot for name, plot in plots_of(manifest).items() if _is_there(functions[name])}


def _draw(function: str, options: Mapping[str, Any], rows: pd.DataFrame) -> Any:
    """Calls `module:name`, whose module is imported first here: one of a figure takes long, and most figures are not drawn."""
    return resolve_name(function)(rows, **options)


def _shipped() -> list[Chapter]:
    chapters = []
    for path in sorted(_folder().glob("*.yaml")):
        fields = yaml.load(path.read_text(), _LOADER)
        defaults = [item[_OPERATION] for item in fields.get("defaults", ()) if isinstance(item, Mapping)]
        if "place" in fields:
            (operation,) = defaults or ["attention"]
            claims = _shipped_claims(path.stem, fields, WORDS.get(operation, PLAIN))
            chapters.append(_chapter(path.stem, fields, claims, operation))
    return sorted(chapters, key=lambda chapter: chapter.place)


CHAPTERS: tuple[Chapter, ...] = tuple(_shipped())
CLAIMS: dict[str, Claim] = {claim.name: claim for chapter in CHAPTERS for claim in chapter.claims}
FIGURES: dict[str, Plot] = {name: plot for chapter in CHAPTERS for name, plot in chapter.figures.items()}


def words_of(points: pd.DataFrame) -> Words:
    """The words for the operation of some points; plain ones where there are several, or where no study knows it."""
    operations = points["operation"].dropna().unique().tolist()
    return WORDS.get(operations[0], PLAIN) if len(operations) == 1 else PLAIN


def claims_of(results: Results) -> dict[str, Claim]:
    """Every claim that ships with numdev, as the studies' manifests have it where they do, then those of their own, by name."""
    return CLAIMS | {name: claim for study in results.manifests for name, claim in _own_claims(results, study).items()}


def _own_claims(results: Results, study: str) -> dict[str, Claim]:
    """The claims that a study's manifest keeps, each on the table of the records that has its figure."""
    manifest, words = results.manifests[study], words_of(results.points[results.points["study"] == study])
    statements = {name: ClaimStatement.read(own) for name, own in manifest.get("stated_claims", {}).items()}
    names, figure = wording_of_study(manifest), manifest["figure"] or ""
    return {
        name: claim_of(name, replace(own, figure=own.figure or figure), words, _table(results, own.column), names)
        for name, own in statements.items()
        if name not in CLAIMS or not own.judge or _is_there(own.judge)
    }


def _table(results: Results, column: str) -> str:
    """The further table that has a figure which the primary one has not; of training those of whole runs come first."""
    if column in results.primary:
        return ""
    names = sorted(results.further, key=lambda name: name != RUN)
    return next((name for name in names if column in results.further[name]), "")


def chapter_of(results: Results, study: str) -> Chapter:
    """The chapter of a study: of its file, where that ships with numdev, or of its manifest, in text that is no markup."""
    known = next((chapter for chapter in CHAPTERS if chapter.study == study), None)
    if known is not None:
        return known
    operations = set(results.points["operation"][results.points["study"] == study])
    operation = TRAINING if operations == {TRAINING} else ""
    return own_chapter(results.manifests[study], _own_claims(results, study).values(), operation)


def own_chapter(manifest: Mapping[str, Any], claims: Iterable[Claim] = (), operation: str = "") -> Chapter:
    """The chapter that a study's manifest tells, its texts as the file has them."""
    return _chapter(manifest["name"], manifest, claims, operation, measured=_measured(manifest), is_shipped=False)


def own_plot(manifest: Mapping[str, Any], rows: pd.DataFrame) -> Plot | None:
    """The figure that a study's file asks for, if it does; each scenario has a panel unless the file says otherwise.

    Raises:
        BadInput: if the rows do not have what is asked for.
    """
    view = manifest.get("plot")
    if view is None or rows.empty:
        return None
    shown = {view["x"], *view.get("colour", ()), *view.get("facet", ())}
    apart = {"facet": [TITLE, *view.get("facet", ())]} if TITLE not in shown and rows[TITLE].nunique() > 1 else {}
    return plot_of(rows, {**view, **apart})


def _measured(manifest: Mapping[str, Any]) -> str:
    """The number of points, and the entries of every axis: `6 points: step (none, scores), sequence length N (256, 512)`."""
    entries: dict[str, dict[str, None]] = {}
    for point in manifest["points"]:
        for axis, label in point["labels"].items():
            entries.setdefault(axis, {})[str(label)] = None
    names = wording_of_study(manifest)
    axes = []
    for axis, own in entries.items():
        more = [f"and {len(own) - MOST_ENTRIES} more in points.csv"] if len(own) > MOST_ENTRIES else []
        axes.append(f"{names.name(axis)} ({', '.join([*own][:MOST_ENTRIES] + more)})")
    count = len({point["key"] for point in manifest["points"]})
    return f"{count} {'point' if count == 1 else 'points'}{': ' if axes else ''}{', '.join(axes)}."
