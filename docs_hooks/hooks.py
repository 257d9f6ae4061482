"""Hooks of the documentation's build: figures from where they are kept, and formulae as MathML.

No plugin serves for either: mkdocs-gen-files would copy every figure, and brings a second MkDocs along; no extension of Markdown
makes MathML, which needs no script and no network, without a program outside of Python.
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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The figures of the reference results, at `figures/<folder>/<name>.svg`."""
    from docs_hooks.gallery import address, figures  # by now the plugin `macros` has made the package importable

    for path in figures():
        files.append(File.generated(config, address(path), abs_src_path=str(path)))
    return files


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
