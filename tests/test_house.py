"""Each folder of the package says in its docstring what lives there, and what may not."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "numdev"


def test_a_folder_says_what_lives_there() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    said = {folder: ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "" for folder in folders}
    assert [folder for folder, text in said.items() if text.count(".") < 2] == []
