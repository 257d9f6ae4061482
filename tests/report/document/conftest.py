"""One report on toy studies, from which the tests of its files, PDF and HTML read."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from numdev.arithmetic.formats import FP32
from numdev.attention.operation import ATTENTION
from numdev.attention.precision import Precision
from numdev.attention.problem import Distribution, Kind, Problem, Shape
from numdev.attention.tiled import Tiled
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.measurement.runner import Runner
from numdev.measurement.speed import Budget, Speeds
from numdev.measurement.studies import run
from numdev.report.document import pages
from numdev.report.document.context import Part, context
from numdev.report.document.pages import write_pdf
from numdev.report.document.report import write_part
from numdev.report.reading.frames import load
from numdev.results.record import Status
from numdev.results.store import Store
from numdev.results.study import Study, StudyPoint

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


def texts(value: Any) -> list[str]:
    """The texts of a document that are words."""
    if isinstance(value, dict):
        return [text for key, own in value.items() if key not in ("file", "command", "alt", "study") for text in texts(own)]
    if isinstance(value, list):
        return [text for own in value for text in texts(own)]
    return [value] if isinstance(value, str) else []


@pytest.fixture(scope="session")
def report(toy_results: Store, tmp_path_factory: pytest.TempPathFactory) -> Report:
    out, printed = tmp_path_factory.mktemp("report"), io.StringIO()
    results = load(toy_results, STUDIES)
    part, notes = write_part(results, out, Console(file=printed, width=160))
    page = pages.write_html([part], notes).decode()
    return Report(out, part, printed.getvalue(), context([part]), write_pdf([part]), page)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts of the HTML documents that a test makes."""
    parts, write = list[Part](), pages.write_html

    def spied(own: Sequence[Part], *arguments: Any) -> bytes:
        parts.extend(own)
        return write(own, *arguments)

    monkeypatch.setattr(pages, "write_html", spied)
    return parts


VARIANTS = {"vanilla": Vanilla(FP32), "tiled": Tiled(Precision.parse("fp32")), "cudnn": Sdpa(Backend.CUDNN, FP32)}


@pytest.fixture(scope="session")
def speed_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of speed: two kernels that run and one that cannot, in prefill and decode at two lengths."""
    path = tmp_path_factory.mktemp("speed")
    points = [
        StudyPoint(Problem(Distribution(Kind.NORMAL), Shape(queries=q, keys=n, head_dim=16)), v, None, 2, "normal", {"kernel": k})
        for k, v in VARIANTS.items()
        for n in (32, 64)
        for q in (n, 1)
    ]
    study, bench = Study("toy", "A toy", None, (), tuple(points)), Runner(Speeds(ATTENTION, Budget(1e-4, 3, 3)), "cpu")
    assert Status.ERROR not in run(study, bench, Store(path)).statuses
    return path
