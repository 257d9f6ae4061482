"""Shapes as the share of each pixel that they cover, by their signed distance."""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
from jaxtyping import Float32, Int


class Shape(Enum):
    """What a thing is; each fits into 1.04 radii around its centre."""

    CIRCLE = "circle"
    SQUARE = "square"
    TRIANGLE = "triangle"


_HALF_SIDE = 0.88  # of a square, in radii
_INRADIUS = 0.6  # of an equilateral triangle, in radii; its bounding box is 1.8 high and stands around the centre
_HALF = np.float32(0.5)
_SLOPE = np.float32(math.sqrt(3) / 2)


def render(
    shapes: Int[np.ndarray, "count things"],
    centres: Float32[np.ndarray, "count things 2"],
    radii: Float32[np.ndarray, "count things"],
    picture: int,
) -> Float32[np.ndarray, "count things height width"]:
    """The share of each pixel that each thing covers; nothing where the radius is NaN.

    With s the signed distance of a pixel's centre to the outline (negative inside, in pixels), the share is 1/2 - s, cut off at 0
    and 1. That is exact for a straight outline along the pixels, and for others up to the angle at which the outline crosses a
    pixel. Shapes are places in `Shape`; centres are (right, down).
    """
    count, things = shapes.shape
    found = np.zeros((count * things, picture, picture), dtype=np.float32)
    shapes, centres, radii = shapes.reshape(-1), centres.reshape(-1, 2), radii.reshape(-1)
    pixels = np.arange(picture, dtype=np.float32) + np.float32(0.5)
    for place, shape in enumerate(Shape):
        rows = np.flatnonzero((shapes == place) & ~np.isnan(radii))
        right = pixels - centres[rows, 0, None]
        down = pixels - centres[rows, 1, None]
        found[rows] = _covered(shape, right[:, None, :], down[:, :, None], radii[rows, None, None])
    return found.reshape(count, things, picture, picture)


def _covered(shape: Shape, right: np.ndarray, down: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """1/2 - s between 0 and 1 for a shape around the origin; `right` has one row, `down` one column.

    The s of squares and triangles is the largest signed distance to one of their sides: exact inside, and outside but beyond a
    corner, where it is smaller than the distance. What depends on a row or a column alone is computed once for it.
    """
    if shape is Shape.CIRCLE:
        distance = right * right + down * down
        np.sqrt(distance, out=distance)
        np.subtract(radius + _HALF, distance, out=distance)
        return np.clip(distance, 0, 1, out=distance)
    right = np.abs(right)
    if shape is Shape.SQUARE:
        edge = radius * np.float32(_HALF_SIDE) + _HALF
        return np.minimum(np.clip(edge - right, 0, 1), np.clip(edge - np.abs(down), 0, 1))
    inradius = radius * np.float32(_INRADIUS)
    below = down - inradius / 2  # the middle of the inscribed circle stands half an inradius below that of the bounding box
    edge = inradius + _HALF
    sides = (edge + below / 2) - right * _SLOPE
    np.minimum(sides, np.minimum(edge - below, 1), out=sides)
    return np.maximum(sides, 0, out=sides)
