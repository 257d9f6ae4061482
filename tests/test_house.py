"""The sizes that keep a module readable, and what stands nowhere outside tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "numdev"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_PARAMETERS = 8


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


HOST = [path for path in MODULES if "kernels" not in path.parts]


@pytest.mark.parametrize("path", HOST, ids=names(HOST))
def test_a_function_has_at_most_8_parameters(path: Path) -> None:
    for function in functions(path):
        given = function.args
        count = len(given.posonlyargs + given.args + given.kwonlyargs)
        count -= bool(given.args) and given.args[0].arg in ("self", "cls")
        assert count <= MOST_PARAMETERS, f"{function.name} has {count}"


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_folder_says_what_lives_there(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert said
    assert said.count(".") >= 2, "what lives there, and what may not"
