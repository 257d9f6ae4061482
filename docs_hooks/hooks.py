"""Hooks of the documentation's build: figures and tables from where they are kept, and formulae as MathML.

Nothing that a page takes from the code, from `configs/` or from `reports/reference` stands in git a second time. A line
`{{ name }}` of a page is replaced by what `BLOCKS[name]` returns. Formulae become MathML, which needs no script and no network.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gallery import address, figures, gallery  # MkDocs looks for modules beside a file of hooks
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from tables import (
    changelog,
    claims,
    columns,
    commands,
    decode_speed,
    honoured,
    kernel_speed,
    launch_table,
    meanings,
    notebooks,
    options,
    rules,
    settings,
    study_table,
)

BLOCKS: dict[str, Callable[[], Iterator[str]]] = {
    "changelog": changelog,
    "claims": claims,
    "columns": columns,
    "commands": commands,
    "decode_speed": decode_speed,
    "gallery": gallery,
    "honoured": honoured,
    "kernel_speed": kernel_speed,
    "launch_table": launch_table,
    "meanings": meanings,
    "notebooks": notebooks,
    "options": options,
    "rules": rules,
    "settings": settings,
    "study_table": study_table,
}

_BLOCK = re.compile(r"^\{\{ (\w+) \}\}$", re.MULTILINE)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_PRIME = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msup>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The figures of the reference results, at `figures/<folder>/<name>.svg`."""
    for path in figures():
        files.append(File.generated(config, address(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Blocks in place of their names."""

    def block(match: re.Match[str]) -> str:
        if match[1] not in BLOCKS:
            raise PluginError(f"{page.file.src_uri}: there is no block {match[1]}; there are {', '.join(BLOCKS)}")
        return "\n".join(BLOCKS[match[1]]())

    return _BLOCK.sub(block, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """The search index as a script too, which the theme asks for where pages are opened from a folder."""
    folder = Path(config.site_dir) / "search"
    (folder / "search_index.js").write_text(f"var __index = {(folder / 'search_index.json').read_text()}")


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
