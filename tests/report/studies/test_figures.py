from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from scipy import stats

from numdev.report.figures.theme import to_png
from numdev.report.reading.frames import Results, load
from numdev.report.studies import registry
from numdev.report.studies.registry import CHAPTERS, CLAIMS, plots_of
from numdev.results.store import Store
from numdev.sources import config_folder
from tests.report.printed import assert_apart, assert_inside, assert_legible, written
from tests.toy_studies import title_of

FORWARD = [one for one in CHAPTERS if one.operation == "attention" and one.study != "attribution_forward"]
FIGURES = {name: plot for chapter in FORWARD for name, plot in chapter.figures.items()}
SCENARIOS = ("uniform_end", "normal_end", "kernel_uniform")


@pytest.fixture(scope="module")
def results(toy_results: Store) -> Results:
    return load(toy_results)


@pytest.fixture(scope="module")
def drawn(results: Results) -> dict[str, Figure]:
    return {name: FIGURES[name](rows_of(results, name)) for name in FIGURES}


def rows_of(results: Results, figure: str) -> pd.DataFrame:
    study = {"parting": "fig5", "total": "fig4"}.get(figure, figure)
    return results.study(study if study in results.manifests else "fig5")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_error_bars_and_keeps_its_words(drawn: dict[str, Figure], name: str) -> None:
    assert drawn[name].axes
    assert_legible(drawn[name])
    assert_inside(drawn[name])
    for axes in drawn[name].axes:
        bars = [item for item in axes.containers if isinstance(item, ErrorbarContainer)]
        assert bars, axes.get_title(loc="left")
        assert all(bar.has_xerr or bar.has_yerr for bar in bars)
        assert_apart(axes)


def test_the_ratio_of_figure_4_is_a_dot_for_every_scenario_between_1_and_10(drawn: dict[str, Figure], results: Results) -> None:
    (axes,) = drawn["fig4"].axes
    upright = [set(np.asarray(line.get_xdata()).tolist()) for line in axes.lines if np.size(line.get_xdata()) == 2]
    assert {1.0} in upright
    assert {10.0} in upright
    rows = results.study("fig4")
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert [name.partition(" (")[0] for name in names] == list(map(title_of, SCENARIOS))
    bars = [item for item in axes.containers if isinstance(item, ErrorbarContainer)]
    for place, scenario in enumerate(SCENARIOS):
        nearest = min(bars, key=lambda bar: abs(float(np.asarray(bar.lines[0].get_ydata())[0]) - place + 0.28))  # BF16 is on top
        estimate = float(np.asarray(nearest.lines[0].get_xdata())[0])
        figure = CLAIMS["fig4"].find(rows.query(f"scenario == '{scenario}'")).figure
        assert figure.split()[0] in {f"{estimate:.{places}f}" for places in range(4)}


def test_metrics_are_in_units_of_u(drawn: dict[str, Figure], results: Results) -> None:
    """Those of two formats, which are decades apart, lie on one axis."""
    rows = results.study("fig5").query("scenario == 'uniform_end' and subject == 'variant' and output == 'out'")
    rows = rows[rows["reference"] == "baseline"]
    for (name, unit), bar in zip((("bf16", 2.0**-8), ("fp32", 2.0**-24)), drawn["fig5a"].axes[0].containers, strict=True):
        own = rows[rows["format"] == name].groupby("problem.shape.keys")["max_difference"]
        expected = [stats.gmean(values) / unit for _, values in own]
        assert np.asarray(bar.lines[0].get_ydata()).tolist() == pytest.approx(expected, rel=1e-12)  # type: ignore[attr-defined]


def test_a_figure_is_as_its_manifest_keeps_it(results: Results, drawn: dict[str, Figure]) -> None:
    """In JSON, whose keys are text."""
    fields = yaml.safe_load((config_folder() / "study/fig4.yaml").read_text())
    kept = plots_of(json.loads(json.dumps({"figures": fields["figures"]})))
    assert to_png(kept["fig4"](rows_of(results, "fig4"))) == to_png(drawn["fig4"])


def test_no_two_chapters_have_the_same_study_place_claim_or_figure() -> None:
    for names in (
        [chapter.study for chapter in CHAPTERS],
        [chapter.place for chapter in CHAPTERS],
        [claim.name for chapter in CHAPTERS for claim in chapter.claims],
        [name for chapter in CHAPTERS for name in chapter.figures],
    ):
        assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("name", CLAIMS)
def test_the_figure_of_a_claim_is_declared(name: str) -> None:
    assert CLAIMS[name].figure in registry.FIGURES


@pytest.mark.parametrize("path", sorted((config_folder() / "study").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_functions_that_a_study_names_are_there(path: Path) -> None:
    names = re.findall(r"(?:draw|judge|table): (\S+:\w+)", path.read_text())
    assert all(callable(resolve_name(name)) for name in names)


def places(axes: Axes) -> list[float]:
    bars = [item for item in axes.containers if isinstance(item, ErrorbarContainer)]
    return [float(np.asarray(bar.lines[0].get_xdata())[0]) for bar in bars]


def test_nan_is_written_and_not_drawn(results: Results) -> None:
    rows = results.study("fig3").query("scenario == 'uniform_end'").copy()
    rows.loc[(rows["format"] == "fp16").to_numpy(), "nan_count"] = 3
    figure = FIGURES["fig3"](rows)
    assert "NaN or Inf" in [text.get_text() for text in written(figure)]
    assert len(places(figure.axes[0])) == 3
