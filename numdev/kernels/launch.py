"""Launch settings of the portable kernel, pinned: the same request runs the same code in every process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from numdev.errors import BadInput
from numdev.formats import Format
from numdev.mask import Mask

TABLE = Path(__file__).resolve().parent.parent / "data" / "launch.json"


@dataclass(frozen=True)
class Launch:
    """A tile, warps of a program, and stages of the software pipeline."""

    br: int
    bc: int
    warps: int
    stages: int


_PLACE = {"format", "head_dim", "mask", "generation"}
SAFE = Launch(64, 32, 4, 2)  # fits every GPU at every head_dim
INTERPRETED = Launch(32, 32, 4, 1)


def choose(fmt: Format, head_dim: int, mask: Mask, generation: str, br: int | None = None, bc: int | None = None) -> Launch:
    """The entry of the table for a request; sides that are given replace its own.

    An entry is found by format, device generation, mask (causal or not) and the smallest head_dim that is not below the
    requested one. Where there is none the launch is `SAFE`, and `INTERPRETED` without a GPU.
    """
    found = INTERPRETED if generation == "interpreter" else SAFE
    rows = [row for row in table()["entries"] if _matches(row, fmt, mask, generation) and row["head_dim"] >= head_dim]
    if rows:
        row = min(rows, key=lambda row: row["head_dim"])
        found = Launch(row["br"], row["bc"], row["warps"], row["stages"])
    sides = {name: side for name, side in (("br", br), ("bc", bc)) if side is not None}
    if not sides:
        return found
    given = replace(found, **sides)
    return replace(given, warps=8 if given.br * given.bc >= 128 * 128 else 4, stages=2)


def _matches(row: dict[str, Any], fmt: Format, mask: Mask, generation: str) -> bool:
    return (row["format"], row["mask"], row["generation"]) == (fmt.name, mask_name(mask), generation)


def mask_name(mask: Mask) -> str:
    """`causal` or `none`: what decides the shape of the loop."""
    return "causal" if mask.causal else "none"


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """The shipped file: entries, each with the command that found it, on which device and with which versions."""
    return read(TABLE)


def read(path: Path) -> dict[str, Any]:
    """A table from its file.

    Raises:
        BadInput: if the file holds none.
    """
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
        if not all(_PLACE.issubset(entry) for entry in loaded["entries"]):
            raise KeyError("entries")
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput("out", str(path), f"it is no table of launch settings ({error}); name another file") from None
    return loaded


@lru_cache(maxsize=1)
def digest() -> str:
    """Of the shipped table: another one may change the bits of a result."""
    return hashlib.sha256(TABLE.read_bytes()).hexdigest()[:12]
