"""The tables of `numdev compare`: what is worse, what is not tested, and what they are called."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from numdev.report.comparison.changes import Criterion, compare
from numdev.report.comparison.tables import show
from numdev.report.reading.frames import load
from numdev.results.record import Status
from tests.report.comparison.test_changes import Point, failed, point, scaled, store_of

WORSE, LARGEST = "Changes for the worse", "Largest ratios B / A"
LARGER = (1.2, 1.21, 1.19, 1.2, 1.22)


def shown(path: Path, a: Sequence[Point], b: Sequence[Point], tolerance: float = 1.0) -> str:
    before, after = load(store_of(path / "a", *a)), load(store_of(path / "b", *b))
    console = Console(file=io.StringIO(), width=200)
    show(compare(before, after, Criterion(tolerance=tolerance)), before, after, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("factor", "tolerance", "titles"),
    [(1.0, 1.0, []), (0.8, 1.0, []), (3.0, 1.0, [WORSE]), (1.2, 1.5, [LARGEST]), (0.8, 1.5, [])],
)
def test_a_title_says_whether_anything_is_worse(tmp_path: Path, factor: float, tolerance: float, titles: list[str]) -> None:
    text = shown(tmp_path, [point()], [point(scaled(factor), "two")], tolerance)
    assert [title for title in (WORSE, LARGEST) if title in text] == titles
    assert "nan" not in text


def test_what_is_the_same_does_not_stand_beside_what_is_worse(tmp_path: Path) -> None:
    a = [point(labels={"i": i}) for i in range(4)]
    factors = (LARGER, (2.0, 2.1, 1.9, 2.0, 2.1), (1.001, 0.998, 1.002, 0.999, 1.001))
    b = [point(scaled(times), "two", {"i": i}) for i, times in enumerate(factors)]
    b.append(failed(Status.ERROR, "it fell", machine="two", labels={"i": 3}))
    text = shown(tmp_path, a, b)
    places = [text.find(f"uniform inputs i={i}") for i in (3, 1, 0)]  # broken, then worse by ratio
    assert places == sorted(places)
    assert places[0] > text.index(WORSE)
    assert "uniform inputs i=2" not in text
    assert LARGEST not in text


def test_what_cannot_be_tested_is_never_called_worse(tmp_path: Path) -> None:
    a = [point(), point([1.0], labels={"i": 0})]
    b = [point(scaled(LARGER), "two"), point([9.0], "two", {"i": 0})]
    text = shown(tmp_path, a, b)
    assert text.index(WORSE) < text.index("precision=bf16") < text.index(LARGEST) < text.index("uniform inputs i=0")
