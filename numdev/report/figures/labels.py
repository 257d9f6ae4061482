"""Places words in a figure so that they overlap neither one another nor the data."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import OffsetFrom
from matplotlib.transforms import Bbox, BboxBase

from numdev.report.figures.style import GREY, SMALL

Name = tuple[float, float, str, str]  # x, y, text, colour

WHITE: dict[str, Any] = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}  # behind words, over a grid
_ARROW: dict[str, Any] = {"color": GREY, "linewidth": 0.8, "mutation_scale": 6, "shrinkA": 0, "shrinkB": 0}
_HAIR: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 0}
_NEAR = 6.0  # points from the centre of a marker to its name
_PLACES = [
    (across * far, up * far)
    for far in (_NEAR + 9 * line for line in range(8))  # 9 points are a line of small words
    for across, up in ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
]


def room_above(low: float, high: float, share: float) -> float:
    """The upper end of a log axis from `low` at which its upper `share` stays free above `high`."""
    return low * (high / low) ** (1 / (1 - share))


def corner(axes: Axes, words: str, *, down: int = 2, left: int = 4, **look: Any) -> None:
    """Small words in the upper right corner, `down` and `left` of it in points."""
    places: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate(words, (1, 1), (-left, -down), bbox=WHITE, **places, **({"fontsize": SMALL} | look))


def paper_goes(axes: Axes, words: str, *, up: bool) -> None:
    """The trend that the paper found: grey words in the corner, and a short arrow that rises or falls."""
    corner(axes, words, down=3, left=24, color=GREY)
    from_corner = OffsetFrom(axes.patch, (1, 1), "points")
    low, high = -12, -3
    start, end = (low, high) if up else (high, low)
    axes.annotate(
        "",
        (-3, end),
        (-21, start),
        xycoords=from_corner,
        textcoords=from_corner,
        arrowprops=_ARROW | {"arrowstyle": "-|>"},
    )


def name_points(axes: Axes, names: list[Name]) -> None:
    """Writes the name of each point in the nearest place around it that overlaps no other words and no marker.

    A name that stands farther off has a hair line to its point. The figure must be laid out: places are in pixels.
    """
    half = _NEAR / 2 * axes.figure.dpi / 72
    centres = axes.transData.transform([(x, y) for x, y, _, _ in names])
    taken = [text.get_window_extent() for text in axes.texts]
    taken += [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in centres]
    for x, y, text, shade in names:
        note = axes.annotate(text, (x, y), _PLACES[0], textcoords="offset points", color=shade, fontsize=SMALL)
        for across, up in _PLACES:
            note.set(
                position=(across, up), ha=("center", "left", "right")[_sign(across)], va=("center", "bottom", "top")[_sign(up)]
            )
            box = note.get_window_extent()
            if _inside(box, axes.bbox) and not any(map(box.overlaps, taken)):
                break
        taken.append(note.get_window_extent())
        if max(map(abs, note.get_position())) > _NEAR:
            axes.annotate("", (x, y), note.get_position(), textcoords="offset points", arrowprops=_HAIR | {"color": shade})


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _inside(box: BboxBase, outer: BboxBase) -> bool:
    return bool(outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1)


def spread(places: list[float], gap: float) -> list[float]:
    """Moves places until they are `gap` apart, in the same order, and at least half a gap inside 0 and 1 if they fit."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for _ in range(50):
        for below, above in pairwise(order):
            missing = max(0.0, gap - (moved[above] - moved[below]))
            moved[below] -= missing / 2
            moved[above] += missing / 2
    least = gap / 2
    for i in order:
        moved[i] = least = max(moved[i], least)
        least += gap
    most = 1 - gap / 2
    for i in reversed(order):
        moved[i] = most = min(moved[i], most)
        most -= gap
    return moved
