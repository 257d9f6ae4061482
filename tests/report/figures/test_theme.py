"""The values that a figure's points have in its SVG: where they lie, and what they say."""

from __future__ import annotations

import re

from matplotlib.figure import Figure

from numdev.report.figures.marks import Dot, draw_rows, line
from numdev.report.figures.theme import freeze, styled, to_svg
from numdev.report.statistics import Interval

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
