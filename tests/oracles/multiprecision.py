"""Attention and its gradients in 2000 bits, one number at a time: what the error of the exact passes is measured by."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from mpmath import mp, mpf, workprec
from torch import Tensor

from numdev.attention.mask import Mask
from tests.oracles.double_loop import NEVER, sees


def numbers(matrix: Tensor) -> list[list[mpf]]:
    return [[mpf(x) for x in row] for row in matrix.double().tolist()]


def columns(weights: Sequence[mpf], rows: list[list[mpf]]) -> Tensor:
    """`weights . rows`, each number rounded once to FP64."""
    return torch.tensor([float(mp.fdot(weights, column)) for column in zip(*rows, strict=True)], dtype=torch.float64)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, do: Tensor | None = None, bits: int = 2000
) -> dict[str, Tensor]:
    """out, LSE and P, each correctly rounded to FP64; with `do` also dq, dk, dv and delta, by `dS = P * (dP - delta)`.

    2000 bits leave FP64's 53 of a gradient that is 2^-1022 of what cancels, many times over, and no exponential overflows.
    """
    (batch, heads, queries), (kv_heads, keys) = q.shape[:3], k.shape[1:3]
    sizes = {"out": (*q.shape[:3], v.shape[-1]), "p": (*q.shape[:3], keys), "delta": q.shape[:3], "lse": q.shape[:3]}
    sizes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    exact = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    exact["lse"].fill_(NEVER)
    group = heads // kv_heads
    with workprec(bits):
        for b, h in itertools.product(range(batch), range(kv_heads)):
            k_rows, v_rows = numbers(k[b, h]), numbers(v[b, h])
            met: list[tuple[list[mpf], list[mpf], list[mpf], list[mpf]]] = []  # P and dS of every key, q and dO, of each row
            for g, i in itertools.product(range(h * group, (h + 1) * group), range(queries)):
                seen = [j for j in range(keys) if sees(mask, b, i, j, queries, keys)]
                if not seen:
                    continue
                (q_row,) = numbers(q[b, g, i : i + 1])
                powers = [mp.exp(mpf(scale) * mp.fdot(q_row, k_rows[j])) for j in seen]
                total = mp.fsum(powers)
                p = [mpf(0)] * keys
                for j, power in zip(seen, powers, strict=True):
                    p[j] = power / total
                exact["lse"][b, g, i] = float(mp.log(total))
                exact["p"][b, g, i] = torch.tensor([float(x) for x in p], dtype=torch.float64)
                exact["out"][b, g, i] = columns(p, v_rows)
                if do is not None:
                    (do_row,) = numbers(do[b, g, i : i + 1])
                    dp = [mp.fdot(do_row, row) for row in v_rows]
                    delta = mp.fdot(p, dp)
                    ds = [mpf(scale) * weight * (slope - delta) for weight, slope in zip(p, dp, strict=True)]
                    exact["delta"][b, g, i] = float(delta)
                    exact["dq"][b, g, i] = columns(ds, k_rows)
                    met.append((p, ds, q_row, do_row))
            for j in range(keys if met else 0):
                exact["dk"][b, h, j] = columns([ds[j] for _, ds, _, _ in met], [row for _, _, row, _ in met])
                exact["dv"][b, h, j] = columns([p[j] for p, _, _, _ in met], [row for _, _, _, row in met])
    return exact
