"""The cost model: operations, and bytes moved between a processor's memory and its on-chip memory.

Dao et al. 2022, Theorem 2: attention with all scores in memory moves `Theta(N d + N^2)` elements, tiled attention
`Theta(N^2 d^2 / M)` with on-chip memory of M elements. Both are counted exactly here for one algorithm each, and its gradients.
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
_WIDE = 4  # bytes of LSE, delta and the running sum of dQ, which kernels keep in FP32


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
    """The algorithm of an implementation as the model sees it; the implementation declares it."""

    algorithm: Algorithm
    width: Width
    br: int | None = None  # rows of its tile of queries; None is `M / 4d` of the processor (Dao et al. 2022, Algorithm 1)
    holds_scores: bool = False  # whether S and P are in memory whole
    # Most rows of a KV head that are packed into one tile, which reads k and v once: 1 packs heads of one query, 0 none
    packed_rows: int = 0
    bc: int | None = None  # of a backward pass, keys in a tile of keys; None is as many as `br`
    # Passes over all tiles, each of which computes P again. Of two or three the last computes dQ, which stays on the chip, and
    # the others dK and dV. Of one, each meeting of a tile of keys with a row reads and writes the running sum of dQ
    passes: int = 1
    # Whether the first tile of keys that a row meets stores its share of dQ instead of adding it to a sum
    stores_first: bool = False
    # Whether the step that computes delta also reads LSE, and writes it in the units of a binary exponential
    scales_lse: bool = False


def cost_of(problem: Problem, model: CostModel, device: torch.device, *, backward: bool = False) -> tuple[float, int]:
    """The bytes that a pass moves on a device by the model of an implementation, and the rows of its tile, 0 without tiles."""
    problem = problem if backward else as_computed(problem, model)
    if model.algorithm is Algorithm.VANILLA:
        return (backward_vanilla_bytes if backward else vanilla_bytes)(problem, model.width), 0
    br = rows_of_tile(problem, model, device)
    return backward_tiled_bytes(problem, model, br, model.bc or br) if backward else tiled_bytes(problem, model.width, br), br


def operations(problem: Problem) -> int:
    """`4 d` for each visible pair of each head: a product and a sum in `Q K^T` and in `P V`; the exponential is not counted."""
    shape = problem.shape
    return 4 * shape.head_dim * shape.heads * visible_pairs(problem.mask, shape.batch, shape.queries, shape.keys)


def backward_operations(problem: Problem) -> int:
    """`10 d` for each visible pair of each head: a product and a sum in each of `Q K^T`, `dO V^T`, `P^T dO`, `dS^T Q`, `dS K`.

    `Q K^T` is counted although an implementation that stores P does not compute it: this is the usual count
    (Dao 2023, section 4.1, 2.5 times the forward pass).
    """
    return 5 * operations(problem) // 2


def visible_pairs(mask: Mask, batch: int, queries: int, keys: int) -> int:
    """Pairs of a query and a key that it sees, over the batch entries."""
    rows = torch.arange(queries)
    ranges = (mask.key_range(queries, keys, rows, length) for length in mask.lengths(batch, keys))
    return sum(int((high - low).clamp(min=0).sum()) for low, high in ranges)


def as_computed(problem: Problem, model: CostModel) -> Problem:
    """The problem as a kernel that packs heads has it: with few queries, heads that share k and v are its rows."""
    packed = problem.shape.packed(problem.mask, model.packed_rows)
    if not model.packed_rows or packed is problem.shape:
        return problem
    return replace(problem, shape=packed, mask=replace(problem.mask, causal=False))


def vanilla_bytes(problem: Problem, each: Width) -> float:
    """`Q K^T` reads q, k and writes S; softmax reads S and writes P; `P V` reads P, v and writes O; a mask reads, writes S."""
    q, kv, scores = _elements(problem)
    return each.input * (q + 2 * kv + (4 if problem.mask.is_none else 6) * scores) + each.output * q


def tiled_bytes(problem: Problem, each: Width, br: int) -> float:
    """Each block of `br` rows reads its q, the keys and values that any of its rows sees, and writes its O.

    Each of the heads that share a KV head reads it, as far as no cache lies between.
    """
    shape, (q, _, _) = problem.shape, _elements(problem)
    return each.input * (q + 2 * shape.heads * shape.head_dim * _keys_of_tiles(problem, br)) + each.output * q


def backward_vanilla_bytes(problem: Problem, each: Width) -> float:
    """Autograd of matmul, softmax, matmul: it reads and writes all scores seven times, nine times under a mask.

    `dV = P^T dO` reads P; `dP = dO V^T` is written; softmax's gradient reads P and dP and writes dS; a mask reads and writes dS;
    `dQ = dS K` and `dK = dS^T Q` read dS. dO is read twice, q, k and v once, dQ, dK and dV are written.
    """
    q, kv, scores = _elements(problem)
    return each.input * (3 * q + 2 * kv + (7 if problem.mask.is_none else 9) * scores) + each.output * (q + 2 * kv)


def backward_tiled_bytes(problem: Problem, model: CostModel, br: int, bc: int) -> float:
    """Dao 2023, Algorithm 2: delta, then for each tile of keys every row that sees any of its keys.

    - Computing delta reads O and dO and writes one number per row; it may also read LSE and write it in other units.
    - A tile of keys reads its k and v, and q, dO, LSE and delta of each row that it meets.
    - dQ is read and written in FP32 at each meeting (at a row's first meeting perhaps only written), and then converted. Or a
      second pass computes it: a tile of queries reads its q, dO, LSE and delta, and the k and v that any of its rows sees.
    - If dK and dV have a pass each, that of dV reads k, and q, dO, LSE and delta of each row, once more.
    - dQ, dK and dV are written.

    Every query head reads the KV head that it shares.
    """
    shape, each, (q, kv, _) = problem.shape, model.width, _elements(problem)
    rows = shape.batch * shape.heads * shape.queries
    keys, met, seeing = (shape.heads * count for count in _meetings(problem, bc))
    of_row = 2 * shape.head_dim * each.input + 2 * _WIDE  # q, dO, LSE, delta
    moved = each.input * (2 * q + 2 * shape.head_dim * keys) + _WIDE * rows + of_row * met + each.output * (q + 2 * kv)
    moved += 2 * _WIDE * rows if model.scales_lse else 0
    moved += (each.input * shape.head_dim * keys + of_row * met) * (model.passes == 3)
    if model.passes > 1:
        return moved + of_row * rows + each.input * 2 * shape.head_dim * shape.heads * _keys_of_tiles(problem, br)
    return moved + _WIDE * (shape.head_dim * (2 * met - (seeing if model.stores_first else 0)) + q)


def _elements(problem: Problem) -> tuple[int, int, int]:
    """Elements of q, of k, and of all scores."""
    shape = problem.shape
    return math.prod(shape.q), math.prod(shape.kv), shape.batch * shape.heads * shape.queries * shape.keys


def _keys_of_tiles(problem: Problem, br: int) -> int:
    """Keys between the first and the last that any row of a block of `br` rows sees, over all blocks of all batch entries."""
    shape, mask = problem.shape, problem.mask
    starts = torch.arange(0, shape.queries, br)
    ends = (starts + br - 1).clamp(max=shape.queries - 1)
    keys = 0
    for length in mask.lengths(shape.batch, shape.keys):
        (low, _), (_, high) = (mask.key_range(shape.queries, shape.keys, rows, length) for rows in (starts, ends))
        keys += int((high - low).clamp(min=0).sum())
    return keys


def _meetings(problem: Problem, bc: int) -> tuple[int, int, int]:
    """Keys in tiles that some row sees; pairs of such a tile and a row between its first and last; rows in at least one pair."""
    shape, mask = problem.shape, problem.mask
    keys = met = seeing = 0
    for length in mask.lengths(shape.batch, shape.keys):
        tiles = [(start, min(start + bc, length)) for start in range(0, length, bc)]
        seen = [(tile, mask.query_range(shape.queries, shape.keys, *tile)) for tile in tiles]
        seen = [(tile, rows) for tile, rows in seen if rows[0] < rows[1]]
        keys += sum(stop - start for (start, stop), _ in seen)
        met += sum(last - first for _, (first, last) in seen)
        seeing += max((last for _, (_, last) in seen), default=0) - min((first for _, (first, _) in seen), default=0)
    return keys, met, seeing


def rows_of_tile(problem: Problem, model: CostModel, device: torch.device) -> int:
    """Br: the implementation's own, or `M / 4d` of the processor (Dao et al. 2022, Algorithm 1)."""
    return model.br or max(1, math.ceil(on_chip_bytes(device) / model.width.input / (4 * problem.shape.head_dim)))


def on_chip_bytes(device: torch.device) -> int:
    """Shared memory of a block of threads, or the second-level cache of a CPU core."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return int(properties.shared_memory_per_block_optin)
    size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    text = size.read_text().strip() if size.is_file() else ""
    return int(text[:-1]) * 1024 if re.fullmatch(r"\d+K", text) else _DEFAULT_CACHE
