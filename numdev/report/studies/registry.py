"""Every chapter, claim and figure that the modules of this folder declare, and the words of every operation.

What the files of studies state besides, their manifests keep: `claims_of` and `chapter_of` have both.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pandas as pd

from numdev.report import studies
from numdev.report.claims.claim import Claim
from numdev.report.figures.plot import Plot
from numdev.report.reading.frames import Results
from numdev.report.reading.wording import PLAIN, Words
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.own import own_chapter, stated_claims


def _declared() -> Iterator[dict[str, Any]]:
    for module in iter_modules(studies.__path__, f"{studies.__name__}."):
        if module.name != __name__:
            yield vars(import_module(module.name))


_MODULES = tuple(_declared())
_chapters: Iterator[Chapter] = (chapter for module in _MODULES for chapter in module.get("CHAPTERS", ()))
CHAPTERS: tuple[Chapter, ...] = tuple(sorted(_chapters, key=lambda chapter: chapter.place))
CLAIMS: dict[str, Claim] = {claim.name: claim for chapter in CHAPTERS for claim in chapter.claims}
FIGURES: dict[str, Plot] = {name: plot for chapter in CHAPTERS for name, plot in chapter.figures.items()}
WORDS: dict[str, Words] = {
    module["WORDS"].operation: module["WORDS"] for module in _MODULES if isinstance(module.get("WORDS"), Words)
}


def words_of(points: pd.DataFrame) -> Words:
    """The words for the operation of some points; plain ones where there are several, or where no module knows it."""
    operations = points["operation"].dropna().unique().tolist()
    return WORDS.get(operations[0], PLAIN) if len(operations) == 1 else PLAIN


def claims_of(results: Results) -> dict[str, Claim]:
    """Every claim that ships with numdev, then those that the files of the results' studies state, by name."""
    own = {name: claim for study in results.manifests for name, claim in _stated(results, study).items()}
    return CLAIMS | own


def chapter_of(results: Results, study: str) -> Chapter:
    """The chapter of a study: its module's, or what its file says, in text that is no markup."""
    known = next((chapter for chapter in CHAPTERS if chapter.study == study), None)
    if known is not None:
        return known
    operations = set(results.points["operation"][results.points["study"] == study])
    like = next((chapter for chapter in CHAPTERS if chapter.table is not None and operations == {chapter.operation}), None)
    return own_chapter(results.manifests[study], tuple(_stated(results, study).values()), like)


def _stated(results: Results, study: str) -> dict[str, Claim]:
    return stated_claims(results, study, words_of(results.points[results.points["study"] == study]))
