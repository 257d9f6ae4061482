"""Scenarios in the order of their roles, and what they have in common in words."""

from __future__ import annotations

import pandas as pd
import pytest

from numdev.report.figures.marks import by_scenario
from numdev.report.reading.frames import Results, load
from numdev.report.reading.scenarios import formats, is_sources, ordered, primary
from numdev.report.studies.attention import arithmetic
from numdev.results.store import Store
from tests.toy_studies import title_of


@pytest.fixture(scope="module")
def results(toy_results: Store) -> Results:
    return load(toy_results)


def test_scenarios_in_order_with_titles_and_roles(results: Results) -> None:
    rows = results.study("fig3")
    assert [scenario.name for scenario in ordered(rows)] == ["uniform_end", "normal_end", "kernel_uniform"]
    assert [is_sources(scenario) for scenario in ordered(rows)] == [True, False, False]
    panels = [panel for row in by_scenario(rows) for panel in row]
    assert [panel.title for panel in panels] == [title_of(name) for name in ("uniform_end", "normal_end", "kernel_uniform")]
    assert [panel.note for panel in panels] == ["our assumption", "", ""]
    uniform = rows.query("scenario == 'uniform_end'")
    assert arithmetic(uniform) == "U[0, 1), all steps in F, FA2"
    strict = uniform.assign(**{"baseline.precision.name": rows["format"]})
    assert arithmetic(strict) == "U[0, 1), all steps in F (baseline too), FA2"


def test_formats_go_from_few_bits_to_many() -> None:
    rows = pd.DataFrame({"format": ["fp64", "bf16", "e5m10", "fp16", "fp32"]})
    assert formats(rows) == ["bf16", "fp16", "fp32", "fp64", "e5m10"]


def test_each_point_has_its_own_primary_output() -> None:
    """Two operations in one table, of which one lists another output first; a point that lacks it has none."""
    outputs = [("a", "out", True), ("a", "lse", False), ("b", "dk", False), ("b", "dq", True), ("c", "dk", False)]
    rows = pd.DataFrame(outputs, columns=["key", "output", "primary"])
    assert primary(rows)["output"].tolist() == ["out", "dq"]
    assert primary(rows.iloc[:0]).empty
