"""Attention and its gradients in 200 bits and more, one number at a time: what the error of the exact passes is measured by."""

from __future__ import annotations

import itertools

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


def gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv by central differences of `sum(dO * O)`, and delta, its part of each row; each to more than FP64.

    With a step of `2^-50` in 400-bit arithmetic the quotient is off by the third derivative times `2^-101`, and by rounding of
    `2^-350`: both are far below FP64's `2^-53`. No formula of the backward pass is used.
    """
    step = mpf(2) ** -50
    with workprec(2 * BITS):
        rows = [[[numbers(x[b, h]) for h in range(x.shape[1])] for b in range(x.shape[0])] for x in (q, k, v, do)]
        found = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
        for which, gradient in enumerate(found):
            for place in itertools.product(*map(range, gradient.shape)):
                b, h, i, t = place
                line = rows[which][b][h][i]
                kept, at = line[t], []
                for sign in (1, -1):
                    line[t] = kept + sign * step
                    at.append(mp.fsum(_parts(rows, mask, scale, b)))
                line[t] = kept
                gradient[place] = float((at[0] - at[1]) / (2 * step))
        delta = torch.tensor([[float(x) for x in _parts(rows, mask, scale, b)] for b in range(q.shape[0])], dtype=torch.float64)
    return found[0], found[1], found[2], delta.reshape(q.shape[:3])


def _parts(rows: list[list[list[list[list[mpf]]]]], mask: Mask, scale: float, b: int) -> list[mpf]:
    """`sum_t dO_it O_it` of every row of every head of one batch entry, 0 for a row that sees no key."""
    q, k, v, do = (x[b] for x in rows)
    group, parts = len(q) // len(k), []
    for h, (q_rows, do_rows) in enumerate(zip(q, do, strict=True)):
        k_rows, v_rows = k[h // group], v[h // group]
        for i, (q_row, do_row) in enumerate(zip(q_rows, do_rows, strict=True)):
            seen = [j for j in range(len(k_rows)) if sees(mask, b, i, j, len(q_rows), len(k_rows))]
            exponentials = [mp.exp(mpf(scale) * mp.fdot(q_row, k_rows[j])) for j in seen]
            weighed = [mp.fdot(do_row, v_rows[j]) for j in seen]
            parts.append(mp.fdot(exponentials, weighed) / mp.fsum(exponentials) if seen else mpf(0))
    return parts
