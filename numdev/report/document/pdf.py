"""The report as a PDF, set by Typst from the figures in SVG and tables of the results. The same results give the same bytes.

Each chapter of `numdev.report.studies` is a section: those that make a figure of a source again first, then our own. A chapter
whose study has no results is left out and listed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typst

from numdev.report.document.context import Part, context

TEMPLATES = Path(__file__).resolve().parent / "templates"


def write_pdf(parts: Sequence[Part], title: str = "", author: str = "") -> bytes:
    """The document on some parts; its title is that of the first unless one is given."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_root(parts, root, title, author)
        return bytes(typst.compile(str(root / "report.typ"), root=str(root), ignore_system_fonts=True))


def write_root(parts: Sequence[Part], root: Path, title: str = "", author: str = "") -> None:
    """Write what Typst reads, templates, figures and `data.json`, into a folder."""
    for path in [*TEMPLATES.glob("*.typ"), *(picture.svg for part in parts for picture in part.pictures)]:
        shutil.copy(path, root)
    (root / "data.json").write_text(json.dumps(context(parts, title, author)))
