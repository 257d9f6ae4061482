"""The style of all figures, and their bytes: the same figure gives the same bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from numdev.report.figures.values import with_values

# Okabe & Ito's palette: told apart with any colour vision, and in print.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
INDIGO = "#332288"
GREY, PALE = "#595959", "#D9D9D9"
FORMAT_COLOURS = {"bf16": VERMILION, "fp16": BLUE, "fp32": GREEN, "fp64": PURPLE, "tf32": ORANGE, "e4m3fn": SKY}

HALF_PAGE, PAGE = 3.5, 7.2  # inches: one column and the full width of a two-column page
SMALL = 6.5  # points

_STYLE: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so text is as wide everywhere
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "errorbar.capsize": 2,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.fonttype": "path",
    "svg.hashsalt": "numdev",
    "path.simplify": False,
}


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's own defaults and the style above, whatever the user's settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def colour(fmt: str) -> str:
    """The colour of a number format."""
    return FORMAT_COLOURS.get(fmt, GREY)


def freeze(figure: Figure) -> Figure:
    """Lays the figure out once, so that PNG and SVG agree."""
    with styled():
        figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def to_svg(figure: Figure, title: str, alt: str) -> bytes:
    """The figure as SVG, its title and its description for those who cannot see it inside, and the value of each point."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "numdev", "Title": title})
    named = f"<title>{escape(title, quote=False)}</title>"
    text = buffer.getvalue().decode()
    if named not in text:
        raise AssertionError("matplotlib writes the title of an SVG differently now")
    return with_values(text.replace(named, f"{named}\n <desc>{escape(alt, quote=False)}</desc>", 1), figure).encode()
