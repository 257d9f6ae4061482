"""Every chapter, claim and figure that the modules of this folder declare."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from numdev.report import studies
from numdev.report.claims.claim import Claim
from numdev.report.figures.plot import Plot
from numdev.report.studies.chapter import Chapter


def _declared() -> Iterator[Chapter]:
    for module in iter_modules(studies.__path__, f"{studies.__name__}."):
        if module.name != __name__:
            yield from getattr(import_module(module.name), "CHAPTERS", ())


CHAPTERS: tuple[Chapter, ...] = tuple(sorted(_declared(), key=lambda chapter: chapter.place))
CLAIMS: dict[str, Claim] = {claim.name: claim for chapter in CHAPTERS for claim in chapter.claims}
FIGURES: dict[str, Plot] = {name: plot for chapter in CHAPTERS for name, plot in chapter.figures.items()}
