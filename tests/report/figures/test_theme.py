"""The values that a figure's points have in its SVG: where they lie, and what they say."""

from __future__ import annotations

import re

import pytest
from matplotlib.figure import Figure

from numdev.report.figures.theme import freeze, styled, to_svg, values


def drawn() -> Figure:
    """A panel with two lines of three points, one with intervals, and one with a dot on an axis of names."""
    with styled():
        figure = Figure(figsize=(4, 2))
        left, right = figure.subplots(1, 2)
        left.set_title("uniform\ninputs", loc="left")
        left.set_xscale("log")
        left.set_xticks([256, 512, 1024], ["256", "512", "1k"])
        left.errorbar(
            [256, 512, 1024], [1.0, 2.0, 3.0], [[0.5, 0.5, 0.0], [1.0, 1.0, 0.0]], color="#0072B2", marker="o", label="tiled"
        )
        left.plot([256, 512, 1024], [0.5, 0.5, 0.5], color="#D55E00", marker="s", label="baseline")
        left.plot([256, 1024], [0.7, 0.7], color="black")  # a line without points
        left.axhline(2.5, marker="o")
        left.set_xlabel("N, tokens")
        left.set_ylabel("max $|D|$")
        left.set_ylim(0.1, 2.9)  # the third point of `tiled` lies outside
        left.legend()
        right.errorbar([-0.2], [1.0], [[0.25], [0.5]], color="black", marker="o")
        right.set_xticks([0, 1], ["bf16", "fp16"])
        return freeze(figure)


@pytest.fixture(scope="module")
def figure() -> Figure:
    return drawn()


def test_points_say_panel_series_place_and_value(figure: Figure) -> None:
    assert sorted(value.text for value in values(figure)) == sorted(
        [
            "uniform inputs; tiled; N, tokens: 256; max |D|: 1.00 (0.500 to 2.00)",
            "uniform inputs; tiled; N, tokens: 512; max |D|: 2.00 (1.50 to 3.00)",
            "uniform inputs; baseline; N, tokens: 256; max |D|: 0.500",
            "uniform inputs; baseline; N, tokens: 512; max |D|: 0.500",
            "uniform inputs; baseline; N, tokens: 1k; max |D|: 0.500",
            "bf16; 1.00 (0.750 to 1.50)",
        ]
    )


def test_points_lie_where_they_are_drawn(figure: Figure) -> None:
    """Matplotlib writes a marker as a `use` at its place."""
    svg = to_svg(figure, "title", "words").decode()
    before, _, circles = svg.partition('<g class="values"')
    marks = {(float(x), float(y)) for x, y in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', before)}
    found = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', circles)]
    of_lines = [place for place, value in zip(found, values(figure), strict=True) if value.text.startswith("uniform")]
    assert len(of_lines) == 5
    for x, y in of_lines:
        assert any(abs(x - a) < 0.06 and abs(y - b) < 0.06 for a, b in marks)


def test_a_figure_without_points_is_as_it_was() -> None:
    with styled():
        figure = Figure()
        figure.add_subplot().plot([0, 1], [0, 1])
    assert values(freeze(figure)) == []
    assert b"values" not in to_svg(figure, "title", "words")


def test_words_are_escaped() -> None:
    with styled():
        figure = Figure()
        figure.add_subplot(xlabel="a < b").plot([1], [1], marker="o")
    text = to_svg(freeze(figure), "title", "words").decode()
    assert "<title>a &lt; b: 1.00; 1.00</title>" in text
