"""Attention in 200-bit arithmetic, one number at a time: what Exact's own error is measured against."""

from __future__ import annotations

import torch
from mpmath import mp, mpf, workprec
from torch import Tensor

from numdev.attention.mask import Mask
from tests.oracles.double_loop import sees

BITS = 200


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """out `[batch, heads, queries, dim]` and LSE `[batch, heads, queries]`, each correctly rounded to FP64."""
    batch, heads, queries, _ = q.shape
    group, keys = heads // k.shape[1], k.shape[2]
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), float("-inf"), dtype=torch.float64)
    with workprec(BITS):
        for b in range(batch):
            for h in range(heads):
                k_rows, v_rows = numbers(k[b, h // group]), numbers(v[b, h // group])
                for i, q_row in enumerate(numbers(q[b, h])):
                    seen = [j for j in range(keys) if sees(mask, b, i, j, queries, keys)]
                    scores = [mpf(scale) * mp.fdot(q_row, k_rows[j]) for j in seen]
                    if not scores:
                        continue
                    exponentials = [mp.exp(score) for score in scores]  # 200 bits have no overflow to avoid
                    total = mp.fsum(exponentials)
                    lse[b, h, i] = float(mp.log(total))
                    for t in range(v.shape[-1]):
                        column = [v_rows[j][t] for j in seen]
                        out[b, h, i, t] = float(mp.fdot(exponentials, column) / total)
    return out, lse


def numbers(matrix: Tensor) -> list[list[mpf]]:
    return [[mpf(x) for x in row] for row in matrix.double().tolist()]
