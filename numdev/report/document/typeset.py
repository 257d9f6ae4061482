"""Plain text of a report as Typst markup: mathematics set as mathematics, formats by their names."""

from __future__ import annotations

import re
from collections.abc import Callable

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
_INTERVAL = (
    r"(\[[^\s\[\](),]+|\bN\([^\s(),]+), (?=[^\s\[\](),]+[\])])"  # `[0.54, 0.61]`, `U[0, 1)` and `N(0, 1)` stay on one line
)
_SYMBOL = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in _SYMBOLS)


def escaped(text: str) -> str:
    """Text with the characters of Typst's markup escaped."""
    return re.sub(r"([\\#*_`$<>@\[\]~])", r"\\\1", text)


def typeset(text: str) -> str:
    """Typst markup of a sentence: `N^0.58`, `8.3e-16`, `|D|`, `-0.3` and `bf16` as a paper prints them."""
    text = re.sub(_INTERVAL, "\\1,\N{NO-BREAK SPACE}", text)
    found = re.compile("|".join(f"(?P<{name}>{pattern})" for name, (pattern, _) in _RULES.items()))
    parts, place = [], 0
    for match in found.finditer(text):
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


def _symbol(text: str) -> str:
    return _SYMBOLS[text]


_RULES: dict[str, tuple[str, Callable[[str], str]]] = {
    "power": (rf"\b(?:[A-Za-z]+)\^{_NUMBER}(?<!\.)", _power),
    "small": (r"(?<![\w.])-?\d[\d.]*e-?\d+", lambda text: f"#box[${_number(text)}$]"),
    "test": (r"(?<!\w)p [<=] \d[\d.]*(?:e-?\d+)?(?<!\.)", lambda text: f"$p {text[2]} {_number(text[4:])}$"),
    "format": (_FORMATS, str.upper),
    "symbol": (_SYMBOL, _symbol),
    "negative": (r"(?<![\w.\-])-(?=\d)", lambda _: "−"),
}
