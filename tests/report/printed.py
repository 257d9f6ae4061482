"""How a figure looks in print: its text is large enough, nothing leaves it, and no words overlap."""

from __future__ import annotations

from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from numdev.report.figures.theme import PAGE, SMALL


def written(figure: Figure) -> list[Text]:
    """The words of a figure."""
    return [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip() and text.get_visible()]


def assert_legible(figure: Figure) -> None:
    """No text is under 7 pt where the figure is as wide as it is printed; superscripts are part of their text."""
    scale = min(1.0, PAGE / figure.get_size_inches()[0])
    assert written(figure)
    assert not [(text.get_text(), text.get_fontsize()) for text in written(figure) if text.get_fontsize() * scale < SMALL - 0.01]
    assert SMALL >= 7


def assert_inside(figure: Figure) -> None:
    """Nothing that is drawn leaves the figure by more than a fiftieth of an inch."""
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) > -0.02
    assert box.x1 < width + 0.02
    assert box.y1 < height + 0.02


def assert_apart(axes: Axes) -> None:
    """No words in a panel overlap, by more than half a pixel; the arrows of annotations may."""
    boxes = {text: Text.get_window_extent(text) for text in axes.texts if text.get_text()}
    for one, other in combinations(boxes, 2):
        assert not boxes[one].padded(-0.5).overlaps(boxes[other]), (one.get_text(), other.get_text())
