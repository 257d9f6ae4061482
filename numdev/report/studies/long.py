"""Long sequences: the deviation from golden at lengths that tensor operations cannot reach."""

from __future__ import annotations

import pandas as pd

from numdev.report.claims.claim import OURS
from numdev.report.claims.comparisons import DEVIATION, EVERY
from numdev.report.claims.finding import GROWS, Evidence, Question, by_format, left_out, select
from numdev.report.figures.plot import Plot
from numdev.report.statistics.estimates import significant
from numdev.report.studies.attention import LENGTH, claim, over_length
from numdev.report.studies.beyond import draw_parting
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.published import GOLDEN


def weigh_long(rows: pd.DataFrame) -> Evidence:
    """The max difference from golden grows with N."""

    def judge(rows: pd.DataFrame) -> Evidence:
        exponent, every = (over_length(rows, metric, "golden") for metric in (DEVIATION, EVERY))
        means = select(rows, reference="golden").groupby(LENGTH, sort=True)[DEVIATION].mean()
        steps = ", ".join(f"{significant(float(mean))} at {n}" for n, mean in means.items())
        sentence = f"the max difference from golden scales as N^{exponent.text()} over all lengths; {steps}.{left_out(exponent)}"
        beside = Evidence(f"N^{every.text()}", "", (Question(every, GROWS),))
        return Evidence(f"N^{exponent.text()}", sentence, (Question(exponent, GROWS),), beside)

    return by_format(rows, judge)


CHAPTERS = (
    Chapter(
        place=45,
        study="long",
        title="Long sequences",
        question="How large is the deviation at lengths that tensor operations cannot reach?",
        measured="The instrumented kernel, which has the policy's casts compiled in, on one head against golden.",
        paper="The largest difference grows with the sequence length (Golden et al. 2024, section IV.A, Figure 5a), up to the "
        "lengths measured there.",
        claims=(
            claim(
                "long",
                "parting",
                "The max difference from golden grows with N beyond the lengths of Figure 5a",
                f"{OURS}: {GOLDEN}, section IV.A, Figure 5a, at greater lengths",
                weigh_long,
                is_ours=True,
            ),
        ),
        figures={
            "parting": Plot(
                draw_parting,
                "Tiled attention with every step in the format (dark blue) and with FP32 inside (light blue), and the untiled "
                "baseline (orange), on log axes with 95 % confidence intervals; squares are FlashAttention-1, solid lines "
                "uniform, dashed normal, dotted captured inputs.",
                title="The largest deviation from exact attention over the sequence length",
            ),
        },
    ),
)
