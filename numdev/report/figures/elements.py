"""The error of every element of one matrix: as a tidy table, as a map and as a histogram."""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput
from numdev.report.figures.style import BLUE, GREY, PAGE, PALE, VERMILION, laid_out

ROW, COLUMN = "row", "column"
SHADES = LinearSegmentedColormap.from_list("error", [BLUE, "white", VERMILION]).with_extremes(bad="black")
_SHOWN = 0.98  # share of the elements within the scale of a map or histogram: a few large errors would hide the rest
BINS = 121  # odd, so that one bin is centred at zero


def element_errors(x: Float[Tensor, "rows columns"], reference: Float[Tensor, "rows columns"], fmt: Format) -> pd.DataFrame:
    """See `numdev.report.offered.element_errors`."""
    if x.shape != reference.shape or x.numel() == 0:
        raise BadInput("reference", tuple(reference.shape), f"give the shape of x, {tuple(x.shape)}, not empty")
    x, reference = x.double().cpu(), reference.double().cpu()
    error = x - reference
    row, column = np.indices(tuple(error.shape))
    largest = float(reference.abs().amax()) or 1.0
    columns = {
        "reference": reference,
        "error": error,
        "error_u": error / (fmt.u * largest),
        "error_ulp": error / fmt.ulp(reference),
    }
    table = {ROW: row.ravel(), COLUMN: column.ravel()} | {name: values.flatten().numpy() for name, values in columns.items()}
    return pd.DataFrame(table).assign(format=fmt.name)


@laid_out
def map_of(elements: pd.DataFrame, title: str, reference: str) -> Figure:
    """See `numdev.report.offered.error_map`."""
    error = elements.pivot(index=COLUMN, columns=ROW, values="error_u").to_numpy()
    end = end_of(error)
    shown = np.ma.masked_invalid(error)
    figure = Figure(figsize=(PAGE, 2.3), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shown, cmap=SHADES, vmin=-end, vmax=end, aspect="auto", interpolation="nearest", origin="lower")
    if np.isfinite(error).any():
        column, row = np.unravel_index(int(np.ma.abs(shown).argmax()), error.shape)
        axes.plot(row, column, marker="o", color="black", markerfacecolor="none", markersize=7, clip_on=False)
    axes.grid(visible=False)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("row of the output")
    axes.set_ylabel("column of the output")
    figure.colorbar(image, ax=axes, extend="both", label=f"error in u max |{reference}|", pad=0.01)
    return figure


@laid_out
def histogram_of(elements: pd.DataFrame, title: str) -> Figure:
    """See `numdev.report.offered.error_histogram`."""
    error = elements["error_ulp"].to_numpy()
    finite = error[np.isfinite(error)]
    end = max(1.0, end_of(error))
    figure = Figure(figsize=(PAGE, 2.1), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(-0.5, 0.5, color=PALE, zorder=0)
    axes.hist(finite, bins=BINS, range=(-end, end), color=BLUE, weights=np.full(len(finite), 1 / len(error)))
    axes.set_xlim(-end, end)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_title("\n".join(words_of(error, end)), loc="right" if title else "left", fontsize=7, color=GREY)
    axes.set_xlabel(f"error in ulp of {elements['format'].iloc[0]}; grey: ± ½ ulp, one rounding to nearest")
    axes.set_ylabel("share of elements")
    return figure


def words_of(error: NDArray[np.float64], end: float) -> list[str]:
    """Words on the elements that the histogram leaves out or cannot show."""
    finite = np.abs(error[np.isfinite(error)])
    beyond, outside = ((finite > limit).sum() / len(error) for limit in (0.5, end))
    words = [f"{100 * beyond:.3g} % beyond ½ ulp, {100 * outside:.2g} % outside the axis"]
    lost = len(error) - len(finite)
    return words + ([f"{lost} element{'s are' if lost > 1 else ' is'} NaN or Inf"] if lost else [])


def end_of(error: NDArray[np.float64]) -> float:
    """Where a scale ends, the same on both sides of zero."""
    finite = np.abs(error[np.isfinite(error)])
    return float(np.quantile(finite, _SHOWN, method="higher")) or 1.0 if finite.size else 1.0
