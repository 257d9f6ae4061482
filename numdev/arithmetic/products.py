"""Matrix products and row sums: in a carrier, in an order that does not depend on the other rows, and rounded on their way.

BLAS specifies no order of summation: it changes with the number of rows, columns and matrices, with the layout, the number of
threads and the vendor of the processor. On a CPU every product is therefore composed of products of one fixed shape: blocks of
`ROWS` rows (the last padded with zeros), sums of 2 to `INNER` products, and a multiple of `COLUMNS` columns; the sums of
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
from dataclasses import dataclass

from jaxtyping import Bool, Float

from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import FP32, format_of
from numdev.arithmetic.rounding import Cast, Noise
from numdev.arithmetic.tensor_cores import Architecture, Unit
from numdev.errors import BadInput
from numdev.lazy import torch

# Rows of a block: so few that no thread of MKL gets a part of it, and a number whose rows all have the same order of summation.
# By AVX2, MKL works on 6 rows at a time; it adds up 2 that are left, as of 32, in another order, and 4, as of 16, in the same.
ROWS = {4: 16, 8: 48}  # by the bytes of a number
INNER, COLUMNS = 64, 16
_LONGEST_SUM = 512  # numbers of a row that torch adds in one pass, whatever the number of rows


def product(
    a: Float[torch.Tensor, "*batch rows inner"], b: Float[torch.Tensor, "*#batch inner columns"]
) -> Float[torch.Tensor, "*batch rows columns"]:
    """`a @ b` in the carrier; `b` has the leading dimensions of `a`, the last of them 1 where matrices of `a` share it."""
    if not a.is_cpu:
        return a @ b
    if a.shape[-1] > INNER and a.shape[-1] % INNER == 1:  # MKL adds one product alone with one rounding or two, by the strides
        a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
    columns, inner = b.shape[-1], a.shape[-1]
    matrices = math.prod(b.shape[:-2])  # each for as many consecutive matrices of a, whose rows it multiplies together
    left = a.reshape(matrices, -1, inner)
    right = torch.nn.functional.pad(b, (0, extra)) if (extra := -columns % COLUMNS) else b
    right = right.reshape(matrices, inner, columns + extra).contiguous()
    height, rows = left.shape[1], ROWS[a.dtype.itemsize]
    whole = height - height % rows
    total = left.new_empty(matrices, height, columns + extra)
    if whole:
        _multiply(left[:, :whole], right, total[:, :whole])
    if whole < height:
        last = torch.nn.functional.pad(left[:, whole:], (0, 0, 0, whole + rows - height))
        block = last.new_empty(matrices, rows, columns + extra)
        _multiply(last, right, block)
        total[:, whole:] = block[:, : height - whole]
    return total[..., :columns].reshape(*a.shape[:-1], columns)


def _multiply(
    a: Float[torch.Tensor, "matrices rows inner"],
    b: Float[torch.Tensor, "matrices inner columns"],
    out: Float[torch.Tensor, "matrices rows columns"],
) -> None:
    """`out = a b` in whole blocks of rows.

    FP64 blocks are multiplied one by one: MKL's batched call changes the order of a block. In FP32 all of one matrix go in one
    call, or one of every matrix, whichever takes fewer calls.
    """
    rows, (inner, columns) = ROWS[a.dtype.itemsize], b.shape[1:]
    blocks = a.shape[1] // rows
    if a.dtype is torch.float32 and len(a) > blocks:
        for left, result in zip(a.split(rows, 1), out.split(rows, 1), strict=True):
            _add_up(left, b, result)
        return
    for one, right, sums in zip(a.unbind(0), b.unbind(0), out.unbind(0), strict=True):
        if a.dtype is torch.float32:
            _add_up(one.reshape(-1, rows, inner), right.expand(blocks, -1, -1), sums.view(-1, rows, columns))
            continue
        # To split what is one block takes as long as to multiply it.
        parts = [(one, sums)] if blocks == 1 else zip(one.split(rows), sums.split(rows), strict=True)
        for left, result in parts:
            _add_up(left, right, result)


def _add_up(
    a: Float[torch.Tensor, "*blocks rows inner"], b: Float[torch.Tensor, "*blocks inner columns"], out: torch.Tensor
) -> None:
    """`out = a b` of one block, or of several with a right operand each: sums of INNER products, each added to those before."""
    multiply, add = (torch.mm, torch.Tensor.addmm_) if a.ndim == 2 else (torch.bmm, torch.Tensor.baddbmm_)
    multiply(a[..., :INNER], b[..., :INNER, :], out=out)
    for start in range(INNER, a.shape[-1], INNER):
        add(out, a[..., start : start + INNER], b[..., start : start + INNER, :])


def whole_blocks(rows: int, carrier: torch.dtype) -> int:
    """About so many rows, at least one block, that fill their blocks and so need no padding."""
    return max(rows // ROWS[carrier.itemsize], 1) * ROWS[carrier.itemsize]


def row_sums(a: Float[torch.Tensor, "*batch rows inner"]) -> Float[torch.Tensor, "*batch rows 1"]:
    """The sum over the last dimension, in pieces so short that torch adds each in one pass."""
    whole = a.shape[-1] // _LONGEST_SUM
    if whole == 0:
        return a.sum(-1, keepdim=True)
    pieces = a[..., : whole * _LONGEST_SUM].unflatten(-1, (whole, _LONGEST_SUM)).sum(-1)
    rest = a[..., whole * _LONGEST_SUM :].sum(-1, keepdim=True)
    return row_sums(torch.cat([pieces, rest], -1))


def visible_product(
    p: Float[torch.Tensor, "*batch rows keys"],
    v: Float[torch.Tensor, "*#batch keys dim"],
    visible: Bool[torch.Tensor, "*#batch rows keys"] | None,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = product,
) -> Float[torch.Tensor, "*batch rows dim"]:
    """`multiply(p, v)`, without the keys that a row does not see: their p is 0, and their v may be NaN or infinite."""
    if visible is None or bool(v.isfinite().all()):
        return multiply(p, v)
    wild = ~v.isfinite().all(-1, keepdim=True)
    total = multiply(p, v.masked_fill(wild, 0.0))
    for key in wild.flatten(0, -3).squeeze(-1).any(0).nonzero().flatten().tolist():
        row = torch.where(wild, v, 0.0)[..., key : key + 1, :]
        total += torch.where(visible[..., key : key + 1], p[..., key : key + 1] * row, 0.0)
    return total


Watch = Callable[..., None]  # of three tensors


@dataclass(frozen=True)
class Dot:
    """One matrix product and the format of its running sum.

    Products are formed and added in the carrier; after every `every` of them the running sum is rounded to
    `accumulate`. `every=None` rounds once per tile, which for FP32 and FP64 in their own carrier is the native product.

    With an architecture its tensor cores multiply and add, to the bit. After every `every` products their sum is promoted: it is
    added to a running sum in FP32, and they begin anew from 0 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
    """

    accumulate: Cast
    every: int | None = None
    architecture: Architecture | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise BadInput("precision.every", self.every, "give the number of products between roundings, at least 1")
        if self.architecture is not None and self.accumulate != Cast(FP32):
            raise BadInput("dot", str(self.accumulate), f"tensor cores add to FP32; give {self.architecture.value} alone")

    @staticmethod
    def parse(text: str) -> Dot:
        """Read `cast`, `cast@every`, `architecture` or `architecture@every`: `fp32`, `bf16@64`, `hopper`, `hopper@128`."""
        cast, at, every = text.partition("@")
        if at and not every.isdigit():
            raise BadInput("dot", text, "after @ comes the number of products between roundings, such as bf16@64")
        architecture = next((each for each in Architecture if each.value == cast), None)
        try:
            accumulate = Cast(FP32) if architecture else Cast.parse(cast)
        except BadInput as error:
            units = ", ".join(each.value for each in Architecture)
            raise BadInput(error.field, error.value, f"{error.hint}; or tensor cores: {units}") from error
        return Dot(accumulate, int(every) if at else None, architecture)

    def __str__(self) -> str:
        name = f"{self.accumulate}" if self.architecture is None else self.architecture.value
        return name if self.every is None else f"{name}@{self.every}"

    describe = __str__  # in a configuration

    def __repr__(self) -> str:
        return f"Dot({self})"

    def __call__(
        self,
        a: Float[torch.Tensor, "*batch rows inner"],
        b: Float[torch.Tensor, "*#batch inner columns"],
        noise: Noise | None = None,
        unit: Unit | None = None,
        start: Float[torch.Tensor, "*batch rows columns"] | None = None,
    ) -> Float[torch.Tensor, "*batch rows columns"]:
        """`a @ b`. A row of the result depends on that row of `a` and on `b` alone, whatever the number of rows.

        `unit` is that of the architecture for the formats of `a` and `b`. With `start` it adds to that, and nothing is promoted.
        """
        assert (unit is None) == (self.architecture is None), "the formats of the factors choose the unit"
        if unit is not None and start is not None:
            return unit(a, b, start)
        multiply = product if unit is None else unit
        if self.every is None:
            return self.accumulate.apply_(multiply(a, b), noise)
        total: torch.Tensor | None = None
        for first in range(0, a.shape[-1], self.every):
            part = multiply(a[..., first : first + self.every], b[..., first : first + self.every, :])
            total = self._add(part, total, noise)
        assert total is not None, "the inner dimension is never empty"
        return total

    def sum(
        self, a: Float[torch.Tensor, "*batch rows inner"], noise: Noise | None = None, watch: Watch | None = None
    ) -> Float[torch.Tensor, "*batch rows 1"]:
        """The sum over the last dimension: the product with a column of ones, without forming it.

        `watch` is called for each addition to a running sum, with the sum before it, what is added, and the sum after it.
        """
        if self.every is None:
            return self.accumulate.apply_(row_sums(a), noise)
        total: torch.Tensor | None = None
        for start in range(0, a.shape[-1], self.every):
            part = row_sums(a[..., start : start + self.every])
            if total is None or watch is None:
                total = self._add(part, total, noise)
            else:
                added = part.clone()
                before, total = total, self._add(part, total, noise)
                watch(before, added, total)
        assert total is not None, "the inner dimension is never empty"
        return total

    def _add(self, part: torch.Tensor, total: torch.Tensor | None, noise: Noise | None) -> torch.Tensor:
        """The running sum with `part`, whose memory it takes, rounded once."""
        if total is None:
            return self.accumulate.apply_(part, noise)
        carrier = format_of(part.dtype)
        return RoundedOnce(Operation.ADD, self.accumulate, carrier, self.accumulate.to, part.dtype)(part, total, noise)
