"""The cost model: operations, and bytes moved between a processor's memory and its on-chip memory.

Dao et al. 2022, Theorem 2: attention with all scores in memory moves `Theta(N d + N^2)` elements, tiled attention
`Theta(N^2 d^2 / M)` with on-chip memory of M elements. Here both are counted exactly for one algorithm each.
"""

from __future__ import annotations

import math
import re
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from numdev.attention.flex import Flex
from numdev.attention.instrumented import Instrumented
from numdev.attention.naive import Naive
from numdev.attention.sdpa import Backend, Sdpa
from numdev.attention.tiled import Tiled
from numdev.attention.triton import Triton
from numdev.attention.vanilla import Vanilla
from numdev.formats import Format
from numdev.mask import Mask
from numdev.problem import Problem

_DEFAULT_CACHE = 1 << 20  # bytes, where the system does not say


class Algorithm(Enum):
    """What is counted."""

    VANILLA = "vanilla"
    TILED = "tiled"


def algorithm(variant: Any) -> Algorithm | None:
    """Which of the two a variant is; None for one that is neither, or unknown."""
    if isinstance(variant, (Vanilla, Naive)) or (isinstance(variant, Sdpa) and variant.backend is Backend.MATH):
        return Algorithm.VANILLA
    return Algorithm.TILED if isinstance(variant, (Tiled, Instrumented, Triton, Sdpa, Flex)) else None


def visible_pairs(mask: Mask, batch: int, queries: int, keys: int) -> int:
    """Pairs of a query and a key that it sees, over the batch entries."""
    return sum(int(_seen(mask, length, queries, keys).sum()) for length in _lengths(mask, batch, keys))


def _lengths(mask: Mask, batch: int, keys: int) -> tuple[int, ...]:
    return mask.key_lengths or (keys,) * batch


def _seen(mask: Mask, length: int, queries: int, keys: int) -> torch.Tensor:
    """Keys that each query sees of `length`."""
    low, high = _range(mask, length, torch.arange(queries), queries, keys)
    return (high - low).clamp(min=0)


def _range(mask: Mask, length: int, rows: torch.Tensor, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    position = rows + (keys - queries)
    low, high = torch.zeros_like(rows), torch.full_like(rows, length)
    if mask.causal:
        high = torch.minimum(high, position + 1)
    if mask.window is not None:
        low = (position - mask.window + 1).clamp(min=0)
        high = torch.minimum(high, position + mask.window)
    return low, high


def operations(problem: Problem) -> int:
    """`4 d` for each visible pair of each head: a product and a sum in `Q K^T` and in `P V`; the exponential is not counted."""
    shape = problem.shape
    return 4 * shape.head_dim * shape.heads * visible_pairs(problem.mask, shape.batch, shape.queries, shape.keys)


def moved_bytes(problem: Problem, kind: Algorithm, fmt: Format, br: int) -> float:
    """Bytes that the algorithm moves; `br` is the tile's rows and of no account to vanilla attention."""
    elements = _vanilla(problem) if kind is Algorithm.VANILLA else _tiled(problem, br)
    return elements * fmt.bits / 8


def _vanilla(problem: Problem) -> int:
    """`Q K^T` reads q, k and writes S; softmax reads S and writes P; `P V` reads P, v and writes O; a mask reads, writes S."""
    shape = problem.shape
    q, kv = math.prod(shape.q), math.prod(shape.kv)
    scores = shape.batch * shape.heads * shape.queries * shape.keys
    return 2 * q + 2 * kv + (4 if problem.mask.is_none else 6) * scores


def _tiled(problem: Problem, br: int) -> int:
    """Each block of `br` rows reads its q, the keys and values that any of its rows sees, and writes its O."""
    shape, mask = problem.shape, problem.mask
    starts = torch.arange(0, shape.queries, br)
    ends = (starts + br - 1).clamp(max=shape.queries - 1)
    keys = 0
    for length in _lengths(mask, shape.batch, shape.keys):
        low, _ = _range(mask, length, starts, shape.queries, shape.keys)
        _, high = _range(mask, length, ends, shape.queries, shape.keys)
        keys += int((high - low).clamp(min=0).sum())
    return 2 * math.prod(shape.q) + 2 * shape.heads * shape.head_dim * keys


def rows_of_tile(variant: Any, kernel: str, problem: Problem, device: torch.device) -> int:
    """Br: the variant's own, that of the kernel which ran, or `M / 4d` of the processor (Dao et al. 2022, Algorithm 1)."""
    if isinstance(variant, (Tiled, Instrumented)):
        return variant.tiling.br
    named = re.search(r"\bbr=(\d+)", kernel)
    if named:
        return int(named[1])
    elements = on_chip_bytes(device) / (variant.format.bits / 8)
    return max(1, math.ceil(elements / (4 * problem.shape.head_dim)))


def on_chip_bytes(device: torch.device) -> int:
    """Shared memory of a block of threads, or the second-level cache of a CPU core."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return int(properties.shared_memory_per_block_optin)
    size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    text = size.read_text().strip() if size.is_file() else ""
    return int(text[:-1]) * 1024 if re.fullmatch(r"\d+K", text) else _DEFAULT_CACHE
