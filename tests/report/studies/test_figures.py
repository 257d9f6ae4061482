from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from scipy import stats

from numdev.cli.compose import config_folder
from numdev.report.figures.theme import to_png, to_svg
from numdev.report.reading.frames import Results, load
from numdev.report.reading.scenarios import formats
from numdev.report.studies.registry import CHAPTERS, CLAIMS, plots_of
from numdev.results.store import Store
from tests.report.printed import assert_apart, assert_inside, assert_legible, written
from tests.toy_studies import title_of

FORWARD = [one for one in CHAPTERS if one.operation == "attention" and one.study != "attribution_forward"]
FIGURES = {name: plot for chapter in FORWARD for name, plot in chapter.figures.items()}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def results(toy_results: Store) -> Results:
    return load(toy_results)


@pytest.fixture(scope="module")
def drawn(results: Results) -> dict[str, Figure]:
    return {name: FIGURES[name](rows_of(results, name)) for name in FIGURES}


def rows_of(results: Results, figure: str) -> pd.DataFrame:
    study = {"parting": "fig5", "total": "fig4", "rescales": "fig6c"}.get(figure, figure)
    return results.study(study if study in results.manifests else "fig5")


APART = ["fig3", "fig4", "fig5a", "fig5b", "fig6a", "fig6b", "fig6c", "total", "rescales"]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_error_bars_and_keeps_its_words(drawn: dict[str, Figure], name: str) -> None:
    assert drawn[name].axes
    assert_legible(drawn[name])
    assert_inside(drawn[name])
    for axes in drawn[name].axes:
        bars = [item for item in axes.containers if isinstance(item, ErrorbarContainer)]
        assert bars, axes.get_title(loc="left")
        assert all(bar.has_xerr or bar.has_yerr for bar in bars)
        if name in APART:
            assert_apart(axes)


def dots(figure: Figure) -> Axes:
    """The lower part of Figure 4."""
    return figure.axes[-1]


def test_the_ratio_of_figure_4_is_a_dot_for_every_scenario_between_1_and_10(drawn: dict[str, Figure], results: Results) -> None:
    axes = dots(drawn["fig4"])
    upright = [set(np.asarray(line.get_xdata()).tolist()) for line in axes.lines if np.size(line.get_xdata()) == 2]
    assert {1.0} in upright
    assert {10.0} in upright
    rows = results.study("fig4")
    bars = [item for item in axes.containers if isinstance(item, ErrorbarContainer)]
    found = {label.get_text(): bar for label, bar in zip(axes.get_yticklabels(), bars, strict=True)}
    for name in ("uniform_end", "normal_end", "kernel_uniform"):
        own = rows.query(f"scenario == '{name}'")
        (title,) = (text for text in found if text.startswith(title_of(name)))
        estimate = float(np.asarray(found[title].lines[0].get_xdata())[0])
        assert CLAIMS["fig4"].find(own).figure.split()[0] in {f"{estimate:.{places}f}" for places in range(4)}
        assert any(text.get_text().startswith(CLAIMS["fig4"].find(own).figure.split()[0]) for text in axes.texts)


@pytest.mark.parametrize("factor", [1.0, 30.0])
def test_the_ratio_is_free_of_intervals(results: Results, factor: float) -> None:
    """Two replicates that differ by `factor`: intervals of several decades."""
    rows = results.study("fig4").query("seed < 2").copy()
    rows.loc[rows["seed"] == 1, "max_difference"] *= factor
    figure = FIGURES["fig4"](rows)
    for axes in figure.axes:
        assert_apart(axes)
    low, high = dots(figure).get_xlim()
    assert low < 1
    assert high > 10


def test_total_has_both_errors_of_tiled_attention_and_its_baseline(drawn: dict[str, Figure], results: Results) -> None:
    (axes,) = drawn["total"].axes
    titles = [title_of(name) for name in ("uniform_end", "normal_end", "kernel_uniform")]
    assert [label.get_text().partition(" (")[0] for label in axes.get_yticklabels()] == titles
    assert set(titles) == set(results.study("fig4")["scenario.title"])
    assert len([item for item in axes.containers if isinstance(item, ErrorbarContainer)]) == 3 * 2 * 2


@pytest.mark.parametrize("name", ["fa3_table3", "sign"])
def test_the_same_results_give_the_same_bytes(results: Results, drawn: dict[str, Figure], name: str) -> None:
    again = FIGURES[name](rows_of(results, name))
    assert to_svg(again, "t", "a") == to_svg(drawn[name], "t", "a")
    assert to_png(again) == to_png(drawn[name])


def test_a_figure_is_as_its_manifest_keeps_it(results: Results, drawn: dict[str, Figure]) -> None:
    """In JSON, whose keys are text."""
    fields = yaml.safe_load((config_folder() / "study/fig4.yaml").read_text())
    kept = plots_of(json.loads(json.dumps({"figures": fields["figures"]})))
    assert to_png(kept["fig4"](rows_of(results, "fig4"))) == to_png(drawn["fig4"])


def test_an_svg_has_a_title_and_a_description(drawn: dict[str, Figure]) -> None:
    root = ElementTree.fromstring(to_svg(drawn["sign"], "Better & worse", "Right of 1 is <worse>."))
    assert root.findtext(f"{SVG}title") == "Better & worse"
    assert root.findtext(f"{SVG}desc") == "Right of 1 is <worse>."
    assert not root.findall(f".//{SVG}text")  # letters are outlines: no font is needed to read them


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig5a", "fig5b", "fig6a", "fig6b", "fig6c"])
def test_the_papers_quantity_is_absolute_and_large(drawn: dict[str, Figure], name: str) -> None:
    first, *rest = drawn[name].axes
    assert first.get_title(loc="left") == title_of("uniform_end")
    assert "absolute" in first.get_ylabel()
    assert all(first.bbox.width * first.bbox.height > axes.bbox.width * axes.bbox.height for axes in rest)
    titles = [axes.get_title(loc="left").replace("\n", " ") for axes in rest[1:]]
    assert titles == ([""] if name == "fig4" else [title_of(other) for other in ("normal_end", "kernel_uniform")])


def test_dots_stand_at_the_means(drawn: dict[str, Figure], results: Results) -> None:
    rows = results.study("fig3").query(
        "scenario == 'uniform_end' and subject == 'variant' and output == 'out' and reference == 'baseline'"
    )
    expected = [rows[rows["format"] == name]["max_difference"] for name in formats(rows)]
    assert heights(drawn["fig3"].axes[0]) == pytest.approx([stats.gmean(values) for values in expected], rel=1e-12)


def heights(axes: Axes) -> list[float]:
    bars = [item for item in axes.containers if isinstance(item, ErrorbarContainer)]
    return [float(np.asarray(bar.lines[0].get_ydata())[0]) for bar in bars]


def test_nan_is_written_and_not_drawn(results: Results) -> None:
    rows = results.study("fig3").query("scenario == 'uniform_end'").copy()
    rows.loc[(rows["format"] == "fp16").to_numpy(), "nan_count"] = 3
    figure = FIGURES["fig3"](rows)
    assert "NaN" in [text.get_text() for text in written(figure)]
    assert len(heights(figure.axes[0])) == 3


def test_a_figure_says_which_labels_it_lacks(results: Results) -> None:
    assert FIGURES["fig6a"].lacks(results.study("fig3")) == ["tiling.shape", "tiling.sram"]
    assert FIGURES["fig6a"].lacks(results.study("fig6a")) == []
