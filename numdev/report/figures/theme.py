"""The style of all figures, and their bytes: the same figure gives the same bytes, and an SVG says the value of each point."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Every colour of every figure. One colour has one meaning in a whole document, and no other module names one.
# The hues of Okabe & Ito and of Paul Tol: told apart with any colour vision, and in print.
BLUE, VERMILION = "#0072B2", "#D55E00"
GREY, PALE, BLACK = "#595959", "#D9D9D9", "#000000"  # references and words, bands, what is neither tiled nor its baseline
TILED, FP32_INSIDE, BASELINE = BLUE, "#3A9BD9", VERMILION
"""Tiled attention with every step in the format, and with FP32 inside; and untiled attention in the format."""
MEANINGS = {
    **{"bf16": "#882255", "fp16": "#E69F00", "fp32": "#009E73", "fp64": "#332288", "tf32": "#999933", "e4m3fn": "#CC79A7"},
    **{"variant": TILED, "baseline": BASELINE},
    **{"dQ": "#6A3D9A", "dK": "#B15928", "dV": "#33A02C", "delta": "#E7298A"},
}
"""The colour of a value that means the same in every figure: formats, subjects, outputs of the backward pass."""
CHANGE_COLOURS = {
    "init": "#44AA99",
    "order": "#117733",
    "ranks": "#AA4499",
    "restart": "#661100",
    "noise": "#999933",
    "exact": "#332288",
    "from_exact": "#6699CC",
    "fault": "#DDAA33",
    "precision": "#EE3377",
    "several": "#B8A33D",
}
"""The colours of changes of a training run beside its attention, which has the colour of tiled attention."""
SERIES = ("#6699CC", "#CC6677", "#88A04F", "#B07AA1", "#C49A6C", "#76B7B2", "#4E6172")
"""The colours of swept values, which mean nothing beyond their figure."""

PAGE = 6.69  # inches: the width of the text on a page, at which figures are printed
SMALL = 7  # points: no text is smaller, but for superscripts

_STYLE = mpl.rc_params_from_file(Path(__file__).with_name("numdev.mplstyle"), use_default_template=False)


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's own defaults and the style above, whatever the user's settings are; also a decorator of what draws."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


@styled()
def freeze(figure: Figure) -> Figure:
    """Lays the figure out once, so that PNG and SVG agree."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def to_png(figure: Figure) -> bytes:
    return _saved(figure, "png", {"Software": None})


def to_svg(figure: Figure, title: str, alt: str) -> bytes:
    """The figure as SVG, its title and its description for those who cannot see it inside, and the value of each point."""
    svg = _saved(figure, "svg", {"Date": None, "Creator": "numdev", "Title": title}).decode()
    named = f"<title>{escape(title, quote=False)}</title>"
    head, _, tail = svg.partition(named)
    body, end, rest = tail.rpartition("</svg>")
    return f"{head}{named}\n <desc>{escape(alt, quote=False)}</desc>{body}{_circles(figure)}{end}{rest}".encode()


@styled()
def _saved(figure: Figure, kind: str, metadata: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


_RADIUS = 4  # points around which a pointer meets a value
_NOTES: WeakKeyDictionary[Axes, list[tuple[float, float, str]]] = WeakKeyDictionary()


def note(axes: Axes, x: float, y: float, text: str) -> None:
    """Keeps the value of a point in words, for the figure's SVG."""
    _NOTES.setdefault(axes, []).append((x, y, text))


def _circles(figure: Figure) -> str:
    """An unseen circle around each point inside its axes, which has its value for a title. The figure must be laid out."""
    circles = []
    for axes in figure.axes:
        for x, y, text in _NOTES.get(axes, ()):
            pixel = axes.transData.transform((x, y))
            if np.isfinite(pixel).all() and axes.bbox.padded(1).contains(*pixel):
                left, up = pixel * 72 / figure.dpi
                place = f'cx="{left:.1f}" cy="{figure.get_figheight() * 72 - up:.1f}" r="{_RADIUS}"'
                circles.append(f"<circle {place}><title>{escape(text, quote=False)}</title></circle>")
    return "\n".join(['<g class="values" fill="none" pointer-events="all">', *circles, "</g>\n"]) if circles else ""
