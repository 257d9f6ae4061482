"""Words of a report: for the columns of a table on axes and in legends, and for the parts of an operation's studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from numdev.report.reading.columns import TEXTS, meaning
from numdev.report.reading.frames import LABEL
from numdev.report.reading.view import STUDIES, UNITS, WORDS, Shown, is_numeric

_METRICS, _REFERENCES, _COLUMNS, _UNIT_WORDS = (TEXTS[name] for name in ("metrics", "references", "axes", "axis_units"))
_VALUES = {"subject": {"variant": "measured"}, "reference": _REFERENCES}


@dataclass(frozen=True)
class Wording:
    """The words that a reader has for the columns of a table."""

    words: Mapping[str, Sequence[str]] = field(default_factory=dict)  # word and unit of settings, by name without `label.`
    units: Mapping[str, str] = field(default_factory=dict)  # of figures
    studies: Mapping[str, str] = field(default_factory=dict)  # titles of sweeps and single points, whose names nobody types
    names: Mapping[str, str] | None = (
        None  # of a study's figure, words for values, which stand without the names of their columns
    )

    def name(self, column: str) -> str:
        """A setting in words; its name on the command line where nothing says more."""
        own = column.removeprefix(LABEL)
        if (known := self.words.get(own)) and known[0]:
            return known[0]
        return _COLUMNS.get(own, own if "." in own else own.replace("_", " "))

    def axis(self, column: str) -> str:
        """The label of an axis: the setting and its unit."""
        own = column.removeprefix(LABEL)
        unit = (self.words.get(own) or ("", ""))[1] or (meaning(own) or ("", ""))[0]
        return ", ".join(part for part in (self.name(column), _UNIT_WORDS.get(unit, unit)) if part)

    def value(self, column: str, value: Any) -> str:
        """One value of a column."""
        if self.names and (own := self.names.get(str(value))):
            return own
        if value is None or pd.isna(value):
            return "none" if "." in column.removeprefix(LABEL) else "not stated"
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if column.endswith(".type"):  # a class
            return text.lower()
        return (self.studies if column == "study" else _VALUES.get(column, {})).get(text, text)

    def values(self, columns: Sequence[str], values: Sequence[Any]) -> str:
        """Values of several columns in one line: `tile columns Bc = 16, format = bf16`."""
        is_bare = [self.names is not None or column in ("study", "scenario.title") for column in columns]
        texts = map(self.value, columns, values)
        each = zip(columns, texts, is_bare, strict=True)
        return ", ".join(text if bare else f"{self.name(column)} = {text}" for column, text, bare in each)

    def metric(self, metric: str, output: str, reference: str) -> str:
        """A figure in words: `RMSE of out from golden`."""
        name = _METRICS.get(metric, metric.removeprefix("counter.").replace("_", " "))
        against = f" from {_REFERENCES.get(reference, reference)}" if reference else ""
        return f"{name} of {output}{against}" if output else f"{name}{against}"

    def metric_axis(self, shown: Shown) -> str:
        """The label of the axis of a figure."""
        unit = self.units.get(shown.metric) or (meaning(shown.metric) or ("", ""))[0]
        words = self.metric(shown.metric, shown.output, shown.reference)
        return ", ".join(part for part in (words, _UNIT_WORDS.get(unit, unit)) if part)


def wording_of(frame: pd.DataFrame) -> Wording:
    """The words that a table carries."""
    return Wording(frame.attrs.get(WORDS, {}), frame.attrs.get(UNITS, {}), frame.attrs.get(STUDIES, {}))


def wording_of_study(manifest: Mapping[str, Any]) -> Wording:
    """The words of the axes of a study, as its manifest keeps them: for its figure, its section and its claims."""
    return Wording(manifest.get(WORDS, {}))


def title(shown: Shown, words: Wording) -> str:
    """The content of the figure, in one line."""
    parts = [f"{words.metric(shown.metric, shown.output, shown.reference)} over {words.name(shown.x)}"]
    parts += [f"by {' and '.join(map(words.name, shown.lines))}"] if shown.lines else []
    parts += [f"for each {' and '.join(map(words.name, shown.facet))}"] if shown.facet else []
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def alt(shown: Shown, words: Wording) -> str:
    """The description of the figure for those who cannot see it."""
    how = "Lines" if is_numeric(shown.rows[shown.x]) else "Dots"
    return f"{title(shown, words)}. {how} at the means over seeds, with their 95 % confidence intervals."


@dataclass(frozen=True)
class Words:
    """The words for one operation; its module in `numdev.report.studies` declares them, and any other has the defaults."""

    operation: str = ""  # its name in records
    title: str = "How far fast implementations deviate from exact results"  # of a report on it
    # The template, in `document/templates`, that explains its golden, its baseline and its algorithm; empty for none
    methods: str = ""
    headlines: tuple[str, ...] = ()  # the files of figures of which the first that is drawn stands on the first page of a report
    always: tuple[str, ...] = ()  # the columns that a summary has for every point, even where all points agree
    # What the inputs of some rows are, if it is the same in all, such as `U[0, 1)`
    inputs: Callable[[pd.DataFrame], str] = lambda rows: ""
    describe: Callable[[pd.DataFrame], str] = lambda rows: ""  # what the rows of one scenario have in common, inputs among it
    replicates: str = "replicates"  # what the replicates of a cluster are
    cluster: str = "cluster"  # what a cluster of replicates that are alike is
    # By claim a heading and a sentence in plain words, a template that names figures by words of scenarios' titles; a report
    # begins with the first three, and says which claims are undecided
    findings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # How an interval becomes a verdict where a claim has a region of its own, as `numdev.report.claims.verdicts.rules`
    rules: tuple[tuple[str, str, str], ...] = ()


PLAIN = Words()


def of_variants(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that are of a variant, which are all where a measurement has no other subject."""
    return rows[rows["subject"] == "variant"] if "subject" in rows else rows


def generality(rows: pd.DataFrame, words: Words = PLAIN) -> str:
    """The units that a verdict on some rows generalises over: the seeds of a distribution, or the replicates of some clusters."""
    own = of_variants(rows)
    if own.empty:
        return ""
    count = own[["seed", "cluster"]].drop_duplicates().shape[0] if "cluster" in own else own["seed"].nunique()
    clusters = sorted(name for name in own["cluster"].dropna().unique() if name) if "cluster" in own else []
    if not clusters:
        return f"over seeds of {words.inputs(own) or 'the inputs'} ({count} here)"
    many = f"these {len(clusters)} {words.cluster}s, {', '.join(clusters)}"
    these = f"{words.cluster} {clusters[0]}" if len(clusters) == 1 else many
    return f"over the {words.replicates} of {these} ({count} here)"


def circumstances(rows: pd.DataFrame, words: Words = PLAIN) -> str:
    """Describes one scenario: what its rows have in common, and its replicates."""
    own = of_variants(rows)
    if own.empty:
        return ""
    return "; ".join(part for part in (words.describe(own), generality(own, words)) if part)
