"""Pinned launch settings of our kernels: the same request runs the same code in every process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from numdev.arithmetic.formats import Format
from numdev.attention.kernels.splits import ROWS
from numdev.attention.mask import Mask
from numdev.errors import BadInput

TABLE = Path(__file__).resolve().parents[2] / "data" / "launch.json"


class Kernel(Enum):
    """Which of our kernels runs."""

    AUTO = "auto"  # the kernel for Hopper GPUs, if the GPU is one and the kernel can run the request; else the portable one
    PORTABLE = "portable"
    HOPPER = "hopper"


@dataclass(frozen=True)
class Launch:
    """A tile, warps of a program, and stages of the software pipeline."""

    br: int
    bc: int
    warps: int
    stages: int


_PLACE = {"format", "head_dim", "mask", "generation"}
# If no entry of the table fits, the first of these that fits is used. The last fits 64 KB at every head_dim and format.
SAFE = (Launch(64, 32, 4, 2), Launch(32, 32, 4, 2), Launch(32, 16, 4, 2), Launch(16, 16, 4, 2), Launch(16, 16, 4, 1))
# Beyond d = 128, where O of 64 rows would take 128 or more registers of each thread of 4 warps.
SAFE_WIDE = (Launch(64, 64, 8, 2), Launch(64, 32, 8, 2), *SAFE[1:])
_SHORT_ROW = 128  # bytes of a key, up to which it takes 128 of them to keep the memory busy
FEW_ROWS = (
    Launch(16, 128, 4, 3),
    Launch(16, 64, 4, 3),
    Launch(16, 64, 4, 2),
    Launch(16, 32, 4, 2),
    Launch(16, 16, 4, 2),
    Launch(16, 16, 4, 1),
)
INTERPRETED = Launch(32, 32, 4, 1)


def hopper_bc(head_dim: int) -> int:
    """Keys of a block of the Hopper kernel, which leave registers for O and shared memory for two blocks each of K and V."""
    return 64 if head_dim > 128 else 128


@dataclass(frozen=True)
class Device:
    """The properties of a device by which a launch is chosen.

    Attributes:
        generation: the key of the table.
        shared: bytes of shared memory that a program may have; None where nothing limits it.
    """

    generation: str
    shared: int | None = None


def choose(
    fmt: Format, head_dim: int, queries: int, mask: Mask, device: Device, br: int | None = None, bc: int | None = None
) -> Launch:
    """The entry of the table for a request; sides that are given replace those of the entry.

    An entry is found by format, device generation, mask (causal or not) and the smallest head_dim that is not below the
    requested one. If there is none, or its tile does not fit into the shared memory of the device, the launch is the first of
    `SAFE` or `SAFE_WIDE` that fits; of `FEW_ROWS` if all queries fit into one block of 16; and `INTERPRETED` without a GPU. If
    sides are given, the launch has as many stages as fit.
    """
    preferred = _launches(fmt, head_dim, queries, mask, device)
    if br is None and bc is None:
        return next((launch for launch in preferred if fits(launch, fmt, head_dim, device)), preferred[-1])
    found = preferred[0]
    sides = {name: side for name, side in (("br", br), ("bc", bc)) if side is not None}
    given = replace(found, **sides)
    return with_stages(replace(given, warps=8 if given.br * given.bc >= 128 * 128 else 4, stages=2), fmt, head_dim, device)


def _launches(fmt: Format, head_dim: int, queries: int, mask: Mask, device: Device) -> tuple[Launch, ...]:
    """The launches to try, in the order of preference."""
    if device.generation == "interpreter":
        return (INTERPRETED,)
    if queries <= ROWS:
        return FEW_ROWS[1:] if head_dim * fmt.bits > 8 * _SHORT_ROW else FEW_ROWS
    rows = [row for row in table()["entries"] if _matches(row, fmt, mask, device.generation) and row["head_dim"] >= head_dim]
    safe = SAFE_WIDE if head_dim > 128 else SAFE
    if not rows:
        return safe
    row = min(rows, key=lambda row: row["head_dim"])
    return Launch(row["br"], row["bc"], row["warps"], row["stages"]), *safe


def shared_bytes(launch: Launch, fmt: Format, head_dim: int) -> int:
    """An upper bound on the shared memory of a launch, from what the compiler keeps there.

    Each stage holds a tile of K and one of V. In addition there are Q or P, whichever is larger, a maximum and a sum per row and
    warp, and for FP8 both tiles converted to FP16, in which they are multiplied.
    """
    inner = max(16, 1 << (head_dim - 1).bit_length())
    br, bc = (max(16, 1 << (side - 1).bit_length()) for side in (launch.br, launch.bc))
    stored = max(8, fmt.bits) // 8
    operand = max(2, stored)
    tiles = 2 * launch.stages * bc * inner * stored
    converted = 2 * bc * inner * operand if stored < operand else 0
    return tiles + converted + max(br * inner * operand, br * bc * 4) + 4 * br * launch.warps


def fits(launch: Launch, fmt: Format, head_dim: int, device: Device) -> bool:
    """Whether a launch fits into the shared memory of a device."""
    return device.shared is None or shared_bytes(launch, fmt, head_dim) <= device.shared


def with_stages(launch: Launch, fmt: Format, head_dim: int, device: Device) -> Launch:
    """The launch with as many of its stages as fit, at least one."""
    fewer = (replace(launch, stages=stages) for stages in range(launch.stages, 1, -1))
    return next((each for each in fewer if fits(each, fmt, head_dim, device)), replace(launch, stages=1))


def _matches(row: dict[str, Any], fmt: Format, mask: Mask, generation: str) -> bool:
    return (row["format"], row["mask"], row["generation"]) == (fmt.name, mask_name(mask), generation)


def mask_name(mask: Mask) -> str:
    """`causal` or `none`, which decides the shape of the loop."""
    return "causal" if mask.causal else "none"


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """The shipped file: entries, each with the command that found it, on which device and with which versions."""
    return read(TABLE)


def read(path: Path) -> dict[str, Any]:
    """A table from its file.

    Raises:
        BadInput: if the file holds no table.
    """
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
        if not all(_PLACE.issubset(entry) for entry in loaded["entries"]):
            raise KeyError("entries")
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput("out", str(path), f"it holds no table of launch settings ({error}); name another file") from None
    return loaded


@lru_cache(maxsize=1)
def digest() -> str:
    """Digest of the shipped table, since another table may change the bits of a result."""
    return hashlib.sha256(TABLE.read_bytes()).hexdigest()[:12]
