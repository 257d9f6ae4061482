"""Shapes against their areas, and against a dense sampling of each pixel."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numdev.training.data.drawing import Shape, render

SHAPES = list(Shape)
AREAS = {
    Shape.CIRCLE: math.pi,
    Shape.SQUARE: (2 * 0.88) ** 2,
    Shape.TRIANGLE: 3 * math.sqrt(3) * 0.6**2,  # of an equilateral triangle around a circle of radius 0.6
}
PERIMETERS = {Shape.CIRCLE: 2 * math.pi, Shape.SQUARE: 8 * 0.88, Shape.TRIANGLE: 6 * math.sqrt(3) * 0.6}


def single(values: object) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def one(shape: Shape, right: float, down: float, radius: float, picture: int = 32) -> np.ndarray:
    places = np.array([[SHAPES.index(shape)]])
    return render(places, single([[[right, down]]]), single([[radius]]), picture)[0, 0]


@given(st.sampled_from(SHAPES), st.floats(14, 18), st.floats(14, 18), st.floats(3, 9))
def test_pixels_add_up_to_the_area(shape: Shape, right: float, down: float, radius: float) -> None:
    # A pixel on the outline is off by at most 1/8 where that is straight, all with one sign in the worst case; a corner pixel by
    # at most 1, and a shape has up to 4.
    corners = {Shape.CIRCLE: 0.0, Shape.SQUARE: 4 * 0.25, Shape.TRIANGLE: 3 * 0.6}[shape]
    tolerance = corners + PERIMETERS[shape] * radius / 8
    assert one(shape, right, down, radius).sum() == pytest.approx(AREAS[shape] * radius**2, abs=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_pixel_is_the_share_of_points_that_lie_inside(shape: Shape) -> None:
    fine, radius, right, down = 16, 5.3, 15.7, 16.4
    at = (np.arange(32 * fine) + 0.5) / fine
    x, y = at[None, :] - right, at[:, None] - down
    if shape is Shape.CIRCLE:
        inside = x**2 + y**2 <= radius**2
    elif shape is Shape.SQUARE:
        inside = (abs(x) <= 0.88 * radius) & (abs(y) <= 0.88 * radius)
    else:  # top at 0.9 radii above the middle, base 0.9 below it; sides fall by sqrt(3)
        inside = (y <= 0.9 * radius) & (y >= -0.9 * radius + math.sqrt(3) * abs(x))
    share = inside.reshape(32, fine, 32, fine).mean(axis=(1, 3))
    wrong = abs(one(shape, right, down, radius) - share)
    # Along a slanted side: 1/8 at most, for one at 45 degrees. A corner of 60 degrees covers as little as 0.3 of its pixel.
    assert wrong.max() < 0.45
    assert np.quantile(wrong, 0.99) < 0.13


def test_a_square_along_the_pixels_is_exact_but_in_its_corners() -> None:
    found = one(Shape.SQUARE, 16.0, 16.0, 5.25 / 0.88)
    assert found[16, 16] == 1
    np.testing.assert_allclose(found[16, 10], 0.25, atol=1e-5)  # the outline passes at 10.75
    assert found[16, 9] == 0


def test_nothing_is_drawn_where_there_is_no_thing() -> None:
    assert not render(np.array([[0]]), single([[[16, 16]]]), single([[np.nan]]), 32).any()
