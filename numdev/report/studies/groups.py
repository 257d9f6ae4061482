"""In what a run of training differs from its reference, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pandas as pd

from numdev.report.figures.style import BLACK, CHANGE_COLOURS, GREY, TILED


class Group(Enum):
    """In what a run differs from its reference; `words` and `shade` of a legend."""

    SHAM = "sham"
    FLASH = "flash"
    ULP = "ulp"
    INIT = "init"
    ORDER = "order"
    RANKS = "ranks"
    RESTART = "restart"
    PRECISION = "precision"
    OTHER = "other"

    @property
    def words(self) -> str:
        return _GROUPS[self][0]

    @property
    def shade(self) -> str:
        return _GROUPS[self][1]


_GROUPS = {
    Group.SHAM: ("the reference again (sham)", GREY),
    Group.FLASH: ("flash attention", TILED),
    Group.ULP: ("one weight moved by one ulp", BLACK),
    Group.INIT: ("other initial weights", CHANGE_COLOURS["init"]),
    Group.ORDER: ("other order of the data", CHANGE_COLOURS["order"]),
    Group.RANKS: ("another number of processes", CHANGE_COLOURS["ranks"]),
    Group.RESTART: ("stopped and resumed", CHANGE_COLOURS["restart"]),
    Group.PRECISION: ("lower precision than FP32", CHANGE_COLOURS["precision"]),
    Group.OTHER: ("several of these", CHANGE_COLOURS["several"]),
}
_NUMERICS = {
    "fp32": "FP32",
    "autocast_bf16": "BF16 (autocast)",
    "autocast_fp16": "FP16 (autocast)",
    "bf16_weights": "BF16 weights",
}
_BF16_ULP = 2**16  # ulps of FP32, which has 16 bits of the significand more
_RESTARTS = {"exact": "resumed exactly", "lossy": "resumed from BF16", "weights_only": "resumed without moments"}

_FIELDS = {
    Group.FLASH: ("attention.type", "VanillaBackward"),
    Group.ULP: ("ulp", "0"),
    Group.INIT: ("init", "0"),
    Group.ORDER: ("order", "0"),
    Group.RANKS: ("ranks", "1"),
    Group.RESTART: ("restart", "none"),
    Group.PRECISION: ("numerics", ""),
}
"""What tells a run of a group from its reference, and its value where a record does not state it."""


def _differences(row: Mapping[str, Any]) -> list[Group]:
    """In what the run of a row differs from its reference."""
    found = []
    for group, (name, usual) in _FIELDS.items():
        own = text_of(row, f"variant.{name}") or usual
        if own != (text_of(row, f"baseline.{name}") or usual or own):
            found.append(group)
    return found


def group_of(row: Mapping[str, Any]) -> Group:
    """The group of a row's run: the sham differs in nothing, and what differs in several ways is of no other group."""
    found = _differences(row)
    return Group.SHAM if not found else found[0] if len(found) == 1 else Group.OTHER


def name_of(row: Mapping[str, Any]) -> str:
    """The run of a row in words, such as "cuDNN" or "other initial weights"."""
    return ", ".join(_words(row, group) for group in _differences(row)) or Group.SHAM.words


def _words(row: Mapping[str, Any], group: Group) -> str:
    if group is Group.FLASH:
        return _kernel(row)
    if group is Group.PRECISION:
        return " against ".join(
            _NUMERICS.get(name, name) for name in (text_of(row, "variant.numerics"), text_of(row, "baseline.numerics"))
        )
    if group is Group.RANKS:
        return f"{_number(row, 'variant.ranks'):.0f} processes for 1"
    if group is Group.RESTART:
        return _RESTARTS.get(text_of(row, "variant.restart"), group.words)
    if group is Group.ULP and abs(count := _number(row, "variant.ulp")) != 1:
        return f"one weight moved by {'one ulp of BF16' if count == _BF16_ULP else f'{count:.0f} ulp'}"
    return group.words


def _kernel(row: Mapping[str, Any]) -> str:
    """What computes attention: the implementation, and of an emulation its precision policy."""
    kind, policy = text_of(row, "variant.attention.type"), text_of(row, "variant.attention.precision.name")
    if kind == "SdpaBackward":
        backend = text_of(row, "variant.attention.backend")
        return "cuDNN" if backend == "cudnn" else f"PyTorch {backend}"
    if kind in ("TiledBackward", "InstrumentedBackward"):
        inside = "FP32 inside" if policy.startswith("kernel_") else f"every step in {policy.removeprefix('uniform_').upper()}"
        return f"tiled with {inside}"
    return {"TritonBackward": "our Triton kernel", "FlexBackward": "FlexAttention"}.get(kind, kind.removesuffix("Backward"))


def text_of(row: Mapping[str, Any], name: str) -> str:
    """A cell as text; empty where a row has none."""
    value = row.get(name)
    if value is None or pd.isna(value):
        return ""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _number(row: Mapping[str, Any], name: str, absent: float = 0) -> float:
    value = row.get(name)
    return absent if value is None or pd.isna(value) else float(value)
