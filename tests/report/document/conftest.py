"""One report on toy studies, from which the tests of its files, PDF and HTML read."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from numdev.report.document import html
from numdev.report.document.context import Part, context
from numdev.report.document.pdf import write_pdf
from numdev.report.document.report import write_part
from numdev.report.reading.frames import load
from numdev.results.store import Store

STUDIES = ["fig3", "fig4", "fig5", "sign", "kernels"]


@dataclass(frozen=True)
class Report:
    """The folder of a report, its part, what was printed, and its documents; `shown` is their content."""

    out: Path
    part: Part
    printed: str
    shown: dict[str, Any]
    pdf: bytes
    html: str


@pytest.fixture(scope="session")
def report(toy_results: Store, tmp_path_factory: pytest.TempPathFactory) -> Report:
    out, printed = tmp_path_factory.mktemp("report"), io.StringIO()
    results = load(toy_results, STUDIES)
    part, notes = write_part(results, out, Console(file=printed, width=160))
    page = html.write_html([part], notes).decode()
    return Report(out, part, printed.getvalue(), context([part]), write_pdf([part]), page)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts of the HTML documents that a test makes."""
    parts, write = list[Part](), html.write_html

    def spied(own: Sequence[Part], *arguments: Any) -> bytes:
        parts.extend(own)
        return write(own, *arguments)

    monkeypatch.setattr(html, "write_html", spied)
    return parts
