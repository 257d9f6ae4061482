"""A store that holds an operation outside the package alone: report, figure and data dictionary, in its own words."""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from numdev.measurement.deviation import Deviations
from numdev.measurement.runner import Runner
from numdev.measurement.studies import run
from numdev.report.document.context import Part, context
from numdev.report.document.report import make_report
from numdev.report.reading.frames import load
from numdev.results.store import Store
from numdev.results.study import Study

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "softmax"
pytestmark = pytest.mark.xdist_group("report of another operation")
OF_ATTENTION = re.compile(r"attention|tiled|\bkeys?\b|\bquer|\bheads\b|\blayers?\b|golden et al", re.IGNORECASE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a report on the study of the example at toy size, and what was printed."""
    path, printed = tmp_path_factory.mktemp("rows"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        blocks, operation = importlib.import_module("blocks"), importlib.import_module("softmax").SOFTMAX
        study = Study("rows_blocks", "The error over the block of columns", None, (), blocks.points(4, 256, 3))
        assert not run(study, Runner(Deviations(operation), "cpu"), Store(path / "results")).failures
    make_report(path / "results", path / "out", None, Console(file=printed, width=200), formats=("pdf", "html"))
    return path, printed.getvalue()


def test_it_has_a_document_a_figure_and_tables(made: tuple[Path, str]) -> None:
    path, printed = made
    out = path / "out"
    assert {file.name for file in (out / "figures").iterdir()} == {"rows_blocks.png", "rows_blocks.svg"}
    rows = pd.read_parquet(out / "results.parquet")
    assert set(rows.query("primary")["output"]) == {"p"}
    assert not OF_ATTENTION.search(printed)
    loaded = load(Store(path / "results"))
    (section,) = context([Part(loaded)])["sections"]
    table = section["tables"][0]["rows"]
    assert table[0][:2] == ["normal policy=bf16 block=64", "golden"]
    assert len(table) == 2 * 12


def test_the_documents_speak_of_no_other_operation(made: tuple[Path, str]) -> None:
    out = made[0] / "out"
    told = context([Part(load(Store(made[0] / "results")))])
    assert (told["absent"], told["methods"]) == ([], [])
    assert not OF_ATTENTION.search(told["title"])
    assert (out / "report.pdf").read_bytes().startswith(b"%PDF-")
    words = re.sub(r"<(script|style).*?</\1>|<svg.*?</svg>|<[^>]*>", " ", (out / "report.html").read_text(), flags=re.DOTALL)
    assert "RMSE" in words
    assert OF_ATTENTION.findall(words) == []
    row = "| `variant.block` | count | columns that are summed before the running sum is rounded |"
    assert row in (out / "columns.md").read_text()
