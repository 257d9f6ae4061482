"""How large the text of a figure is in print."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.text import Text

from numdev.report.document.context import WIDEST
from numdev.report.figures.theme import SMALL


def assert_legible(figure: Figure) -> None:
    """No text is under 7 pt where the figure is as wide as it is printed; superscripts are part of their text."""
    scale = min(1.0, WIDEST / (72 * figure.get_size_inches()[0]))
    written = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip()]
    assert written
    small = [(text.get_text(), text.get_fontsize()) for text in written if text.get_fontsize() * scale < SMALL - 0.01]
    assert not small
    assert SMALL >= 7
