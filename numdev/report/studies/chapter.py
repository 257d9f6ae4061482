"""What a report knows of one study: the words of its section, the claims that it serves, and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from numdev.report.claims.claim import Claim
from numdev.report.figures.plot import Plot


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
