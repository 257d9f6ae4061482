"""All results of a folder as one table, and views of it: a metric over one thing, lines and panels for the values of others.

A name is a column of the table, or the name that the command line has for it: `problem.n` is the column `label.problem.n`, and
`out.max_difference` the metric `max_difference` of the output `out`. No line joins points that differ in a setting which the
figure does not show: it is split by the fewest further columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.errors import BadInput, one_of
from numdev.measurement.metrics import NONFINITE
from numdev.measurement.speed import FOLLOWING, MEASURED
from numdev.report.reading import frames
from numdev.report.reading.columns import meaning
from numdev.report.reading.frames import LABEL, PRIMARY, SPEED, TITLE, Results, column_of_values, figures_of, is_own, places_of
from numdev.results.store import Store

WORDS, UNITS, STUDIES, CHIEF, FACTS, LABELS, PLACES = "words", "units", "studies", "chief", "facts", "labels", "places"
"""In `DataFrame.attrs`: word and unit of a setting by its name; unit of a figure by its column; title of a sweep by its name; of
a kind of the user's own its first figure; the columns that follow from configurations; the labels that the points of each study
state; the columns that tell the rows of one replicate apart."""
OF_A_COMPARISON = {"subject": "variant", "reference": "golden"}  # what is drawn unless a view spreads it out or names another
_KEYS = ("x", "y", "colour", "facet", "reference")
_SEVERAL = ("colour", "facet")  # of which a view may name several
_OF_A_MARK = (*NONFINITE, "seed", "cluster")  # of which its mean and its interval are made, beside the metric
_OF_A_CALL = {**MEASURED, **FOLLOWING}
_NO_METRIC = ("seed", "environment", "seconds", "seeds", "replicates")
_MOST_NAMED = 16  # names that an error lists
_Codes = NDArray[np.int64]


@dataclass(frozen=True)
class View:
    """The metric, the axis, and the columns that tell lines and panels apart."""

    x: str  # what the metric is drawn over
    y: str  # the metric, such as `rmse` of the primary output or `out.max_difference`
    colour: tuple[str, ...] = ()  # what the lines of a panel differ in, one or several names
    facet: tuple[str, ...] = ()  # what the panels differ in, one or several names
    reference: str = ""  # what the metric is taken against: golden, golden_same_inputs or baseline


@dataclass(frozen=True)
class Shown:
    """The rows that a view shows, with the names of their columns."""

    rows: pd.DataFrame  # those of one comparison unless the view spreads it out, with the columns that are drawn
    x: str
    metric: str
    colour: tuple[str, ...] = ()
    facet: tuple[str, ...] = ()
    split: tuple[str, ...] = ()  # further columns in which points differ that a line would join; each value has a line of its own
    output: str = ""  # whose metric it is; empty where rows state none, or where the view spreads them out
    reference: str = ""  # what it is taken against; empty likewise

    @property
    def lines(self) -> tuple[str, ...]:
        """The columns that tell the lines of a panel apart."""
        return *self.colour, *self.split


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
    return tidy(frames.load(Store(Path(results)), [studies] if isinstance(studies, str) else studies))


def parsed(plot: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a view that `plot` states: a name, or for `colour` and `facet` several.

    Raises:
        BadInput: for a key that is none, and for a name that is no text.
    """
    part: dict[str, Any] = {}
    for key, value in plot.items():
        if key not in _KEYS:
            raise BadInput("plot", key, one_of(key, _KEYS))
        if value is None or value == "":
            continue
        names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
        if not names or not all(isinstance(name, str) for name in names) or (len(names) > 1 and key not in _SEVERAL):
            raise BadInput(f"plot.{key}", value, "give the name of a column, as in x: problem.n")
        part[key] = names if key in _SEVERAL else names[0]
    return part


def tidy(results: Results, chosen: NDArray[np.bool_] | None = None) -> pd.DataFrame:
    """The rows of some results with the labels of all their points, and with the words for its columns in `attrs`.

    A column `label.<name>` has what any point states of a setting; of a point of a sweep that states nothing, the value that it
    was composed of. `chosen` are the rows, all unless given.
    """
    rows = results.primary
    table = rows.frame(chosen).reset_index(drop=True)
    places, place = np.unique(rows.point if chosen is None else rows.point[chosen], return_inverse=True)
    points = rows.points.iloc[places]
    listed = {study: results.manifests[study]["points"] for study in points["study"].unique()}
    labels_of = {study: list(dict.fromkeys(name for one in own for name in one["explicit"])) for study, own in listed.items()}
    values = {(study, one["key"]): one["composed"] | one["labels"] for study, own in listed.items() for one in own}
    of_points = [values[at] for at in zip(points["study"], points["key"], strict=True)]
    labels = {
        f"{LABEL}{name}": column_of_values([own.get(name) for own in of_points]).take(place).reset_index(drop=True)
        for name in dict.fromkeys(name for own in labels_of.values() for name in own)
    }
    at = max((i for i, name in enumerate(table) if str(name).startswith(LABEL)), default=len(table.columns) - 1) + 1
    order = [*table.columns[:at], *(name for name in labels if name not in table), *table.columns[at:]]
    table = pd.DataFrame({name: labels[name] if name in labels else table[name] for name in order}, table.index, copy=False)
    words = {name: tuple(word) for one in results.manifests.values() for name, word in one.get(WORDS, {}).items()}
    units = {name: of[0] for name in results.columns if (of := meaning(name, results.columns)) and of[0]}
    titles = {name: one["title"] for name, one in results.manifests.items() if one["swept"] is not None}
    table.attrs = {
        WORDS: words,
        UNITS: units,
        STUDIES: titles,
        LABELS: labels_of,
        PLACES: places_of(results.columns, table),
        FACTS: results.facts,
    }
    if is_own(results.manifests.values()) and (chief := figures_of(results.columns, table)):
        table.attrs[CHIEF] = chief[0].name
    return table


def of_shadow(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The table of the rows of `numdev.shadow`: a replicate is a head, and the output of the forward pass is the primary one.

    Raises:
        BadInput: where there are no rows.
    """
    if not rows:
        raise BadInput("frame", "[]", "it has no rows; run the model within the context of shadow")
    table = pd.DataFrame(rows)
    table = table.rename(columns={"head": "seed"}).assign(cluster="", **{PRIMARY: table["output"] == "out"})
    table.attrs = {PLACES: ("subject", "step", "call", "layer")}
    return table


def view_of(frame: pd.DataFrame, plot: Mapping[str, Any]) -> View:
    """The view that `plot` states, with what it leaves open chosen as `usual` does.

    Raises:
        BadInput: for a name that the table does not have.
    """
    part = parsed(plot)
    named = {key: (part[key],) if key == "x" else part[key] for key in ("x", *_SEVERAL) if key in part}
    columns = [column_of(frame, name, f"plot.{key}") for key, names in named.items() for name in names]
    if "y" in part:
        metric_of(frame, part["y"])
    base = usual(frame, without=columns, x=part.get("x"))
    if "colour" in part or "facet" in part:  # whoever states one decides how the rest is shown
        base = replace(base, colour=(), facet=())
    return replace(base, **part)


def column_of(frame: pd.DataFrame, name: str, key: str) -> str:
    """The column that a name stands for; `key` of a plot has the name.

    Raises:
        BadInput: where there is none, with those that have a similar name.
    """
    for column in (name, f"{LABEL}{name}"):
        if column in frame and frame[column].notna().any():
            return column
    known = [each for each in map(str, frame.columns) if frame[each].notna().any() and f"{LABEL}{each}" not in frame]
    varying = {spoken(each) for each in axes_of(frame)}
    near = sorted((spoken(each) for each in known if not _is_metric(frame, each)), key=lambda each: each not in varying)
    raise BadInput(key, name, f"the results have no such column; {one_of(name, near, most=_MOST_NAMED)}")


def spoken(column: str) -> str:
    """A column's name as the command line has it."""
    return column.removeprefix(LABEL)


def metric_of(frame: pd.DataFrame, name: str) -> tuple[str, str]:
    """The output and the column of a metric; an empty output where the name states none.

    Raises:
        BadInput: where there is no such metric, with those that have a similar name.
    """
    outputs = _values(frame, "output")
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
    if name not in frame or name in (*_NO_METRIC, *frame.attrs.get(FACTS, ()), *frame.attrs.get(PLACES, ())):
        return False
    if name.startswith((LABEL, "problem.", "variant.", "baseline.", "timing.")):
        return False
    return is_number(frame[name]) and bool(frame[name].notna().any())


def is_number(values: pd.Series[Any]) -> bool:
    """Whether a column is of numbers, some of which may be missing."""
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def is_numeric(values: pd.Series[Any]) -> bool:
    """Whether values are numbers throughout, so that they have a place on an axis of numbers."""
    return is_number(values) and bool(values.notna().all())


def _values(frame: pd.DataFrame, column: str) -> list[str]:
    """The values of a column; none where there is no such column."""
    return [str(value) for value in frame[column].dropna().unique()] if column in frame else []


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
    spread, fixed, rows = {x, *colour, *facet}, dict[str, str](), frame
    for column, value in (OF_A_COMPARISON | ({"reference": view.reference} if view.reference else {})).items():
        if column in spread or column in frame.attrs.get(PLACES, ()) or not (present := _values(rows, column)):
            continue
        if value not in present:
            field = "plot.reference" if column == "reference" else "plot"
            raise BadInput(field, value, f"the results have {', '.join(present)}")
        rows = rows[rows[column] == value]
        fixed[column] = value
    if output:
        rows = rows[rows["output"] == output]
    elif PRIMARY in rows and "output" not in spread and rows[PRIMARY].notna().any():
        rows = rows[rows[PRIMARY].fillna(value=False).astype(bool)]
    rows = rows[rows[metric].notna() | rows.get("status", pd.Series("", rows.index)).eq("nonfinite")]
    if rows.empty:
        raise BadInput("plot.y", view.y, "no point has a figure for it; choose another metric or reference")
    outputs = _values(rows, "output")
    output, reference = outputs[0] if len(outputs) == 1 else "", fixed.get("reference", "")
    if metric in _OF_A_CALL or metric.startswith("counter."):  # no comparison, though one may stand in the same row
        output = reference = ""
    rows, apart = split(rows, x, (*colour, *facet), with_baseline=view.reference == "baseline" or "subject" in spread)
    own = [name for name in rows if name in {*spread, *apart, metric, *_OF_A_MARK}]  # a figure sorts them, which copies
    if TITLE in apart:  # too long for a legend
        facet = (TITLE, *facet)
    lines = tuple(name for name in apart if name != TITLE)
    return Shown(rows[own], x, metric, colour, facet, lines, output, reference)


def differs(rows: pd.DataFrame, name: str) -> bool:
    """Whether rows differ in a column."""
    return name in rows and rows[name].nunique(dropna=False) > 1


def _differing(rows: pd.DataFrame, *starts: str) -> list[str]:
    return [name for name in map(str, rows) if name.startswith(starts) and differs(rows, name)]


def axes_of(frame: pd.DataFrame) -> list[str]:
    """The columns in which rows differ: scenarios, then settings, labels or where none differs any other, then `PLACES`."""
    circumstances = [name for name in ("study", TITLE) if differs(frame, name)]
    if len(circumstances) == 2 and frame.groupby("study")[TITLE].nunique().max() == 1:
        circumstances.remove(TITLE)  # each study has one scenario, and says enough
    own = [name for name in frame.attrs.get(PLACES, ()) if differs(frame, name)]
    return [*circumstances, *(_differing(frame, LABEL) or _differing(frame, "problem.", "variant.")), *own]


def usual(frame: pd.DataFrame, without: Iterable[str] = (), x: str | None = None) -> View:
    """The view of a sweep that nobody describes: a metric over its axes.

    Over the axis with the most different numbers, or where none has three, over the one with the most values. The next axis is
    told by colour, the one after it by panels; where there are more, colour tells several. Of deviations the metric is RMSE,
    which sees every element; of another kind its first figure.

    Raises:
        BadInput: where the table has no metric, or all its points are alike.
    """
    axes = [name for name in axes_of(frame) if name not in set(without)]
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
    return View(x, _usual_metric(frame), tuple(map(spoken, rest)), tuple(map(spoken, facet)))


def _usual_metric(frame: pd.DataFrame) -> str:
    metrics = [name for name in map(str, frame.columns) if _is_metric(frame, name)]
    if not metrics:
        raise BadInput("plot.y", "", "the results have no figures; no point was measured to its end")
    chief = "latency" if set(_values(frame, "kind")) == {SPEED} else frame.attrs.get(CHIEF, "rmse")
    return chief if chief in metrics else metrics[0]


def split(rows: pd.DataFrame, x: str, drawn: Sequence[str], *, with_baseline: bool) -> tuple[pd.DataFrame, list[str]]:
    """The fewest further columns by which no line joins points that differ in a setting, and the rows with these columns.

    `drawn` tell lines and panels apart already, and `with_baseline` says whether the settings of the baseline matter too.
    Points of a line may differ in x, and in what follows from it: no point of a study states the setting, and it has one value
    wherever what they state agrees, as the tile follows from a size of on-chip memory. Such a value is missing from the column,
    and so is the setting of a variant in rows of a baseline that stands beside several. Of several records of one replicate of a
    mark, as those of a point in two studies, the first counts.
    """
    labels = _differing(rows, LABEL)
    titles = [TITLE] if differs(rows, TITLE) and bool((rows[TITLE].fillna("") != "").all()) else []
    settings = _differing(rows, "problem.", "variant.", *(("baseline.",) if with_baseline else ()))
    settings.sort(key=lambda name: not name.endswith((".name", ".kind", ".type")))  # a preset before what it consists of
    places = [name for name in rows.attrs.get(PLACES, ()) if differs(rows, name)]
    machine = ["environment"] if differs(rows, "environment") else []
    known = [name for name in ("study", "subject", "pairing", x, *drawn) if name in rows]
    place = numbered(rows, dict.fromkeys([*known, *titles, *labels, *settings, *places, *machine]))
    points = rows.iloc[np.unique(place, return_index=True)[1]]

    described = numbered(points, [*titles, *labels, x, *drawn])
    settings = [name for name in settings if not _follows(points[name], described)]
    every = numbered(points, [*settings, *places], described)
    machine = [name for name in machine if not _follows(points[name], every)]  # a point was measured in two environments
    lines, apart = numbered(points, drawn), list[str]()
    for name in (*titles, *labels, *settings, *places, *machine):
        if name in (x, *drawn):
            continue
        values = points[name].astype(object)
        if name != TITLE:
            values = values.mask(_implied(points, name, x, [*drawn, *apart], rows.attrs.get(LABELS, {})), None)
        if not _follows(values, lines):
            points = points.assign(**{name: values.infer_objects()})
            lines = numbered(points, [name], lines)
            apart.append(name)
    own = rows.assign(**{name: points[name].take(place).set_axis(rows.index) for name in apart})
    return _once(own, [x, *drawn, *apart, *places]), apart


def numbered(rows: pd.DataFrame, names: Iterable[str], within: _Codes | None = None) -> _Codes:
    """A number for each row from 0 in order of appearance, equal where rows agree in some columns, and in the numbers `within`.

    `groupby` on all columns at once counts every combination that could be, and a missing value apart.
    """
    number = np.zeros(len(rows), dtype=np.int64) if within is None else within
    for name in names:
        codes, values = pd.factorize(rows[name], use_na_sentinel=False)
        number = pd.factorize(number * len(values) + codes)[0]
    return number


def _follows(values: pd.Series[Any], groups: _Codes) -> bool:
    """Whether rows of one group agree in a column."""
    return int(numbered(values.to_frame("value"), ["value"], groups).max()) == int(groups.max())


def _implied(
    points: pd.DataFrame, name: str, x: str, lines: Sequence[str], labels_of: Mapping[str, Sequence[str]]
) -> NDArray[np.bool_]:
    """The points whose value of a column follows from others, within their study or of their baseline."""
    implied = np.zeros(len(points), dtype=np.bool_)
    studies = points["study"] if "study" in points else pd.Series("", points.index)
    for study in studies.unique():
        at = np.flatnonzero(studies == study)
        own = points.iloc[at]
        labels = [f"{LABEL}{each}" for each in labels_of[study]] if study in labels_of else _labels(own)
        basis = [each for each in (*labels, *({TITLE} & {x, *lines})) if each in own]
        basis = basis if name not in basis else [x, *lines] if x not in basis else []
        varies = not _follows(own[name], numbered(own, lines))
        implied[at] = varies and bool(basis) and _follows(own[name], numbered(own, basis))
    if {"subject", "pairing"} <= set(points) and name.startswith((LABEL, "variant.")):
        at = np.flatnonzero(points["subject"] == "baseline")
        own = points.iloc[at]
        implied[at] |= len(at) > 0 and not _follows(own[name], numbered(own, ["pairing"]))
    return implied


def _labels(rows: pd.DataFrame) -> list[str]:
    return [name for name in map(str, rows) if name.startswith(LABEL) and rows[name].notna().any()]


def _once(rows: pd.DataFrame, mark: Sequence[str]) -> pd.DataFrame:
    """Rows without further records of a replicate that a mark has already."""
    if "key" not in rows:
        return rows
    replicate = numbered(rows, dict.fromkeys([*mark, *(name for name in ("seed", "cluster") if name in rows)]))
    record = numbered(rows, [name for name in ("study", "key") if name in rows])
    first = record[np.unique(replicate, return_index=True)[1]]
    return rows[record == first[replicate]]
