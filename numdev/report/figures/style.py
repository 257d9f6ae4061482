"""The style of all figures, and their bytes: the same figure gives the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from html import escape
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from numdev.report.figures.values import with_values

_P = ParamSpec("_P")
Canvas = TypeVar("Canvas", FigureCanvasAgg, FigureCanvasSVG)

# Every colour of every figure. One colour has one meaning in a whole document, and no other module names one; a test checks both.
# The hues of Okabe & Ito and of Paul Tol: told apart with any colour vision, and in print.
BLUE, VERMILION = "#0072B2", "#D55E00"
GREY, PALE, BLACK = "#595959", "#D9D9D9", "#000000"  # references and words, bands, what is neither tiled nor its baseline
TILED, FP32_INSIDE, BASELINE = BLUE, "#3A9BD9", VERMILION
"""Tiled attention with every step in the format, and with FP32 inside; and untiled attention in the format."""
FORMAT_COLOURS = {
    "bf16": "#882255",
    "fp16": "#E69F00",
    "fp32": "#009E73",
    "fp64": "#332288",
    "tf32": "#999933",
    "e4m3fn": "#CC79A7",
}
OUTPUT_COLOURS = {"dq": "#6A3D9A", "dk": "#B15928", "dv": "#33A02C", "delta": "#E7298A"}
"""The outputs of the backward pass."""
CHANGE_COLOURS = {
    "init": "#44AA99",
    "order": "#117733",
    "ranks": "#AA4499",
    "restart": "#661100",
    "precision": "#EE3377",
    "several": "#B8A33D",
}
"""The colours of changes of a training run beside its attention, which has the colour of tiled attention."""
SERIES = ("#6699CC", "#CC6677", "#88A04F", "#B07AA1", "#C49A6C", "#76B7B2", "#4E6172")
"""The colours of swept values, which mean nothing beyond their figure."""

HALF_PAGE, PAGE = (
    3.3,
    6.69,
)  # inches: half and all of the width of the text on a page: figures are printed at their own size
SMALL = 7  # points: no text is smaller, but for superscripts

_STYLE: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so text is as wide everywhere
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
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


def laid_out(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """A drawing function in the style, its figure laid out."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with styled():
            return freeze(draw(*args, **kwargs))

    return drawn


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with styled(), _canvas(figure, FigureCanvasAgg) as canvas:
        canvas.print_png(buffer, metadata={"Software": None})  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def to_svg(figure: Figure, title: str, alt: str) -> bytes:
    """The figure as SVG, its title and its description for those who cannot see it inside, and the value of each point."""
    buffer = io.BytesIO()
    with styled(), _canvas(figure, FigureCanvasSVG) as canvas:
        metadata = {"Date": None, "Creator": "numdev", "Title": title}
        canvas.print_svg(buffer, metadata=metadata)  # type: ignore[no-untyped-call]
    named = f"<title>{escape(title, quote=False)}</title>"
    text = buffer.getvalue().decode()
    if named not in text:
        raise AssertionError("matplotlib writes the title of an SVG differently now")
    return with_values(text.replace(named, f"{named}\n <desc>{escape(alt, quote=False)}</desc>", 1), figure).encode()


@contextmanager
def _canvas(figure: Figure, kind: type[Canvas]) -> Iterator[Canvas]:
    """The figure on a canvas of its own, at the resolution of files; `Figure.savefig` would draw it once more, for its layout."""
    dpi, shown = figure.dpi, figure.canvas
    figure.set_dpi(mpl.rcParams["savefig.dpi"])
    try:
        yield kind(figure)
    finally:
        figure.set_canvas(shown)
        figure.set_dpi(dpi)
