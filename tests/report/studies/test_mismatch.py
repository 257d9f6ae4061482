"""Evidence on log-probabilities: means and growth of figures that are known."""

from __future__ import annotations

import pandas as pd
import pytest

from numdev.report.claims.verdicts import NotMeasured, Region, Verdict
from numdev.report.studies.mismatch import weigh_growth, weigh_mean

ROWS = pd.DataFrame(
    {"seed": seed, "position": n, "label.cure": cure, "std": (1 + seed / 100) * n**0.5 * (1 if cure == "none" else 9)}
    for seed in range(4)
    for n in (16, 32, 64)
    for cure in ("none", "FP32 head")
)


def test_growth_is_that_of_the_rows_that_are_asked_for() -> None:
    evidence = weigh_growth(ROWS, Region(0.4, 0.6), metric="std", where={"label.cure": "none"})
    (question,) = evidence.questions
    assert question.value.estimate == pytest.approx(0.5)
    assert question.region.verdict(question.value) is Verdict.HOLDS


def test_a_mean_is_over_replicates() -> None:
    own = {"label.cure": "FP32 head", "position": 16}
    evidence = weigh_mean(ROWS, Region(high=36.0), metric="std", where=own)
    (question,) = evidence.questions
    assert question.value.estimate == pytest.approx(36 * 1.015)
    assert question.value.count == 4
    assert question.region.verdict(question.value) is Verdict.UNDECIDED


@pytest.mark.parametrize("where", [{"label.cure": "other"}, {"label.cache": "BF16"}])
def test_what_was_not_measured_says_so(where: dict[str, str]) -> None:
    with pytest.raises(NotMeasured, match="nothing was measured"):
        weigh_mean(ROWS, Region(), metric="std", where=where)
