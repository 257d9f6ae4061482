"""The report as a PDF, set by Typst from the figures in SVG and tables of the results. The same results give the same bytes.

Each chapter of `numdev.report.studies` is a section: those that make a figure of a source again first, then our own. A chapter
whose study has no results is left out and listed.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import typst

from numdev.report.document.context import Markup, Part, context

HERE = Path(__file__).resolve().parent


def write_pdf(parts: Sequence[Part], title: str = "", author: str = "") -> bytes:
    """The document on some parts; its title is that of the first unless one is given."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_root(parts, root, title, author)
        return bytes(typst.compile(str(root / "report.typ"), root=str(root), ignore_system_fonts=True))


def write_root(parts: Sequence[Part], root: Path, title: str = "", author: str = "") -> None:
    """Write what Typst reads, templates, figures and `data.json`, into a folder."""
    for path in [*(HERE / "templates").glob("*.typ"), *(path for part in parts for path in part.drawn())]:
        shutil.copy(path, root)
    data = context(parts, TYPST)
    (root / "data.json").write_text(json.dumps(data | {"title": title or data["title"], "author": author}))


_NUMBER = r"-?\d[\d.]*(?:e-?\d+)?"
_FORMATS = r"\b(?:bf16|fp16|fp32|fp64|tf32|e4m3fn|e5m2)\b"
_SYMBOLS = {
    "|D|": "$abs(D)$",
    "|O|": "$abs(O)$",
    "Br": "$B_r$",
    "Bc": "$B_c$",
    "dQ": "d$Q$",
    "dK": "d$K$",
    "dV": "d$V$",
    "N": "$N$",
    "kernel(F)": "_kernel_(F)",
    "uniform(F)": "_uniform_(F)",
}
_SYMBOL = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in _SYMBOLS)
_INTERVAL = (
    r"(\[[^\s\[\](),]+|\bN\([^\s(),]+), (?=[^\s\[\](),]+[\])])"  # `[0.54, 0.61]`, `U[0, 1)` and `N(0, 1)` stay on one line
)


def escaped(text: str) -> str:
    """Text with the characters of Typst's markup escaped."""
    return re.sub(r"([\\#*_`$<>@\[\]~])", r"\\\1", text)


def typeset(text: str) -> str:
    """Typst markup of a sentence: `N^0.58`, `8.3e-16`, `|D|`, `-0.3` and `bf16` as a paper prints them."""
    text = re.sub(_INTERVAL, "\\1,\N{NO-BREAK SPACE}", text)
    any_rule = re.compile("|".join(f"(?P<{name}>{pattern})" for name, (pattern, _) in _RULES.items()))
    parts, place = [], 0
    for match in any_rule.finditer(text):
        parts += [escaped(text[place : match.start()]), _RULES[str(match.lastgroup)][1](match[0])]
        place = match.end()
    return "".join([*parts, escaped(text[place:])])


def _power(text: str) -> str:
    base, _, exponent = text.partition("^")
    word = "A" if base == "area" else base if len(base) == 1 else f'"{base}"'
    return f"${word}^({_number(exponent)})$"


def _number(text: str) -> str:
    factor, _, power = text.partition("e")
    return f"{factor} times 10^({power})" if power else factor


_RULES: dict[str, tuple[str, Callable[[str], str]]] = {
    "power": (rf"\b(?:[A-Za-z]+)\^{_NUMBER}(?<!\.)", _power),
    "small": (r"(?<![\w.])-?\d[\d.]*e-?\d+", lambda text: f"#box[${_number(text)}$]"),
    "test": (r"(?<!\w)p [<=] \d[\d.]*(?:e-?\d+)?(?<!\.)", lambda text: f"$p {text[2]} {_number(text[4:])}$"),
    "format": (_FORMATS, str.upper),
    "symbol": (_SYMBOL, lambda text: _SYMBOLS[text]),
    "negative": (r"(?<![\w.\-])-(?=\d)", lambda _: "−"),
}
TYPST = Markup(typeset, escaped, str)
