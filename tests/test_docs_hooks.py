"""The blocks that pages are made of: numbers from the reference results, titles, and Markdown of plain sentences."""

from __future__ import annotations

import csv
import re

import pytest

from docs_hooks import tables
from docs_hooks.quoted import REFERENCE, figure, spread


def test_a_number_of_a_table_is_the_cell_of_one_row() -> None:
    text = (REFERENCE / "cpu" / "claims.csv").read_text()
    result = figure("cpu/claims.csv", claim="fig4", scenario="uniform_each")
    assert re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", result)
    assert f'"{result}"' in text
    assert (
        figure("cpu/claims.csv", r"^([\d.]+)", ".0f", claim="fig4", scenario="uniform_each") == f"{float(result.split()[0]):.0f}"
    )


def test_a_number_of_a_text_is_found_by_a_pattern() -> None:
    path = "h200/benchmarks/instrumented.txt"
    result = figure(path, r"^kernel_bf16:.* (\d+) times as long")
    assert re.search(rf"^kernel_bf16: .* {result} times as long$", (REFERENCE / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"claim": "fig4"}, "rows have"),
        ({"claim": "fig4", "scenario": "nowhere"}, "0 rows have"),
        ({"claim": "fig4", "scenario": "uniform_each", "column": "colour"}, "no column 'colour'"),
        ({"claim": "fig4", "scenario": "uniform_each", "pick": "a penny (x)"}, "finds nothing"),
        ({"claim": "fig4", "scenario": "uniform_each", "pick": r"(\d)"}, "finds"),
    ],
)
def test_what_names_nothing_or_more_than_one_number_is_refused(arguments: dict[str, str], complaint: str) -> None:
    with pytest.raises(LookupError, match=complaint):
        figure("cpu/claims.csv", **arguments)


def test_the_ends_of_a_column_are_those_of_the_selected_rows() -> None:
    path = "h200/training/runs.csv"
    with (REFERENCE / path).open(newline="") as file:
        scores = [float(row["score"]) for row in csv.DictReader(file) if row["label.rung"] == "SDPA flash"]
    assert len(set(scores)) > 1
    result = spread(path, "score", **{"label.rung": "SDPA flash"})
    assert [float(end) for end in result.split(" to ")] == [min(scores), max(scores)]
    assert spread(path, "parameters") == "9996492"
    with pytest.raises(LookupError, match="no row of"):
        spread(path, "score", **{"label.rung": "nothing"})


def test_every_setting_and_every_metric_is_in_the_reference() -> None:
    from numdev.cli.schema import settings
    from numdev.measurement.deviation.metrics import DIRECTED, METRICS
    from numdev.measurement.speed.columns import COUNTED, MEASURED
    from numdev.training.weights import METRICS as OF_WEIGHTS

    messages = "\n".join(tables.settings())
    assert [name for name in settings() if f"| `{name}` |" not in messages] == []
    messages = "\n".join(tables.columns())
    names = [*METRICS, *DIRECTED, *MEASURED, *COUNTED, *OF_WEIGHTS]
    assert [name for name in names if f"| `{name}` |" not in messages] == []
