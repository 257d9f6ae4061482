"""The functions of the report that `numdev` offers that import what reads and draws when they are called.

pandas and matplotlib take several times as long to import as numdev, and `from numdev import *` fetches every public name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Float
    from matplotlib.figure import Figure
    from torch import Tensor

    from numdev.arithmetic.formats import Format


def load(results: str | Path = "results", studies: str | Sequence[str] | None = None) -> pd.DataFrame:
    """Everything that a folder of results holds, as one tidy table: studies, sweeps and single points.

    A row is one replicate of one comparison: of a deviation the subject (`variant` or `baseline`), the output and the reference
    (`golden`, `golden_same_inputs` or `baseline`), with every metric; of speed one timed replicate. Beside the metrics stand the
    columns of its point: `study`, `scenario`, every setting with its dotted name, such as `problem.shape.keys`, and as
    `label.<name>` what the study or the command line states, such as `label.problem.n`. A baseline stands beside each point of
    its problem.

    Args:
        results: the folder, as `results=` of the commands names it.
        studies: the name of a study or sweep, or several; all unless given.

    Raises:
        BadInput: if the folder holds no results, or not those asked for.
    """
    from numdev.report.reading import frames
    from numdev.report.reading.view import tidy
    from numdev.results.store import Store

    return tidy(frames.load(Store(Path(results)), [studies] if isinstance(studies, str) else studies))


def plot(
    frame: pd.DataFrame | Sequence[Mapping[str, Any]],
    x: str | None = None,
    y: str | None = None,
    colour: str | Sequence[str] | None = None,
    facet: str | Sequence[str] | None = None,
    reference: str | None = None,
) -> Figure:
    """A metric of results over one column, a line for each value of another, a panel for each value of a third.

    Means over seeds, geometric where all values are positive, with their 95 % confidence intervals. Numbers on x are joined by
    lines, anything else is dots. What is left out is chosen by what differs in the table. A name is that of the command line,
    such as `problem.n` or `precision`, or a column of the table, such as `variant.tiling.bc`, `subject` or `reference`.

    Args:
        frame: of `numdev.load`, or part of it; or the rows of `numdev.shadow`, whose heads are the replicates.
        x: what the metric is drawn over.
        y: the metric: `rmse` of the primary output, `lse.rmse` of the output `lse`, `latency` of speed.
        colour: what the lines differ in; a list of names is their combinations.
        facet: what the panels differ in, likewise.
        reference: what the metric is taken against: `golden` unless given, `golden_same_inputs` or `baseline`.

    Raises:
        BadInput: for a name that the table does not have, with similar ones, and for more lines or panels than can be told apart.
    """
    import pandas as pd

    from numdev.report.figures.plot import plot_of
    from numdev.report.reading.view import of_shadow

    if not isinstance(frame, pd.DataFrame):
        frame = of_shadow(frame)
    view = {"x": x, "y": y, "colour": colour, "facet": facet, "reference": reference}
    return plot_of(frame, view)(frame)


def element_errors(x: Float[Tensor, "rows columns"], reference: Float[Tensor, "rows columns"], fmt: Format) -> pd.DataFrame:
    """One row per element of an output, in the order of its rows and columns.

    Columns: `row`, `column`, `reference` r, `error` D = x - r, `error_u` D / (u max |r|) and `error_ulp`
    D / ulp(r), the last two in the format `fmt`, whose name is `format`. NaN and Inf stay what they are.

    Raises:
        BadInput: if the shapes differ or are empty.
    """
    from numdev.report.figures import elements

    return elements.element_errors(x, reference, fmt)


def error_map(elements: pd.DataFrame, title: str = "", reference: str = "golden") -> Figure:
    """`D = x - r` of one matrix, in units of `u max |r|`; `elements` are those of `element_errors`.

    The colours end at the 98th percentile of `|D|`. A ring marks the largest `|D|`; NaN and Inf are black. `title`, such as the
    policy in words, is written above; `reference` is what r is called.
    """
    from numdev.report.figures.elements import map_of

    return map_of(elements, title, reference)


def error_histogram(elements: pd.DataFrame, title: str = "") -> Figure:
    """The distribution of `(x - r) / ulp(r)`, the ulp being that of the format; `elements` are those of `element_errors`.

    A grey band marks +- 1/2 ulp, within which golden rounded once to nearest lies. The axis ends at the 98th percentile.
    `title`, such as the policy in words, is written above.
    """
    from numdev.report.figures.elements import histogram_of

    return histogram_of(elements, title)
