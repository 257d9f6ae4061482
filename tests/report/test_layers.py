"""Inside the report, too, imports point one way; what a study's modules declare is complete."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name

import pytest

from numdev.report.studies.registry import CHAPTERS, CLAIMS, FIGURES

REPORT = Path(__file__).resolve().parents[2] / "numdev" / "report"
LAYERS = ("reading", "statistics", "claims", "figures", "studies", "document", "comparison")  # each may import those before it


def imported(folder: str) -> set[str]:
    """The folders of the report from which a folder's modules import."""
    paths = [REPORT / f"{folder}.py"] if (REPORT / f"{folder}.py").is_file() else (REPORT / folder).glob("*.py")
    trees = [ast.parse(path.read_text()) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [node.module for node in nodes if node.module and node.module.startswith("numdev.report.")]
    return {name.split(".")[2] for name in names}


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_only_those_before_it(folder: str) -> None:
    assert imported(folder) <= set(LAYERS[: LAYERS.index(folder) + 1])


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


@pytest.mark.parametrize("path", sorted((REPORT.parents[1] / "configs" / "study").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_functions_that_a_study_names_are_there(path: Path) -> None:
    names = re.findall(r"(?:draw|judge|table): (\S+:\w+)", path.read_text())
    assert all(callable(resolve_name(name)) for name in names)
