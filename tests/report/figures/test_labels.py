"""Words in a figure overlap neither one another nor the data."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from numdev.report.figures.marks import name_points, room_above, spread
from tests.report.studies.test_figures import assert_apart, words_in


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_labels_are_spread(places: list[float]) -> None:
    gap = 0.08
    moved = spread(places, gap)
    order = sorted(range(len(places)), key=lambda i: places[i])
    assert all(moved[b] - moved[a] > gap - 1e-9 for a, b in pairwise(order))
    assert min(moved) > gap / 2 - 1e-9
    assert max(moved) < 1 - gap / 2 + 1e-9


@given(st.floats(1e-12, 1e3), st.floats(1, 1e9), st.floats(0, 0.9))
def test_room_above_is_a_share_of_the_log_axis(low: float, ratio: float, share: float) -> None:
    high = low * ratio
    top = room_above(low, high, share)
    assert math.log(top / high) == pytest.approx(share * math.log(top / low), abs=1e-9)


def test_names_of_near_points_stand_apart() -> None:
    figure = Figure(figsize=(3.5, 2.5))
    axes = figure.add_subplot()
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    points = [(5 + 0.1 * i, 5 + 0.05 * (i % 2)) for i in range(8)]
    name_points(axes, [(x, y, f"attention {i}", "black") for i, (x, y) in enumerate(points)])
    assert_apart(axes)
    markers = axes.transData.transform(points)
    for box in words_in(axes).values():
        assert not any(box.contains(x, y) for x, y in markers)
        assert box.fully_overlaps(axes.bbox)
    assert any(isinstance(text, Annotation) and text.arrow_patch for text in axes.texts)  # a hair line to a farther name
