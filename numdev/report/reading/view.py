"""What a figure of results shows: a metric over one thing, a line for each value of another, a panel for each of a third.

A name is a column of the table, or the name that the command line has for it: `problem.n` is the column `label.problem.n`, and
`out.max_difference` the metric `max_difference` of the output `out`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.errors import BadInput
from numdev.measurement.deviation.metrics import NONFINITE
from numdev.measurement.speed.columns import COUNTED, FOLLOWING, MEASURED
from numdev.nearest import one_of
from numdev.report.reading.derived import NEEDS
from numdev.report.reading.frames import LABEL, PRIMARY
from numdev.report.reading.lean import part
from numdev.report.reading.scenarios import TITLE
from numdev.report.reading.split import PLACES, differs, split

OF_A_COMPARISON = {"subject": "variant", "reference": "golden"}  # what is drawn unless a view spreads it out or names another
_OUTPUT = "output"
_OF_A_MARK = (*NONFINITE, "seed", "cluster")  # of which its mean and its interval are made, beside the metric
_OF_A_CALL = {**MEASURED, **COUNTED, **FOLLOWING}
_NO_METRIC = ("seed", "environment", "seconds", "seeds", "replicates")
CHIEF = "chief"
"""In `DataFrame.attrs`, of a kind of the user's own: its first figure."""
_MOST_NAMED = 16  # names that an error lists


@dataclass(frozen=True)
class View:
    """What is drawn.

    Attributes:
        x: what the metric is drawn over.
        y: the metric, such as `rmse` of the primary output or `out.max_difference`.
        colour: what the lines of a panel differ in, one or several names.
        facet: what the panels differ in, one or several names.
        reference: what the metric is taken against: golden, golden_same_inputs or baseline.
    """

    x: str
    y: str
    colour: tuple[str, ...] = ()
    facet: tuple[str, ...] = ()
    reference: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """What tells the marks of the figure apart."""
        return self.x, *self.colour, *self.facet


@dataclass(frozen=True)
class Shown:
    """The rows that a view shows, with the names of their columns.

    Attributes:
        rows: of the table, those of one comparison unless the view spreads it out, with the columns that are drawn.
        x, metric: columns.
        colour, facet: columns, which may be none.
        split: further columns in which points differ that a line would join; each value has a line of its own.
        output: whose metric it is; empty where rows state none, or where the view spreads them out.
        reference: what it is taken against; empty likewise.
    """

    rows: pd.DataFrame
    x: str
    metric: str
    colour: tuple[str, ...] = ()
    facet: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    output: str = ""
    reference: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """What tells the lines of a panel apart."""
        return *self.colour, *self.split


def asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a view that somebody states: a name, or for `colour` and `facet` several.

    Raises:
        BadInput: for a key that is none, and for a name that is no text.
    """
    known = ("x", "y", "colour", "facet", "reference")
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise BadInput("plot", key, one_of(key, known))
        if value is None or value == "":
            continue
        names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
        if not names or not all(isinstance(name, str) for name in names) or (len(names) > 1 and key not in ("colour", "facet")):
            raise BadInput(f"plot.{key}", value, "give the name of a column, as in x: problem.n")
        found[key] = names if key in ("colour", "facet") else names[0]
    return found


def view_of(frame: pd.DataFrame, given: Mapping[str, Any], usual_y: str = "") -> View:
    """The view that somebody asks for, with what they leave open chosen as `usual` does.

    Raises:
        BadInput: for a name that the table does not have.
    """
    stated = asked(given)
    for key in ("x", "colour", "facet"):
        for name in _names(stated.get(key, ())):
            column_of(frame, name, f"plot.{key}")
    if "y" in stated:
        metric_of(frame, stated["y"])
    taken = [column_of(frame, name, "plot") for key in ("x", "colour", "facet") for name in _names(stated.get(key, ()))]
    base = usual(frame, usual_y, without=taken, x=stated.get("x"))
    if "colour" in stated or "facet" in stated:  # whoever states one decides how the rest is shown
        base = replace(base, colour=(), facet=())
    return replace(base, **stated)


def _names(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def column_of(frame: pd.DataFrame, name: str, asked_by: str) -> str:
    """The column that a name stands for.

    Raises:
        BadInput: where there is none, with those that have a similar name.
    """
    for column in (name, f"{LABEL}{name}"):
        if column in frame and frame[column].notna().any():
            return column
    known = [each for each in map(str, frame.columns) if frame[each].notna().any() and f"{LABEL}{each}" not in frame]
    near = sorted((spoken(each) for each in known if not _is_metric(frame, each)), key=lambda each: each not in _varying(frame))
    raise BadInput(asked_by, name, f"the results have no such column; {one_of(name, near, most=_MOST_NAMED)}")


def spoken(column: str) -> str:
    """A column's name as the command line has it."""
    return column.removeprefix(LABEL)


def _varying(frame: pd.DataFrame) -> set[str]:
    return {spoken(name) for name in axes_of(frame)}


def metric_of(frame: pd.DataFrame, name: str) -> tuple[str, str]:
    """The output and the column of a metric; an empty output where the name states none.

    Raises:
        BadInput: where there is no such metric, with those that have a similar name.
    """
    outputs = _values(frame, _OUTPUT)
    output, _, metric = name.partition(".")
    if output in outputs and _is_metric(frame, metric):
        return output, metric
    if _is_metric(frame, name):
        return "", name
    metrics = [each for each in map(str, frame.columns) if _is_metric(frame, each)]
    if output in outputs and metric:
        raise BadInput("plot.y", name, f"{output} has no such metric; {one_of(metric, metrics, most=_MOST_NAMED)}")
    known = [f"{each}.{one}" for each in outputs for one in metrics] + metrics if "." in name else metrics
    raise BadInput("plot.y", name, f"the results have no such metric; {one_of(name, known, most=_MOST_NAMED)}")


def _is_metric(frame: pd.DataFrame, name: str) -> bool:
    """Whether a column holds figures, of which a mean over seeds says something."""
    if (
        name not in frame
        or name in (*_NO_METRIC, *NEEDS, *frame.attrs.get(PLACES, ()))
        or name.startswith((LABEL, "problem.", "variant.", "baseline.", "timing."))
    ):
        return False
    values = frame[name]
    is_number = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    return is_number and bool(values.notna().any())


def _values(frame: pd.DataFrame, column: str, kept: NDArray[np.bool_] | None = None) -> list[str]:
    """The values of a column, or of its rows that are kept; none where there is no such column."""
    if column not in frame:
        return []
    values = frame[column] if kept is None else frame[column][kept]
    return [str(value) for value in values.dropna().unique()]


def shown(frame: pd.DataFrame, view: View) -> Shown:
    """The rows of a view.

    Unless it spreads them out, those of the variant against golden, of the primary output or the one that `y` names.

    Raises:
        BadInput: for a name that the table does not have, and where nothing is left to draw.
    """
    output, metric = metric_of(frame, view.y)
    x = column_of(frame, view.x, "plot.x")
    colour = tuple(column_of(frame, name, "plot.colour") for name in view.colour)
    facet = tuple(column_of(frame, name, "plot.facet") for name in view.facet)
    spread, kept, fixed = {x, *colour, *facet}, np.ones(len(frame), dtype=np.bool_), dict[str, str]()
    wanted = OF_A_COMPARISON | ({"reference": view.reference} if view.reference else {})
    for column, value in wanted.items():
        if column in spread or column in frame.attrs.get(PLACES, ()) or not (held := _values(frame, column, kept)):
            continue
        if value not in held:
            field = "plot.reference" if column == "reference" else "plot"
            raise BadInput(field, value, f"the results have {', '.join(held)}")
        kept &= (frame[column] == value).to_numpy(dtype=bool)
        fixed[column] = value
    if output:
        kept &= (frame[_OUTPUT] == output).to_numpy(dtype=bool)
    elif PRIMARY in frame and _OUTPUT not in spread and frame[PRIMARY][kept].notna().any():
        kept &= frame[PRIMARY].fillna(value=False).to_numpy(dtype=bool)
    kept &= (frame[metric].notna() | frame.get("status", pd.Series("", frame.index)).eq("nonfinite")).to_numpy(dtype=bool)
    rows = part(frame, kept)
    if rows.empty:
        raise BadInput("plot.y", view.y, "no point has a figure for it; choose another metric or reference")
    one = _values(rows, _OUTPUT)
    named, against = one[0] if len(one) == 1 else "", fixed.get("reference", "")
    if metric in _OF_A_CALL or metric.startswith("counter."):  # no comparison, though one may stand in the same row
        named = against = ""
    rows, apart = split(rows, x, (*colour, *facet), with_baseline=view.reference == "baseline" or "subject" in spread)
    own = [name for name in rows if name in {*spread, *apart, metric, *_OF_A_MARK}]  # a figure sorts them, which copies
    if TITLE in apart:  # too long for a legend
        facet = (TITLE, *facet)
    lines = tuple(name for name in apart if name != TITLE)
    return Shown(rows[own], x, metric, colour, facet, lines, named, against)


def axes_of(frame: pd.DataFrame) -> list[str]:
    """The columns in which rows differ: scenarios, then settings, labels or where none differs any other, then `PLACES`."""
    circumstances = [name for name in ("study", TITLE) if differs(frame, name)]
    if len(circumstances) == 2 and frame.groupby("study")[TITLE].nunique().max() == 1:
        circumstances.remove(TITLE)  # each study has one scenario, and says enough
    labels = [name for name in map(str, frame.columns) if name.startswith(LABEL) and differs(frame, name)]
    own = [name for name in frame.attrs.get(PLACES, ()) if differs(frame, name)]
    if labels:
        return [*circumstances, *labels, *own]
    settings = [name for name in map(str, frame.columns) if name.startswith(("problem.", "variant.")) and differs(frame, name)]
    return [*circumstances, *settings, *own]


def is_numeric(values: pd.Series[Any]) -> bool:
    """Whether values are numbers throughout, so that they have a place on an axis of numbers."""
    numbers = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
    return numbers and bool(values.notna().all())


def usual(frame: pd.DataFrame, y: str = "", without: Iterable[str] = (), x: str | None = None) -> View:
    """The view of a sweep that nobody describes: a metric over its axes.

    Over the axis with the most different numbers, or where none has three, over the one with the most values. The next axis is
    told by colour, the one after it by panels; where there are more, colour tells several. Of deviations the metric is RMSE,
    which sees every element; of another kind its first figure.

    Raises:
        BadInput: where the table has no metric, or all its points are alike.
    """
    taken = set(without)
    axes = [name for name in axes_of(frame) if name not in taken]
    counts = {name: frame[name].nunique(dropna=False) for name in axes}
    places = [name for name in axes if name not in ("study", TITLE)]
    if x is None:
        numeric = [name for name in places if is_numeric(frame[name]) and counts[name] > 2]
        across = max(numeric or places or axes, key=lambda name: counts[name], default=None)
        x = spoken(across) if across else "study" if "study" in frame else ""
        axes = [name for name in axes if name != across]
    if not x:
        raise BadInput("plot.x", "", "the rows do not differ in any setting; name a column")
    facet = [name for name in axes if name in ("study", TITLE)]
    rest = [name for name in axes if name not in facet]
    if not facet and len(rest) > 1:
        facet.append(rest.pop(min(range(1, len(rest)), key=lambda i: counts[rest[i]])))
    return View(x, y or _usual_metric(frame), tuple(map(spoken, rest)), tuple(map(spoken, facet)))


def _usual_metric(frame: pd.DataFrame) -> str:
    metrics = [name for name in map(str, frame.columns) if _is_metric(frame, name)]
    if not metrics:
        raise BadInput("plot.y", "", "the results have no figures; no point was measured to its end")
    kinds = set(_values(frame, "kind"))
    wanted = "latency" if kinds == {"speed"} else frame.attrs.get(CHIEF, "rmse")
    return wanted if wanted in metrics else metrics[0]
