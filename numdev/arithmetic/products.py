"""Matrix products and row sums in a carrier, in an order of summation that does not depend on the other rows.

BLAS specifies no order of summation: it changes with the number of rows, columns and matrices, with the layout, the number of
threads and the vendor of the processor. On a CPU every product is therefore composed of products of one fixed shape: blocks of
`ROWS` rows (the last padded with zeros), sums of at most `INNER` products, and a multiple of `COLUMNS` columns; the sums of
blocks are added in order. BLAS then gets the same call for a row whatever else is computed, and a row's result depends only on
that row and on the right operand.

This construction guarantees, and tests verify on several of MKL's code paths: a row's bits do not depend on the other rows,
heads or batch entries, in FP32 and FP64; equal columns give equal results in FP32. In FP64 equal columns may differ within the
bound of a sum in any order, `gamma_n |a| |b|` with `gamma_n = n u / (1 - n u)` (Higham 2002, section 3.1), because on AMD
processors MKL adds them in different orders. On a GPU, where blocks would be slow, the library chooses the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ROWS, INNER, COLUMNS = 32, 64, 16
_LONGEST_SUM = 512  # numbers of a row that torch adds in one pass, whatever the number of rows


def product(
    a: Float[Tensor, "*batch rows inner"], b: Float[Tensor, "*#batch inner columns"]
) -> Float[Tensor, "*batch rows columns"]:
    """`a @ b` in the carrier; `b` has the leading dimensions of `a`, the last of them 1 where matrices of `a` share it."""
    if not a.is_cpu:
        return a @ b
    columns, inner = b.shape[-1], a.shape[-1]
    matrices = math.prod(b.shape[:-2])  # each for as many consecutive matrices of a, whose rows it multiplies together
    left = a.reshape(matrices, -1, inner)
    height = left.shape[1]
    if missing := -height % ROWS:
        left = torch.nn.functional.pad(left, (0, 0, 0, missing))
    right = torch.nn.functional.pad(b, (0, extra)) if (extra := -columns % COLUMNS) else b
    right = right.reshape(matrices, inner, columns + extra).contiguous()
    total = left.new_empty(matrices, height + missing, columns + extra)
    blocks = (height + missing) // ROWS
    if matrices <= blocks or a.dtype is not torch.float32:
        for one, other, out in zip(left.unbind(0), right.unbind(0), total.unbind(0), strict=True):
            _blocks(one, other, out)
    else:  # the same calls of BLAS, a block of every matrix at a time
        for start in range(0, height + missing, ROWS):
            rows = slice(start, start + ROWS)
            total[:, rows] = _of_each(left[:, rows], right)
    return total[:, :height, :columns].reshape(*a.shape[:-1], columns)


def _blocks(a: Float[Tensor, "rows inner"], b: Float[Tensor, "inner columns"], out: Float[Tensor, "rows columns"]) -> None:
    """`out = a b` by blocks; rows and columns are multiples of the fixed shape."""
    for start in range(0, a.shape[1], INNER):
        cut = slice(start, start + INNER)
        if start == 0:
            _fixed(a[:, cut], b[cut], out)
        else:
            out += _fixed(a[:, cut], b[cut], torch.empty_like(out))


def _of_each(a: Float[Tensor, "matrices rows inner"], b: Float[Tensor, "matrices inner columns"]) -> Tensor:
    """`a b` of one block of ROWS rows of each matrix, in FP32."""
    cuts = [slice(start, start + INNER) for start in range(0, a.shape[2], INNER)]
    total = torch.bmm(a[..., cuts[0]].contiguous(), b[:, cuts[0]])
    for cut in cuts[1:]:
        total += torch.bmm(a[..., cut].contiguous(), b[:, cut])
    return total


def _fixed(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Sums of at most INNER products. FP64 blocks are multiplied one by one: MKL's batched call changes the order of a block."""
    blocks, results = a.contiguous().view(-1, ROWS, a.shape[1]), out.view(-1, ROWS, out.shape[1])
    if a.dtype is torch.float32:
        torch.bmm(blocks, b.expand(blocks.shape[0], *b.shape), out=results)
    else:
        for block, result in zip(blocks.unbind(0), results.unbind(0), strict=True):
            torch.mm(block, b, out=result)
    return out


def row_sums(a: Float[Tensor, "*batch rows inner"]) -> Float[Tensor, "*batch rows 1"]:
    """The sum over the last dimension, in pieces so short that torch adds each in one pass."""
    whole = a.shape[-1] // _LONGEST_SUM
    if whole == 0:
        return a.sum(-1, keepdim=True)
    pieces = a[..., : whole * _LONGEST_SUM].unflatten(-1, (whole, _LONGEST_SUM)).sum(-1)
    rest = a[..., whole * _LONGEST_SUM :].sum(-1, keepdim=True)
    return row_sums(torch.cat([pieces, rest], -1))


def visible_product(
    p: Float[Tensor, "*batch rows keys"],
    v: Float[Tensor, "*#batch keys dim"],
    visible: Bool[Tensor, "*#batch rows keys"] | None,
    multiply: Callable[[Tensor, Tensor], Tensor] = product,
) -> Float[Tensor, "*batch rows dim"]:
    """`multiply(p, v)`, without the keys that a row does not see: their p is 0, and their v may be NaN or infinite."""
    if visible is None or bool(v.isfinite().all()):
        return multiply(p, v)
    wild = ~v.isfinite().all(-1, keepdim=True)
    total = multiply(p, v.masked_fill(wild, 0.0))
    for key in wild.flatten(0, -3).squeeze(-1).any(0).nonzero().flatten().tolist():
        row = torch.where(wild, v, 0.0)[..., key : key + 1, :]
        total += torch.where(visible[..., key : key + 1], p[..., key : key + 1] * row, 0.0)
    return total
