"""Every chapter, claim and figure that the modules of this folder declare, and the words of every operation."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pandas as pd

from numdev.report import studies
from numdev.report.claims.claim import Claim
from numdev.report.figures.plot import Plot
from numdev.report.reading.words import PLAIN, Words
from numdev.report.studies.chapter import Chapter


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
