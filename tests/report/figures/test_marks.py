"""Axes, words and rows that figures share, and the values that their points have in an SVG."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from numdev.report.figures.marks import Dot, around, at_least_a_decade, draw_rows, line, short
from numdev.report.figures.theme import freeze, styled, to_svg
from numdev.report.statistics import Interval


@given(st.floats(1e-12, 1e3), st.floats(1, 1e3))
def test_an_axis_of_a_decade(low: float, ratio: float) -> None:
    ends = at_least_a_decade(low, low * ratio)
    assert ends[1] / ends[0] == pytest.approx(max(10, ratio))
    assert math.prod(ends) == pytest.approx(low * low * ratio)  # about the same middle


@given(st.lists(st.tuples(st.floats(1e-9, 1e6), st.floats(1, 100)), min_size=1, max_size=5), st.floats(0, 0.5))
def test_every_value_lies_on_the_axis_and_a_share_of_it_is_free(values: list[tuple[float, float]], room: float) -> None:
    low, high = around([Interval(value, value / wide, value * wide, 3) for value, wide in values], room=room)
    assert low < min(value for value, _ in values)
    assert math.log(high / max(value for value, _ in values)) >= room * math.log(high / low)
    assert high / low >= 10


@given(st.integers(1, 999_999))
@example(1024)
@example(1536)
def test_a_number_in_short_is_that_number(number: int) -> None:
    text = short(number)
    unit = {"k": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
    assert float(text.rstrip("kM")) * unit == number


def test_rows_have_a_mark_or_a_word() -> None:
    axes = Figure().add_subplot()
    values = [Interval(2.0, 1.0, 4.0, 3), Interval(0.0, 0.0, 0.0, 3), None, Interval(5.0, -math.inf, math.inf, 1)]
    dots = [Dot(row, value, text="" if value is None else f"{value.estimate:g}") for row, value in enumerate(values)]
    draw_rows(axes, list("abcd"), dots, at={10.0: "paper"})
    drawn = [item for item in axes.containers if isinstance(item, ErrorbarContainer)]
    assert [np.asarray(item.lines[0].get_xdata()).tolist() for item in drawn] == [[2.0], [5.0]]
    assert sorted(text.get_text() for text in axes.texts) == ["2", "5", "not measured", "not measured", "paper"]
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abcd")
    assert axes.get_xlim()[0] < 1
    assert axes.get_xlim()[1] > 10


ONE, TWO, THREE = Interval(1.0, 0.5, 2.0, 3), Interval(2.0, 1.5, 3.0, 3), Interval(3.0, 3.0, 3.0, 3)


def drawn() -> str:
    """A panel with a line of three points, the last of them outside, and one with a row, as SVG."""
    with styled():
        figure = Figure(figsize=(4, 2))
        left, right = figure.subplots(1, 2)
        line(left, [(256, ONE), (1024, TWO), (2048, THREE)], color="#0072B2", marker="o", label="a < b")
        left.set_ylim(0.1, 2.9)
        draw_rows(right, ["bf16"], [Dot(0, ONE)])
        return to_svg(freeze(figure), "title", "words").decode()


def test_points_inside_their_panel_say_series_place_and_value() -> None:
    titles = re.findall(r"<circle[^>]*><title>([^<]*)</title>", drawn())
    assert titles == [f"a &lt; b at 256: {ONE.text()}", f"a &lt; b at 1k: {TWO.text()}", f"bf16: {ONE.text()}"]


def test_points_lie_where_they_are_drawn() -> None:
    """Matplotlib writes a marker as a `use` at its place."""
    before, _, circles = drawn().partition('<g class="values"')
    marks = {(float(x), float(y)) for x, y in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', before)}
    places = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', circles)]
    assert len(places) == 3
    for x, y in places:
        assert any(abs(x - a) < 0.06 and abs(y - b) < 0.06 for a, b in marks)
