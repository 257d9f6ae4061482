"""What a reader calls the parts of a study of attention's backward pass, and what its chapters have in common."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pandas as pd

from numdev.report.claims.claim import Claim
from numdev.report.claims.finding import Undecidable
from numdev.report.figures.style import OUTPUT_COLOURS
from numdev.report.reading.scenarios import PRIMARY, formats
from numdev.report.studies.attention import WORDS as FORWARD

SAME_INPUTS = "golden_same_inputs"
SYMBOLS = {"dq": "dQ", "dk": "dK", "dv": "dV", "delta": "delta"}
"""What a reader knows the outputs as."""
GRADIENTS = ("dq", "dk", "dv")
SHADES = OUTPUT_COLOURS

WORDS = replace(
    FORWARD,
    operation="attention_backward",
    title="How far the gradients of fast attention deviate from exact ones",
    methods="",
    headlines=("attribution.svg", "gradients.svg"),
)
claim = partial(Claim, words=WORDS)
"""A claim on the backward pass."""


def of_output(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of one output, as if that were the primary one: what claims and figures select from.

    Raises:
        Undecidable: if it was not measured.
    """
    found = rows[rows["output"] == name]
    if found.empty:
        raise Undecidable(f"nothing was measured of {SYMBOLS.get(name, name)}")
    return found.assign(**{PRIMARY: True})


def measured(rows: pd.DataFrame) -> list[str]:
    """The gradients that were measured."""
    found = set(rows["output"].unique())
    return [name for name in GRADIENTS if name in found]


def narrowest(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows at BF16, or at the narrowest format: those of which a claim speaks."""
    names = formats(rows)
    return rows[rows["format"] == ("bf16" if "bf16" in names else names[0])]


def chosen(rows: pd.DataFrame) -> pd.DataFrame:
    """The gradients of the variant against golden of the same rounded inputs."""
    return rows[(rows["subject"] == "variant") & (rows["reference"] == SAME_INPUTS) & rows["output"].isin(GRADIENTS)]
