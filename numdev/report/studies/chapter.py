"""What a report knows of one study: the words of its section, the claims that it serves, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pandas as pd

from numdev.report.claims.claim import Claim
from numdev.report.figures.plot import Plot
from numdev.report.reading.frames import Results


@dataclass(frozen=True)
class Chapter:
    """A study's part of the report; texts are Typst markup.

    Attributes:
        place: its place among the chapters, which is that of its claims in the table too.
        study: whose results it shows.
        title: of the section.
        question: what the study asks.
        measured: on what.
        paper: what the source says.
        claims: with the evidence for each.
        figures: by the name that a study's file gives them.
        operation: of which the study measures implementations.
        by_claim: whether what is found stands under the text of each claim, where there are too many for one paragraph.
        table: a table of text for a reader, of the results and the name of the study.
        with_points: whether a table of the deviation of every point is shown, where `table` is none.
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
    table: Callable[[Results, str], pd.DataFrame] | None = None
    with_points: bool = False
