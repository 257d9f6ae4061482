"""One claim: a sentence with its source, and what weighs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from numdev.report.claims.finding import Evidence, Finding, NotMeasured, Undecidable, judged
from numdev.report.reading.wording import PLAIN, Words, generality

OURS = "Our question"
"""The source of a claim that no paper makes."""


@dataclass(frozen=True)
class Claim:
    """One sentence that measurements can bear out or not.

    Attributes:
        name: as a study's manifest lists it.
        figure: the figure that shows it.
        text: the claim.
        source: where it is made, or to which claims of papers it is our question.
        test: weighs it on the rows of one scenario.
        across: whether the scenarios are the methods that the claim compares, so that it is judged once, on all of them.
        is_ours: whether no paper makes it, so that there is nothing to reproduce.
        words: for the operation of which it speaks.
        table: of the records whose rows it is weighed on; empty for the primary one.
    """

    name: str
    figure: str
    text: str
    source: str
    test: Callable[[pd.DataFrame], Evidence]
    across: bool = False
    is_ours: bool = False
    words: Words = PLAIN
    table: str = ""

    def weigh(self, rows: pd.DataFrame) -> Evidence:
        """Weighs the rows of one scenario. If they cannot answer, the evidence has no question and gives the reason."""
        try:
            return self.test(rows)
        except NotMeasured as reason:
            return Evidence("not measured", f"{str(reason)[:1].upper()}{str(reason)[1:]}.", is_measured=False)
        except Undecidable as reason:
            return Evidence("unknown", f"{str(reason)[:1].upper()}{str(reason)[1:]}.")

    def find(self, rows: pd.DataFrame) -> Finding:
        """The finding on the rows of one scenario alone."""
        return judged([self.weigh(rows)], [generality(rows, self.words)])[0]
