"""Overrides as Hydra reads them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override


def parsed(texts: Iterable[str]) -> list[Override]:
    """Every override. Each text is read once: a job of a sweep states what most others state too.

    Raises:
        OverrideParseException: for a text that is no override.
    """
    return [_parsed(text) for text in texts]


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Override:
    (found,) = OverridesParser.create().parse_overrides([text])
    return found
