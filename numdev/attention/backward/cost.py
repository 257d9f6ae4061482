"""The cost model of the backward pass: operations, and bytes moved between a processor's memory and its on-chip memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from numdev.attention import cost
from numdev.attention.cost import Algorithm, Cost, CostModel
from numdev.attention.problem import Problem

_WIDE = 4  # bytes of LSE, delta and the running sum of dQ, which kernels keep in FP32


@dataclass(frozen=True)
class BackwardCostModel:
    """What an implementation of the backward pass declares for the model.

    Attributes:
        model: as of a forward pass; its `br` is the number of rows in a tile of queries.
        bc: keys in a tile of keys; None is as many as `br`.
        recomputes_twice: whether a second pass over all tiles computes dQ, keeps it on the chip and computes P again. Without it,
            a tile of keys meets all tiles of queries, and each meeting reads and writes the running sum of dQ.
        stores_first: whether the first tile of keys that a row meets stores its share of dQ instead of adding it to a sum.
        scales_lse: whether the step that computes delta also reads LSE, and writes it in the units of a binary exponential.
    """

    model: CostModel
    bc: int | None = None
    recomputes_twice: bool = False
    stores_first: bool = False
    scales_lse: bool = False


def operations(problem: Problem) -> int:
    """`10 d` for each visible pair of each head: a product and a sum in each of `Q K^T`, `dO V^T`, `P^T dO`, `dS^T Q`, `dS K`.

    `Q K^T` is counted although an implementation that stores P does not compute it: this is the usual count
    (Dao 2023, section 4.1, 2.5 times the forward pass).
    """
    return 5 * cost.operations(problem) // 2


def cost_of(problem: Problem, declared: BackwardCostModel, device: torch.device) -> Cost:
    """The cost of a backward pass by the model of an implementation, on a device."""
    model = declared.model
    if model.algorithm is Algorithm.VANILLA:
        return Cost(model.algorithm, vanilla_bytes(problem, model), 0)
    br = cost.rows_of_tile(problem, model, device)
    return Cost(model.algorithm, tiled_bytes(problem, declared, br, declared.bc or br), br)


def vanilla_bytes(problem: Problem, model: CostModel) -> float:
    """Autograd of matmul, softmax, matmul: it reads and writes all scores seven times, nine times under a mask.

    `dV = P^T dO` reads P; `dP = dO V^T` is written; softmax's gradient reads P and dP and writes dS; a mask reads and writes dS;
    `dQ = dS K` and `dK = dS^T Q` read dS. dO is read twice, q, k and v once, dQ, dK and dV are written.
    """
    shape, each = problem.shape, model.width
    q, kv = math.prod(shape.q), math.prod(shape.kv)
    scores = shape.batch * shape.heads * shape.queries * shape.keys
    return each.input * (3 * q + 2 * kv + (7 if problem.mask.is_none else 9) * scores) + each.output * (q + 2 * kv)


def tiled_bytes(problem: Problem, declared: BackwardCostModel, br: int, bc: int) -> float:
    """Dao 2023, Algorithm 2: delta, then for each tile of keys every row that sees any of its keys.

    - Computing delta reads O and dO and writes one number per row; it may also read LSE and write it in other units.
    - A tile of keys reads its k and v, and q, dO, LSE and delta of each row that it meets.
    - dQ is read and written in FP32 at each meeting (at a row's first meeting perhaps only written), and then converted. Or a
      second pass computes it: a tile of queries reads its q, dO, LSE and delta, and the k and v that any of its rows sees.
    - dQ, dK and dV are written.

    Every query head reads the KV head that it shares.
    """
    shape, each = problem.shape, declared.model.width
    q, kv, rows = math.prod(shape.q), math.prod(shape.kv), shape.batch * shape.heads * shape.queries
    keys, met, seeing = (shape.heads * count for count in _meetings(problem, bc))
    of_row = 2 * shape.head_dim * each.input + 2 * _WIDE  # q, dO, LSE, delta
    moved = each.input * (2 * q + 2 * shape.head_dim * keys) + _WIDE * rows + of_row * met + each.output * (q + 2 * kv)
    moved += 2 * _WIDE * rows if declared.scales_lse else 0
    if declared.recomputes_twice:
        return moved + of_row * rows + each.input * 2 * shape.head_dim * shape.heads * cost.keys_of_tiles(problem, br)
    return moved + _WIDE * (shape.head_dim * (2 * met - (seeing if declared.stores_first else 0)) + q)


def _meetings(problem: Problem, bc: int) -> tuple[int, int, int]:
    """Keys in tiles that some row sees; pairs of such a tile and a row between its first and last; rows in at least one pair."""
    shape, mask = problem.shape, problem.mask
    keys = met = seeing = 0
    for length in mask.lengths(shape.batch, shape.keys):
        rows = []
        for start in range(0, length, bc):
            stop = min(start + bc, length)
            first, last = mask.query_range(shape.queries, shape.keys, start, stop)
            if first < last:
                keys, met = keys + stop - start, met + last - first
                rows += [first, last]
        seeing += max(rows, default=0) - min(rows, default=0)
    return keys, met, seeing
