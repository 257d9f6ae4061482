"""Hooks of the documentation's build: figures from where they are kept, notebooks executed, and formulae as MathML.

No plugin does this: mkdocs-gen-files would copy every figure and depends on another MkDocs; no extension of Markdown makes
MathML, which needs no script and no network, without a program outside of Python.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_PRIME = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msup>")
_RUN = {"command": "build"}  # MkDocs tells it to the first event alone
_RAW = "---\nrender_macros: false\n---\n\n"  # braces of code are no macros


def on_startup(command: str, **_: Any) -> None:
    """Note whether the site is built, or shown while it is written."""
    _RUN["command"] = command


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the figures of the reference results, at `figures/<folder>/<name>.svg`, and the notebooks, at `notebooks/<name>.md`."""
    from docs_hooks import notebooks  # by now the plugin `macros` has made the package importable
    from docs_hooks.gallery import address, figures

    for path in figures():
        files.append(File.generated(config, address(path), abs_src_path=str(path)))
    found = notebooks.pages(stale=_RUN["command"] == "serve")
    for name, page in found.items():
        files.append(File.generated(config, f"notebooks/{name}.md", content=_RAW + page.text))
        for image, content in page.images.items():
            files.append(File.generated(config, f"notebooks/{image}", content=content))
    _add_to_nav(config, [f"notebooks/{name}.md" for name in found])
    return files


def _add_to_nav(config: MkDocsConfig, pages: list[str]) -> None:
    """Make the entry of the notebooks a section, with a page for each."""
    for entry in config.nav or []:
        if entry.get("Notebooks") == "notebooks.md":
            entry["Notebooks"] = ["notebooks.md", *pages]


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """MathML in place of formulae."""

    def formula(match: re.Match[str]) -> str:
        tex = html.unescape(match[2]).strip()
        is_block = match[1] == "div"
        found = convert(tex, display="block" if is_block else "inline")
        if "\\" in found:  # the converter passes on what it does not know
            raise PluginError(f"{page.file.src_uri}: a command of this formula is unknown: {tex}")
        # The character is raised in itself; as a superscript it is too small in fonts without variants for scripts.
        found = _PRIME.sub(r"<mrow>\1<mo>&#x02032;</mo></mrow>", found)
        return f'<div class="formula">{found}</div>' if is_block else found

    return _FORMULA.sub(formula, content)
