"""Every chapter, claim and figure that the files of the studies that ship with numdev state, and the words of every operation.

A study of a user's own is not among these files: its manifest keeps what its file states, and is read the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pandas as pd
import yaml

from numdev.report.claims.evidence import claim_of
from numdev.report.claims.verdicts import Claim
from numdev.report.figures.plot import Plot
from numdev.report.reading.frames import RUN, TRAINING, Results
from numdev.report.reading.wording import PLAIN, Words, wording_of_study
from numdev.report.studies import attention, training
from numdev.results.claim import ClaimStatement, named
from numdev.results.study import Study
from numdev.sources import config_folder

MOST_ENTRIES = 100
"""Entries of an axis that the chapter of a study lists."""
_OPERATION = "override /operation@_global_.operation"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, and not in every build of PyYAML
_DRAW = "numdev.report.figures.plot:draw"  # draws a figure of options alone
_LAST = 1000  # the place of a chapter whose file states none


@dataclass(frozen=True)
class Chapter:
    """A study's part of the report; texts are Typst markup."""

    place: int  # among the chapters, which is that of its claims in the table too
    study: str
    title: str
    question: str  # what the study asks
    measured: str  # on what
    paper: str  # what the source says
    claims: tuple[Claim, ...] = ()
    figures: Mapping[str, Plot] = field(default_factory=dict)
    operation: str = "attention"
    by_claim: bool = False  # whether findings stand under the text of each claim, where they are too many for one paragraph
    with_points: bool = False  # whether a table of the deviation of every point is shown


WORDS: dict[str, Words] = {words.operation: words for words in (attention.WORDS, attention.BACKWARD, training.WORDS)}


def _shipped() -> Iterator[Chapter]:
    """The chapter of each study that ships with numdev; the figure of a claim is the study's unless it names one."""
    for path in (config_folder() / "study").glob("*.yaml"):
        fields = _read(path)
        if "place" not in fields:
            continue
        defaults = [item[_OPERATION] for item in fields.get("defaults", ()) if isinstance(item, Mapping)]
        (operation,) = defaults or ["attention"]
        words, figure = WORDS.get(operation, PLAIN), fields.get("figure") or next(iter(fields.get("figures", ())), "")
        statements = [ClaimStatement.read(one) for one in fields.get("claims", ()) if not isinstance(one, str)]
        stated = {name: own for name, own in named(path.stem, tuple(statements)).items() if own is not None}
        claims = tuple(claim_of(name, own, words, figure) for name, own in stated.items())
        texts = {"measured": fields.get("measured", ""), "by_claim": operation == TRAINING}
        yield _chapter(path.stem, fields, claims, operation=operation, **texts)


def _read(path: Path) -> dict[str, Any]:
    """The fields of a study's file, over those of the files of studies in its defaults list."""
    fields: dict[str, Any] = yaml.load(path.read_text(), _LOADER)
    shared = [item.partition("@")[0] for item in fields.get("defaults", ()) if isinstance(item, str) and "@" in item]
    return {name: value for file in shared for name, value in _read(path.parent / f"{file}.yaml").items()} | fields


def _chapter(study: str, fields: Mapping[str, Any], claims: tuple[Claim, ...], **more: Any) -> Chapter:
    """The chapter that a study's file or its manifest tells."""
    texts = {"title": fields["title"], "question": fields.get("question", ""), "paper": fields.get("source", "")}
    return Chapter(fields.get("place", _LAST), study, claims=claims, figures=plots_of(fields), **texts, **more)


def plots_of(fields: Mapping[str, Any]) -> dict[str, Plot]:
    """The figures that a study's file, or its manifest, says how to draw, by name."""
    plots = {}
    for name, own in (fields.get("figures") or {}).items():
        draw = partial(_draw, own.get("draw", _DRAW), own.get("options") or {})
        plots[name] = Plot(draw, own["about"], tuple(own.get("needs", ())), own.get("title", ""), own.get("table", ""))
    return plots


def _draw(function: str, options: Mapping[str, Any], rows: pd.DataFrame) -> Any:
    """Calls `module:name`, whose module is imported first here: one of a figure takes long, and most figures are not drawn."""
    return resolve_name(function)(rows, **options)


CHAPTERS: tuple[Chapter, ...] = tuple(sorted(_shipped(), key=lambda chapter: chapter.place))
CLAIMS: dict[str, Claim] = {claim.name: claim for chapter in CHAPTERS for claim in chapter.claims}
FIGURES: dict[str, Plot] = {name: plot for chapter in CHAPTERS for name, plot in chapter.figures.items()}


def words_of(points: pd.DataFrame) -> Words:
    """The words for the operation of some points; plain ones where there are several, or where no study knows it."""
    operations = points["operation"].dropna().unique().tolist()
    return WORDS.get(operations[0], PLAIN) if len(operations) == 1 else PLAIN


def _is_there(function: str) -> bool:
    """Whether there is a function `module:name`; the manifest of an earlier version may name one that has gone."""
    try:
        return callable(resolve_name(function))
    except (ImportError, AttributeError):
        return False


def _is_judged(own: ClaimStatement) -> bool:
    """Whether its function is there and takes what it states: the manifest of an earlier version may state other options."""
    try:
        signature(resolve_name(own.judge)).bind(None, **({"region": None} if own.is_bounded else {}), **own.options)
    except (ImportError, AttributeError, TypeError):
        return False
    return True


def planned_claims(study: Study) -> list[Claim]:
    """The claims of a study that is to be measured, of which there need not be results."""
    stated = named(study.name, study.claims)
    return [CLAIMS[name] if own is None else claim_of(name, own) for name, own in stated.items() if own or name in CLAIMS]


def own_plots(manifest: Mapping[str, Any]) -> dict[str, Plot]:
    """The figures of a study's manifest whose functions are there."""
    stated = manifest.get("figures") or {}
    return {name: plot for name, plot in plots_of(manifest).items() if _is_there(stated[name].get("draw", _DRAW))}


def claims_of(results: Results) -> dict[str, Claim]:
    """Every claim that ships with numdev, as the studies' manifests have it where they do, then those of their own, by name."""
    return CLAIMS | {claim.name: claim for study in results.manifests for claim in _own_claims(results, study)}


def _own_claims(results: Results, study: str) -> tuple[Claim, ...]:
    """The claims that a study's manifest keeps, each on the table of the records that has its figure."""
    manifest, words = results.manifests[study], words_of(results.points[results.points["study"] == study])
    statements = {name: ClaimStatement.read(own) for name, own in manifest.get("stated_claims", {}).items()}
    names, figure = wording_of_study(manifest), manifest["figure"] or ""
    return tuple(
        claim_of(name, own, words, figure, _table(results, own.column), names)
        for name, own in statements.items()
        if name not in CLAIMS or not own.judge or _is_judged(own)
    )


def _table(results: Results, column: str) -> str:
    """The further table that has a figure which the primary one has not; of training those of whole runs come first."""
    if column in results.primary:
        return ""
    names = sorted(results.further, key=lambda name: name != RUN)
    return next((name for name in names if column in results.further[name]), "")


def chapter_of(results: Results, study: str) -> Chapter:
    """The chapter of a study: of its file, where that ships with numdev, or of its manifest, in text that is no markup."""
    for chapter in CHAPTERS:
        if chapter.study == study:
            return chapter
    manifest, claims = results.manifests[study], _own_claims(results, study)
    operations = set(results.points["operation"][results.points["study"] == study])
    operation = TRAINING if operations == {TRAINING} else ""
    by_claim, measured = operation == TRAINING or len(claims) > 1, manifest.get("measured") or _measured(manifest)
    return _chapter(study, manifest, claims, operation=operation, measured=measured, by_claim=by_claim, with_points=True)


def _measured(manifest: Mapping[str, Any]) -> str:
    """The number of points, and the entries of every axis: `6 points: step (none, scores), sequence length N (256, 512)`."""
    entries: dict[str, dict[str, None]] = {}
    for point in manifest["points"]:
        for axis, label in point["labels"].items():
            entries.setdefault(axis, {})[str(label)] = None
    names, axes = wording_of_study(manifest), []
    for axis, own in entries.items():
        more = [f"and {len(own) - MOST_ENTRIES} more in points.csv"] if len(own) > MOST_ENTRIES else []
        axes.append(f"{names.name(axis)} ({', '.join([*own][:MOST_ENTRIES] + more)})")
    count = len({point["key"] for point in manifest["points"]})
    return f"{count} {'point' if count == 1 else 'points'}{': ' if axes else ''}{', '.join(axes)}."
