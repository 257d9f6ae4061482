"""Inside the report, too, imports point one way; what a study's modules declare is complete."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from numdev.report.studies.registry import CHAPTERS, CLAIMS, FIGURES

REPORT = Path(__file__).resolve().parents[2] / "numdev" / "report"
LAYERS = ("reading", "statistics", "claims", "figures", "studies", "document", "comparison")  # each may import those before it


def imported(folder: str) -> set[str]:
    """The folders of the report from which a folder's modules import."""
    trees = [ast.parse(path.read_text()) for path in (REPORT / folder).glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [node.module for node in nodes if node.module and node.module.startswith("numdev.report.")]
    return {name.split(".")[2] for name in names}


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_only_those_before_it(folder: str) -> None:
    assert imported(folder) <= set(LAYERS[: LAYERS.index(folder) + 1])


def test_every_folder_has_its_place() -> None:
    assert {path.parent.name for path in REPORT.glob("*/*.py")} == set(LAYERS)


def test_no_two_chapters_have_the_same_study_place_claim_or_figure() -> None:
    for names in (
        [chapter.study for chapter in CHAPTERS],
        [chapter.place for chapter in CHAPTERS],
        [claim.name for chapter in CHAPTERS for claim in chapter.claims],
        [name for chapter in CHAPTERS for name in chapter.figures],
    ):
        assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("name", CLAIMS)
def test_the_figure_of_a_claim_is_declared(name: str) -> None:
    assert CLAIMS[name].figure in FIGURES
