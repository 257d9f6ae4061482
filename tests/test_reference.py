"""The reference results are whole: verdicts that a report can give, figures with words, and who made them.

Their wording is that of the numdev that made them, and binds nobody.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from numdev.report.claims.verdicts import Verdict

REFERENCE = Path(__file__).resolve().parent.parent / "reports" / "reference"


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("**/claims.csv")), ids=lambda path: path.parent.name)
def test_every_claim_has_a_verdict_and_a_figure(path: Path) -> None:
    rows = list(csv.DictReader(path.open(newline="")))
    assert rows
    for row in rows:
        assert Verdict(row["verdict"])
        assert row["claim"]
        assert row["figure"]
        assert row["sentence"].endswith(".")
