"""Functions that the files of studies name for what their words cannot say: figures, evidence for claims, tables.

`registry` reads those files (`configs/study`), and no other module here reads any. Rules of verdicts and drawing that all figures
share live elsewhere.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from numdev.report.reading.wording import PLAIN, Words

TEXTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
"""Words for operations, their studies and their columns."""


def operation_words(operation: str, like: Words = PLAIN, **more: Any) -> Words:
    """The words for an operation, which are those of another but for what the texts and `more` say."""
    own: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in TEXTS[operation].items()}
    return replace(like, operation=operation, **own, **more)
