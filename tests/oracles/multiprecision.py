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


def gradients_by_formula(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float, bits: int = 2000
) -> dict[str, Tensor]:
    """dq, dk, dv by `dS = P * (dP - delta)` in so many bits, and P: for weights so small that no difference quotient shows them.

    2000 bits leave FP64's 53 of a gradient that is 2^-1022 of what cancels, many times over.
    """
    found = {name: torch.zeros(x.shape, dtype=torch.float64) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    found["p"] = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    with workprec(bits):
        for b, h in itertools.product(range(q.shape[0]), range(k.shape[1])):
            k_rows, v_rows = numbers(k[b, h]), numbers(v[b, h])
            dk, dv = ([[mpf(0)] * len(rows[0]) for _ in rows] for rows in (k_rows, v_rows))
            for g, i in itertools.product(range(h * group, (h + 1) * group), range(q.shape[2])):
                (q_row,), (do_row,) = numbers(q[b, g, i : i + 1]), numbers(do[b, g, i : i + 1])
                seen = [j for j in range(len(k_rows)) if sees(mask, b, i, j, q.shape[2], len(k_rows))]
                if not seen:
                    continue
                powers = [mp.exp(mpf(scale) * mp.fdot(q_row, k_rows[j])) for j in seen]
                p = [power / mp.fsum(powers) for power in powers]
                dp = [mp.fdot(do_row, v_rows[j]) for j in seen]
                delta = mp.fdot(p, dp)
                ds = [mpf(scale) * weight * (slope - delta) for weight, slope in zip(p, dp, strict=True)]
                found["p"][b, g, i, seen] = torch.tensor([float(x) for x in p], dtype=torch.float64)
                found["dq"][b, g, i] = torch.tensor(
                    [float(mp.fdot(ds, [k_rows[j][t] for j in seen])) for t in range(q.shape[3])], dtype=torch.float64
                )
                for j, slope, weight in zip(seen, ds, p, strict=True):
                    dk[j] = [x + slope * y for x, y in zip(dk[j], q_row, strict=True)]
                    dv[j] = [x + weight * y for x, y in zip(dv[j], do_row, strict=True)]
            for name, rows in (("dk", dk), ("dv", dv)):
                found[name][b, h] = torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)
    return found
