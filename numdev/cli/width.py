"""Text for a terminal of 80 columns."""

from __future__ import annotations

import re
from textwrap import fill

WIDTH = 80


def wrapped(text: str) -> str:
    """The text with its long lines wrapped and indented further; its other lines stay as they are."""
    return "\n".join(line if len(line) <= WIDTH else _hanging(line) for line in text.splitlines())


def _hanging(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return fill(line.lstrip(), WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)


def filled(text: str) -> str:
    """Paragraphs, which end with a full stop at the end of a line, each wrapped anew."""
    paragraphs = re.split(r"(?<=[.:])\n|\n\n", text)
    return "\n".join(fill(" ".join(each.split()), WIDTH, break_on_hyphens=False) for each in paragraphs)
