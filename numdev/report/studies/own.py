"""The chapter of a study without a module here: what its file says of it, and the claims that the file states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from numdev.report.claims.claim import Claim
from numdev.report.claims.stated import claim_of
from numdev.report.figures.plot import Plot
from numdev.report.figures.sweep import plot_of
from numdev.report.reading.frames import RUN, Results
from numdev.report.reading.scenarios import TITLE
from numdev.report.reading.wording import Words, wording_of_study
from numdev.report.studies.chapter import Chapter
from numdev.results.manifest import StatedClaim

MOST_ENTRIES = 100
"""Entries of an axis that the chapter of a study lists."""


def stated_claims(results: Results, study: str, words: Words) -> dict[str, Claim]:
    """The claims that a study's file states, by name, each on the table of the records that has its figure."""
    stated = {name: StatedClaim.read(own) for name, own in results.manifests[study].get("stated_claims", {}).items()}
    names = wording_of_study(results.manifests[study])
    return {name: claim_of(name, own, words, _table(results, own.column), names) for name, own in stated.items()}


def _table(results: Results, column: str) -> str:
    """The further table that has a figure which the primary one has not; of training those of whole runs come first."""
    if column in results.primary:
        return ""
    names = sorted(results.further, key=lambda name: name != RUN)
    return next((name for name in names if column in results.further[name]), "")


def own_chapter(manifest: Mapping[str, Any], claims: tuple[Claim, ...], like: Chapter | None = None) -> Chapter:
    """The chapter that a study's manifest tells, its texts as the file has them; `like` is a chapter on the same operation."""
    own = Chapter(0, manifest["name"], manifest["title"], manifest.get("question", ""), _measured(manifest), "", claims)
    own = replace(own, by_claim=len(claims) > 1, with_points=True)
    return own if like is None else replace(own, by_claim=like.by_claim, table=like.table, with_points=False)


def own_plot(manifest: Mapping[str, Any], rows: pd.DataFrame) -> Plot | None:
    """The figure that a study's file asks for, if it does; each scenario has a panel unless the file says otherwise.

    Raises:
        BadInput: if the rows do not have what is asked for.
    """
    stated = manifest.get("plot")
    if stated is None or rows.empty:
        return None
    shown = {stated["x"], *stated.get("colour", ()), *stated.get("facet", ())}
    apart = {"facet": [TITLE, *stated.get("facet", ())]} if TITLE not in shown and rows[TITLE].nunique() > 1 else {}
    return plot_of(rows, {**stated, **apart})


def _measured(manifest: Mapping[str, Any]) -> str:
    """The number of points, and the entries of every axis: `6 points: step (none, scores), sequence length N (256, 512)`."""
    entries: dict[str, dict[str, None]] = {}
    for point in manifest["points"]:
        for axis, label in point["labels"].items():
            entries.setdefault(axis, {})[str(label)] = None
    names = wording_of_study(manifest)
    axes = [f"{names.name(axis)} ({', '.join(_first(list(found)))})" for axis, found in entries.items()]
    count = len({point["key"] for point in manifest["points"]})
    return f"{count} {'point' if count == 1 else 'points'}{': ' if axes else ''}{', '.join(axes)}."


def _first(entries: list[str]) -> list[str]:
    left = len(entries) - MOST_ENTRIES
    return [*entries[:MOST_ENTRIES], f"and {left} more in points.csv"] if left > 0 else entries
