"""The style of all figures, and their bytes: the same figure gives the same bytes, and an SVG says the value of each point."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from html import escape
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from numdev.report.statistics import significant

_P = ParamSpec("_P")

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
    """Matplotlib's own defaults and the style above, whatever the user's settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


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
    return _saved(figure, "png", {"Software": None})


def to_svg(figure: Figure, title: str, alt: str) -> bytes:
    """The figure as SVG, its title and its description for those who cannot see it inside, and the value of each point."""
    svg = _saved(figure, "svg", {"Date": None, "Creator": "numdev", "Title": title}).decode()
    named = f"<title>{escape(title, quote=False)}</title>"
    head, _, tail = svg.partition(named)
    body, end, rest = tail.rpartition("</svg>")
    return f"{head}{named}\n <desc>{escape(alt, quote=False)}</desc>{body}{_circles(figure)}{end}{rest}".encode()


def _saved(figure: Figure, kind: str, metadata: Any) -> bytes:
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


_MOST = 200  # points of a line: what has more is a curve, whose single points say nothing
_RADIUS = 4  # points around which a pointer meets a value


@dataclass(frozen=True)
class Value:
    """A point of a figure: where it lies, in points from the left and from the top, and its value in words."""

    x: float
    y: float
    text: str


def _circles(figure: Figure) -> str:
    """An unseen circle around each point, which has its value for a title."""
    circles = "\n".join(
        f'<circle cx="{value.x:.1f}" cy="{value.y:.1f}" r="{_RADIUS}"><title>{escape(value.text, quote=False)}</title></circle>'
        for value in values(figure)
    )
    return f'<g class="values" fill="none" pointer-events="all">\n{circles}\n</g>\n' if circles else ""


def values(figure: Figure) -> list[Value]:
    """Every marked point inside its axes, by the label of its line. The figure must be laid out."""
    points = []
    for axes in figure.axes:
        title = " ".join((axes.get_title("left") or axes.get_title()).split())
        across = _namer(axes.xaxis, axes.get_xlabel() or figure.get_supxlabel())
        up = _namer(axes.yaxis, axes.get_ylabel() or figure.get_supylabel())
        for line, name, ends in _marked(axes):
            for place, (x, y) in enumerate(np.asarray(line.get_xydata(), dtype=float)):
                pixel = axes.transData.transform((x, y))
                if not (np.isfinite(pixel).all() and axes.bbox.padded(1).contains(*pixel)):
                    continue
                words = filter(None, (title, "" if name.startswith("_") else name, across(x), up(y)))
                text = "; ".join(words) + (ends[place] if place < len(ends) else "")
                left, height = pixel[0] * 72 / figure.dpi, pixel[1] * 72 / figure.dpi
                points.append(Value(float(left), float(figure.get_figheight() * 72 - height), text))
    return points


def _marked(axes: Axes) -> Iterator[tuple[Any, str, list[str]]]:
    """Lines with markers, their labels, and in words the interval of each point."""
    taken: set[int] = set()
    for container in axes.containers:
        if isinstance(container, ErrorbarContainer) and container.lines[0] is not None:
            line, caps, bars = container.lines
            taken |= {id(line), *map(id, caps)}  # the caps of intervals are markers too
            ends = [_ends(one, container.has_yerr) for one in bars[0].get_segments()] if bars else []
            yield line, str(container.get_label() or "_"), ends
    for line in axes.lines:
        marked = line.get_marker() not in ("None", "none", "", " ", None) and line.get_transform() == axes.transData
        if marked and id(line) not in taken and len(np.asarray(line.get_xdata())) <= _MOST:
            yield line, str(line.get_label()), []


def _ends(segment: Any, upright: bool) -> str:
    low, high = (float(end[1 if upright else 0]) for end in segment)
    known = math.isfinite(low) and math.isfinite(high) and low != high
    return f" ({significant(low, 3)} to {significant(high, 3)})" if known else ""


def _namer(axis: Any, label: str) -> Callable[[float], str]:
    """Words for a place on an axis: its label with the value, or with the name of its tick; an axis may count entries."""
    texts = {
        float(place): " ".join(text.get_text().split())
        for place, text in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False)
    }
    names = {place: text for place, text in texts.items() if text and "$" not in text and not _is_number(text)}
    counts = len(names) == len(texts) and list(names) == list(range(len(names)))
    head = f"{' '.join(label.replace('$', '').split())}: " if label else ""

    def words(value: float) -> str:
        near = min(names, key=lambda place: abs(place - value), default=math.inf)
        is_named = abs(near - value) <= (0.5 if counts else 1e-9 * abs(value))
        return head + (names[near] if is_named else significant(value, 3))

    return words


def _is_number(text: str) -> bool:
    try:
        float(text.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return False
    return True
