"""What is drawn of a table: the right means at the right places, axes that fit, and one sentence for what it does not have."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest

from numdev.errors import BadInput
from numdev.report.figures.plot import draw, plot, plot_of
from numdev.report.reading.view import View, usual, view_of


def table(values: Any = lambda n, p, seed: n * p * (1 + seed / 10), **more: Any) -> pd.DataFrame:
    """Rows over two axes, `problem.n` and `tiling.bc`, of three seeds, against golden and the baseline."""
    rows = [
        {"study": "s", "scenario.title": "", "key": f"{n} {bc}", "label.problem.n": n, "label.tiling.bc": bc, "seed": seed}
        | {"cluster": "", "subject": "variant", "output": output, "primary": output == "out", "reference": reference}
        | {"rmse": values(n, bc, seed) * (1 if output == "out" else 100), "bias": -1.0, "nan_count": 0}
        | more
        for n, bc, seed, output, reference in itertools.product(
            (256, 512, 1024), (16, 32), range(3), ("out", "lse"), ("golden", "baseline")
        )
    ]
    return pd.DataFrame(rows)


def lines(figure: Any) -> dict[str, list[tuple[float, float]]]:
    """The marks of the first panel, by the line's place in the order of drawing."""
    containers = figure.axes[0].containers
    return {str(i): list(zip(*map(list, one.lines[0].get_data()), strict=True)) for i, one in enumerate(containers)}


def test_a_mark_is_the_geometric_mean_over_seeds() -> None:
    found = lines(plot(table(), x="problem.n", y="rmse", colour="tiling.bc"))
    expected = np.exp(np.mean(np.log([1.0, 1.1, 1.2])))
    assert [x for x, _ in found["0"]] == [256, 512, 1024]
    assert [y for _, y in found["0"]] == pytest.approx([n * 16 * expected for n in (256, 512, 1024)])
    assert [y for _, y in found["1"]] == pytest.approx([n * 32 * expected for n in (256, 512, 1024)])


def test_what_adds_up_has_arithmetic_means_and_a_linear_axis() -> None:
    options: dict[str, Any] = {"x": "problem.n", "y": {"share": "rmse"}, "facet": [], "where": {"label.tiling.bc": [16]}}
    figure: Any = draw(table(lambda n, p, seed: n**3.0 * (1 + seed)), additive=True, **options)
    assert [y for _, y in lines(figure)["0"]] == pytest.approx([2.0 * n**3 for n in (256, 512, 1024)])
    assert figure.axes[0].get_yscale() == "linear"


def test_an_output_and_a_reference_are_chosen_by_name() -> None:
    first = lines(plot(table(), x="problem.n", y="lse.rmse", colour="tiling.bc"))["0"][0][1]
    assert first == pytest.approx(100 * lines(plot(table(), x="problem.n", y="out.rmse", colour="tiling.bc"))["0"][0][1])
    figure: Any = plot(table(), x="problem.n", y="rmse", colour="tiling.bc", reference="baseline")
    assert figure.get_supylabel() == "RMSE of out from the baseline, absolute"


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_what_neither_axis_nor_colour_shows_splits_the_line() -> None:
    frame = table().assign(**{"label.precision": "kernel", "label.grid": "bf16"})
    frame.loc[frame["key"] == "512 32", "label.grid"] = "e4m3fn"
    figure: Any = plot(frame, x="problem.n", y="rmse", colour="precision")
    assert legend(figure) == [
        "kernel, tiling.bc = 16, grid = bf16",
        "kernel, tiling.bc = 32, grid = bf16",
        "kernel, tiling.bc = 32, grid = e4m3fn",
    ]
    assert [[x for x, _ in line] for line in lines(figure).values()] == [[256, 512, 1024], [256, 1024], [512]]
    figure = plot(frame, x="problem.n", y="rmse", colour="grid", facet="tiling.bc")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["tiling.bc = 16", "tiling.bc = 32"]
    assert legend(figure) == ["bf16", "e4m3fn"]
    figure = plot(frame, x="problem.n", y="rmse", facet="tiling.bc")
    assert legend(figure) == ["grid = bf16", "grid = e4m3fn"]


def test_too_many_split_lines_name_the_setting_to_add() -> None:
    frame = pd.concat([table(**{"label.p": "one", "label.q": q, "key": f"{q}"}) for q in range(15)])
    words = r"^plot: 'rmse over problem\.n' .* differ in tiling\.bc, q too, .* 24 .*add facet: tiling\.bc"
    with pytest.raises(BadInput, match=words):
        plot(frame, x="problem.n", y="rmse", colour="p")
    several = pd.concat(
        [frame.assign(study="mine"), frame.assign(study="yours").replace({"label.q": {q: q + 15 for q in range(15)}})]
    )
    with pytest.raises(BadInput, match=r"draw one study, study=mine or another of mine, yours$"):
        plot(several, x="problem.n", y="rmse", colour="p")


def test_no_two_lines_look_alike_and_a_colour_has_one_meaning() -> None:
    one = table().iloc[:1]
    for colours, rest in ((2, 12), (8, 3)):
        pairs = list(itertools.product(range(colours), range(rest)))
        frame = pd.concat([one] * len(pairs)).assign(key=range(len(pairs)))
        frame["label.policy"], frame["label.rest"] = [f"p{p}" for p, _ in pairs], [r for _, r in pairs]
        figure: Any = plot(frame, x="problem.n", y="rmse", colour="policy")
        drawn = figure.axes[0].containers
        looks = [(one.lines[0].get_color(), one.lines[0].get_marker(), one.lines[0].get_linestyle()) for one in drawn]
        assert len(set(looks)) == colours * rest == len(looks)
        if 1 < colours <= 7:
            assert len({look[0] for look in looks}) == colours


def test_numbers_are_in_order_and_a_missing_one_is_last() -> None:
    frame = table().sample(frac=1, random_state=1)
    frame.loc[frame["label.problem.n"] == 512, "label.problem.n"] = None
    figure: Any = plot(frame, x="problem.n", y="rmse", colour="tiling.bc")
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["256", "1024", "none"]


def test_dots_stay_in_their_row_where_no_row_has_every_colour() -> None:
    pairs = [("a", 1), ("a", 2), ("b", 2), ("b", 3)]
    frame = pd.concat([table().iloc[:1]] * len(pairs)).assign(key=range(len(pairs)))
    frame["label.name"], frame["label.colour"] = [name for name, _ in pairs], [f"c{colour}" for _, colour in pairs]
    figure: Any = plot(frame, x="name", y="rmse", colour="colour")
    rows = [round(y) for line in lines(figure).values() for _, y in line]
    assert rows == [0, 0, 1, 1]


def test_without_a_word_the_longest_axis_of_numbers_lies_across() -> None:
    assert usual(table()) == View("problem.n", "rmse", ("tiling.bc",))
    frame = table().assign(**{"scenario.title": lambda t: np.where(t["label.problem.n"] > 300, "a", "b")})
    assert usual(frame).facet == ("scenario.title",)
    assert view_of(table(), {"x": "tiling.bc"}) == View("tiling.bc", "rmse", ("problem.n",))
    assert view_of(table(), {"colour": "problem.n"}) == View("tiling.bc", "rmse", ("problem.n",))
    one = table().query("key == '256 16'")
    assert len(lines(plot_of(one, {})(one))) == 1, "a point alone is one mark"


@pytest.mark.parametrize(
    ("values", "scale"),
    [(lambda n, p, s: 1.0 + s / 100 + n / 1e5, "linear"), (lambda n, p, s: n**4.0, "log"), (lambda n, p, s: -n, "linear")],
)
def test_axes_are_logarithmic_where_the_range_asks_for_it(values: Any, scale: str) -> None:
    figure: Any = plot(table(values), x="problem.n", y="rmse", colour="tiling.bc")
    assert figure.axes[0].get_yscale() == scale
    assert figure.axes[0].get_xscale() == "log"
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["256", "512", "1k"]


def test_nan_and_zero_stand_at_the_foot() -> None:
    frame = table(lambda n, p, seed: n**4.0 * p)
    frame.loc[frame["key"] == "256 16", "nan_count"] = 1
    frame.loc[frame["key"] == "512 32", "rmse"] = 0.0
    figure: Any = plot(frame, x="problem.n", y="rmse", colour="tiling.bc")
    found = lines(figure)
    assert [x for x, _ in found["0"]] == [512, 1024]
    assert [x for x, _ in found["1"]] == [256, 1024]
    marks = {line.get_marker(): line.get_xdata()[0] for line in figure.axes[0].lines if len(line.get_xdata()) == 1}
    assert (marks["x"], marks["$0$"]) == (256, 512)
    assert "NaN or Inf" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"x": "problem.m"}, r"^plot\.x: 'problem\.m' .* no such column; did you mean problem\.n"),
        ({"colour": "tiling.br"}, r"^plot\.colour: 'tiling\.br' .*tiling\.bc"),
        ({"y": "rmsee"}, r"^plot\.y: 'rmsee' .* did you mean rmse"),
        ({"y": "out.rmsee"}, r"^plot\.y: 'out\.rmsee' .*out has no such metric; did you mean rmse"),
        ({"y": "output"}, r"^plot\.y: 'output' "),
        ({"reference": "gold"}, r"^plot\.reference: 'gold' .*golden, baseline"),
        ({"w": "a"}, r"^plot: 'w' cannot be used; use one of x, y"),
        ({"x": 3}, r"^plot\.x: 3 cannot be used; give the name of a column"),
        ({"x": ["problem.n", "tiling.bc"]}, r"^plot\.x: "),
    ],
)
def test_mistakes_are_one_sentence_with_names_alike(given: dict[str, Any], error: str) -> None:
    with pytest.raises(BadInput, match=error):
        plot_of(table(), given)


def test_more_lines_than_can_be_told_apart_are_refused() -> None:
    frame = table().assign(key=[str(i) for i in range(72)])
    with pytest.raises(BadInput, match=r"^plot\.colour: 'key' .* at most 24 can be told apart"):
        plot_of(frame.assign(reference="golden", output="out", primary=True), {"x": "problem.n", "y": "rmse", "colour": "key"})
