"""Colours: one home, and one meaning each."""

from __future__ import annotations

import ast
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.colors import is_color_like, to_rgb

from numdev.report.figures import style

REPORT = Path(style.__file__).resolve().parent.parent
MODULES = sorted(path for path in REPORT.rglob("*.py") if path.stem not in ("style", "explore"))  # maps of a notebook stand alone
NEUTRAL = {"white", "none", "black"}


def meanings() -> dict[str, str]:
    """Every colour by what it means."""
    single = {name: getattr(style, name) for name in ("GREY", "PALE", "BLACK", "TILED", "FP32_INSIDE", "BASELINE")}
    groups = (style.FORMAT_COLOURS, style.OUTPUT_COLOURS, style.CHANGE_COLOURS)
    series = {f"series {place}": shade for place, shade in enumerate(style.SERIES)}
    return single | {name: shade for group in groups for name, shade in group.items()} | series


def test_no_two_meanings_share_a_colour() -> None:
    for (one, first), (other, second) in combinations(meanings().items(), 2):
        distance = sum((a - b) ** 2 for a, b in zip(to_rgb(first), to_rgb(second), strict=True)) ** 0.5
        assert distance > 0.05, (one, other)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(REPORT).as_posix())
def test_colours_are_named_in_one_place(path: Path) -> None:
    tree = ast.parse(path.read_text())
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [word for word in words if word.startswith("#") and is_color_like(word)]
    given = [kw.value for node in ast.walk(tree) if isinstance(node, ast.Call) for kw in node.keywords if "color" in str(kw.arg)]
    assert {value.value for value in given if isinstance(value, ast.Constant)} <= NEUTRAL
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not names & {"BLUE", "VERMILION"}, "a palette has no meaning; its colours with a meaning have"
