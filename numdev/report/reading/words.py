"""What a reader calls the parts of an operation's studies, and what a verdict on their rows generalises over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pandas as pd

from numdev.report.reading.frames import Results
from numdev.report.reading.lean import part


def _nothing(rows: pd.DataFrame) -> str:
    return ""


def _none(results: Results) -> Iterable[tuple[str, str, tuple[str, ...]]]:
    return ()


@dataclass(frozen=True)
class Words:
    """The words for one operation; its module in `numdev.report.studies` declares them, and any other has the defaults.

    Attributes:
        operation: its name in records.
        title: of a report on it.
        methods: the template, in `document/templates`, that explains its golden, its baseline and its algorithm; empty for none.
        headlines: the files of figures of which the first that is drawn stands on the first page of a report.
        told: the columns that a summary has for every point, even where all points agree.
        problem_class: the column of the class that decides which settings a problem has.
        inputs: what the inputs of some rows are, if it is the same in all, such as `U[0, 1)`.
        describe: what the rows of one scenario have in common, inputs among it.
        replicates: what the replicates of a cluster are.
        cluster: what a cluster of replicates that are alike is.
        findings: of some results, each a heading, a sentence in plain words, and the claims on what it says; a report begins with
            the first three, and says which of their claims are undecided.
        rules: how an interval becomes a verdict where a claim has a region of its own, as `numdev.report.claims.finding.rules`.
    """

    operation: str = ""
    title: str = "How far fast implementations deviate from exact results"
    methods: str = ""
    headlines: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    problem_class: str = "problem.type"
    inputs: Callable[[pd.DataFrame], str] = _nothing
    describe: Callable[[pd.DataFrame], str] = _nothing
    replicates: str = "replicates"
    cluster: str = "cluster"
    findings: Callable[[Results], Iterable[tuple[str, str, tuple[str, ...]]]] = _none
    rules: tuple[tuple[str, str, str], ...] = ()


PLAIN = Words()


def of_variants(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that are of a variant, which are all where a measurement has no other subject."""
    return part(rows, rows["subject"] == "variant") if "subject" in rows else rows


def generality(rows: pd.DataFrame, words: Words = PLAIN) -> str:
    """What a verdict on some rows generalises over: the seeds of a distribution, or the replicates of some clusters."""
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
