"""The cost model: operations, and bytes moved between a processor's memory and its on-chip memory.

Dao et al. 2022, Theorem 2: attention with all scores in memory moves `Theta(N d + N^2)` elements, tiled attention
`Theta(N^2 d^2 / M)` with on-chip memory of M elements. Here both are counted exactly for one algorithm each.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from numdev.arithmetic.formats import Format
from numdev.attention.mask import Mask
from numdev.attention.problem import Problem

_DEFAULT_CACHE = 1 << 20  # bytes, where the system does not say


class Algorithm(Enum):
    """The algorithm whose operations and bytes are counted."""

    VANILLA = "vanilla"
    TILED = "tiled"


@dataclass(frozen=True)
class Width:
    """Bytes of one element of q, k, v (and of scores in memory), and of one of the output."""

    input: float
    output: float

    @staticmethod
    def of(stored: Format, output: Format) -> Width:
        """Of elements in these formats."""
        return Width(stored.bits / 8, output.bits / 8)


@dataclass(frozen=True)
class CostModel:
    """What the model must know of an implementation, which declares it.

    Attributes:
        algorithm: which of the two it is.
        width: of its elements in memory.
        br: rows of its tile; None is `M / 4d` of the processor (Dao et al. 2022, Algorithm 1).
        holds_scores: whether S and P are in memory whole.
        packs_heads: whether heads that share k and v are rows of one tile where there is one query, and read them once.
    """

    algorithm: Algorithm
    width: Width
    br: int | None = None
    holds_scores: bool = False
    packs_heads: bool = False


@dataclass(frozen=True)
class Cost:
    """What the model says of one call: the algorithm, the bytes it moves, and the rows of its tile, 0 without tiles."""

    algorithm: Algorithm
    bytes: float
    br: int


def cost_of(problem: Problem, model: CostModel, device: torch.device) -> Cost:
    """The cost of a problem by the model of an implementation, on a device."""
    br = rows_of_tile(problem, model, device) if model.algorithm is Algorithm.TILED else 0
    return Cost(model.algorithm, moved_bytes(as_computed(problem, model), model.algorithm, model.width, br), br)


def visible_pairs(mask: Mask, batch: int, queries: int, keys: int) -> int:
    """Pairs of a query and a key that it sees, over the batch entries."""
    rows = torch.arange(queries)
    ranges = (mask.key_range(queries, keys, rows, length) for length in mask.lengths(batch, keys))
    return sum(int((high - low).clamp(min=0).sum()) for low, high in ranges)


def operations(problem: Problem) -> int:
    """`4 d` for each visible pair of each head: a product and a sum in `Q K^T` and in `P V`; the exponential is not counted."""
    shape = problem.shape
    return 4 * shape.head_dim * shape.heads * visible_pairs(problem.mask, shape.batch, shape.queries, shape.keys)


def as_computed(problem: Problem, model: CostModel) -> Problem:
    """The problem as a kernel that packs heads has it: with one query, heads that share k and v are its rows."""
    if not model.packs_heads or problem.shape.queries > 1 or problem.mask.window is not None:
        return problem
    return replace(problem, shape=problem.shape.packed, mask=replace(problem.mask, causal=False))


def moved_bytes(problem: Problem, kind: Algorithm, each: Width, br: int) -> float:
    """Bytes that the algorithm moves; `br` is the tile's rows, which vanilla attention ignores."""
    return _vanilla(problem, each) if kind is Algorithm.VANILLA else _tiled(problem, each, br)


def _vanilla(problem: Problem, each: Width) -> float:
    """`Q K^T` reads q, k and writes S; softmax reads S and writes P; `P V` reads P, v and writes O; a mask reads, writes S."""
    shape = problem.shape
    q, kv = math.prod(shape.q), math.prod(shape.kv)
    scores = shape.batch * shape.heads * shape.queries * shape.keys
    return each.input * (q + 2 * kv + (4 if problem.mask.is_none else 6) * scores) + each.output * q


def _tiled(problem: Problem, each: Width, br: int) -> float:
    """Each block of `br` rows reads its q, the keys and values that any of its rows sees, and writes its O.

    Each of the heads that share a KV head reads it, as far as no cache lies between.
    """
    shape, keys = problem.shape, keys_of_tiles(problem, br)
    q = math.prod(shape.q)
    return each.input * (q + 2 * shape.heads * shape.head_dim * keys) + each.output * q


def keys_of_tiles(problem: Problem, br: int) -> int:
    """Keys between the first and the last that any row of a block of `br` rows sees, over all blocks of all batch entries."""
    shape, mask = problem.shape, problem.mask
    starts = torch.arange(0, shape.queries, br)
    ends = (starts + br - 1).clamp(max=shape.queries - 1)
    keys = 0
    for length in mask.lengths(shape.batch, shape.keys):
        low, _ = mask.key_range(shape.queries, shape.keys, starts, length)
        _, high = mask.key_range(shape.queries, shape.keys, ends, length)
        keys += int((high - low).clamp(min=0).sum())
    return keys


def rows_of_tile(problem: Problem, model: CostModel, device: torch.device) -> int:
    """Br: the implementation's own, or `M / 4d` of the processor (Dao et al. 2022, Algorithm 1)."""
    if model.br is not None:
        return model.br
    elements = on_chip_bytes(device) / model.width.input
    return max(1, math.ceil(elements / (4 * problem.shape.head_dim)))


def on_chip_bytes(device: torch.device) -> int:
    """Shared memory of a block of threads, or the second-level cache of a CPU core."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return int(properties.shared_memory_per_block_optin)
    size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    text = size.read_text().strip() if size.is_file() else ""
    return int(text[:-1]) * 1024 if re.fullmatch(r"\d+K", text) else _DEFAULT_CACHE
