"""The axes that figures share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from numdev.report.figures.marks import at_least_a_decade, name_steps, short
from numdev.report.figures.theme import FORMAT_COLOURS


@given(st.floats(1e-12, 1e3), st.floats(1, 1e3))
def test_an_axis_of_a_decade(low: float, ratio: float) -> None:
    ends = at_least_a_decade(low, low * ratio)
    assert ends[1] / ends[0] == pytest.approx(max(10, ratio))
    assert math.prod(ends) == pytest.approx(low * low * ratio)  # about the same middle


@pytest.mark.parametrize(("value", "text"), [(0.02, "0.02"), (50.0, "50"), (1e-8, "$10^{-8}$"), (5e-9, r"$5 \times 10^{-9}$")])
def test_plain_numbers_on_a_log_axis(value: float, text: str) -> None:
    axis = Figure().add_subplot().yaxis
    name_steps(axis)
    assert axis.get_major_formatter()(value) == text


@pytest.mark.parametrize(("value", "text"), [(64, "64"), (1024, "1k"), (24576, "24k"), (1 << 21, "2M"), (1536, "1.5k")])
def test_short(value: int, text: str) -> None:
    assert short(float(value)) == text


def test_colours_are_one_to_a_format() -> None:
    assert len(set(FORMAT_COLOURS.values())) == len(FORMAT_COLOURS)
