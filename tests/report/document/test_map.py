"""The files of `numdev map`, and what it says."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch

from numdev.arithmetic.formats import BF16
from numdev.report.document.map import summary, write_figures
from numdev.report.figures.elements import element_errors

REFERENCE = torch.linspace(1.0, 1.9, 12, dtype=torch.float64).reshape(4, 3)


def elements(**changed: float) -> pd.DataFrame:
    """One rounding to BF16, but for the element of row 2 and column 1, and further ones by `row_column`."""
    x = REFERENCE.bfloat16().double()
    x[2, 1] = REFERENCE[2, 1] + 4 * 2.0**-7
    for place, value in changed.items():
        x[int(place[1]), int(place[3])] = value
    return element_errors(x, REFERENCE, BF16)


def test_the_largest_error_is_told_with_its_place() -> None:
    lines = list(summary(elements()))
    assert lines[0].startswith("largest |D|: 0.03125 at row 2, column 1, where it is 1.604 and golden is 1.573")
    assert lines[1].startswith("that is 4.000 ulp of bf16 there")
    assert lines[2].endswith("; 91.7 % of the elements lie within half an ulp")
    assert len(lines) == 3


def test_figures_have_titles_and_descriptions(tmp_path: Path) -> None:
    paths = write_figures(elements(), "out, replicate 0\nprecision=bf16", tmp_path, "_bf16", "baseline")
    assert [path.name for path in paths] == [
        *("error_map_bf16.png", "error_map_bf16.svg", "error_histogram_bf16.png", "error_histogram_bf16.svg"),
    ]
    assert all(path.is_file() for path in paths)
    text = paths[1].read_text()
    assert "<title>Error map: out, replicate 0 precision=bf16</title>" in text
    assert "in u max |baseline|" in text
