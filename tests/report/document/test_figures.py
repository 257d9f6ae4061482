"""A figure of a large study is drawn from a part of its rows, and is that of all of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pandas as pd
from hypothesis import example, given, settings
from hypothesis import strategies as st

from numdev.errors import BadInput
from numdev.report.figures.plot import plot_of
from numdev.report.reading.frames import Results, _Table
from numdev.report.reading.view import of_comparison, shown, tidy, view_of
from numdev.results.store import manifest_of

COMPARISONS = [
    (subject, output, reference)
    for subject, others in (("variant", ("golden", "baseline")), ("baseline", ("golden",)))
    for output in ("out", "lse")
    for reference in others
]
GIVEN: list[dict[str, Any]] = [
    *({}, {"y": "lse.rmse"}, {"y": "out.bias"}, {"y": "nothing"}, {"y": "lse.nothing"}, {"x": "nothing"}, {"x": "seed"}),
    *({"x": "m", "reference": "baseline"}, {"x": "m", "reference": "nobody"}, {"x": "n", "colour": "subject"}),
    *({"x": "n", "facet": ["reference", "m"]}, {"x": "output"}, {"x": "n", "y": "rmse", "colour": "m"}),
]
Cell = tuple[int, int]


def results(lost: Collection[tuple[Cell, int]] = (), **changes: Any) -> Results:
    """Points over n and m, two seeds; `lost` are comparisons that points lack."""
    reading, points = _Table(), list[dict[str, Any]]()
    for n, m in ((n, m) for n in range(3) for m in range(2)):
        facts: dict[str, Any] = {
            "study": "s",
            "scenario": "one",
            "key": f"{n}{m}",
            "scenario.title": "",
            "scenario.role": "beyond",
        }
        points.append(facts | {"label.n": n, "label.m": m})
        rows = []
        for seed in range(2):
            for place, (subject, output, reference) in enumerate(COMPARISONS):
                if ((n, m), place) in lost:
                    continue
                row: dict[str, Any] = {"seed": seed, "cluster": "", "subject": subject, "output": output}
                row |= {"primary": output == "out", "reference": reference, "bias": 2.0 + place, "nan_count": 0}
                row |= {"rmse": 1.0 + n + 10 * m + 0.1 * seed + 100 * place}
                rows.append(row)
        reading.extend(rows, len(points) - 1)
    made = pd.DataFrame(points)
    manifest = manifest_of("s", "deviation", "t", **changes)
    return Results(reading.rows([], made), made.assign(kind="deviation", operation="attention"), {"s": manifest})


def figure(rows: pd.DataFrame, given: dict[str, Any]) -> Any:
    """What a figure shows of some rows, or why there is none."""
    try:
        plot = plot_of(rows, given)
        view = shown(rows, view_of(rows, given))
    except BadInput as error:
        return str(error)
    return plot.title, plot.alt, view.output, view.split, view.rows.reset_index(drop=True).to_dict("list")


FAULTS = st.sets(st.tuples(st.tuples(st.integers(0, 2), st.integers(0, 1)), st.integers(0, len(COMPARISONS) - 1)), max_size=6)


@settings(max_examples=20)
@given(FAULTS, st.sampled_from(GIVEN))
@example({((2, m), 0) for m in range(2)}, {})
@example({((2, m), 1) for m in range(2)}, {"x": "m", "reference": "baseline"})
def test_a_figure_is_that_of_all_rows(lost: set[tuple[Cell, int]], given_: dict[str, Any]) -> None:
    """Whatever points lack, and whichever view is asked for; errors are the same too."""
    made = results(lost)
    assert figure(of_comparison(made, given_), given_) == figure(tidy(made), given_)


def test_a_figure_needs_the_rows_of_one_comparison() -> None:
    made = results()
    assert len(made.primary) == 6 * 2 * len(COMPARISONS)
    for given_ in ({}, {"y": "lse.rmse"}, {"x": "m", "reference": "baseline"}):
        assert len(of_comparison(made, given_)) == 6 * 2
    assert len(of_comparison(made, {"x": "n", "colour": "subject"})) == len(made.primary)
