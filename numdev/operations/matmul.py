"""The matrix product `c = a b`, whose inner dimension is split, walked in tiles, and added up in an accumulator.

The rows and columns of a tile change no bit of a sum; the order in which its products are added does. It is a policy: `product`,
the running sum within a split, rounded after every tile of so many products or added by the tensor cores of an architecture
(`precision.product=fp32@64`, `bf16@16`, `hopper@128`); `partial`, the sum of a split as it is stored; `combine`, their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from numdev.arithmetic.elementary import Operation as Elementary
from numdev.arithmetic.formats import BF16, E4M3FN, FP64, Format
from numdev.arithmetic.products import Dot
from numdev.arithmetic.rounding import Cast
from numdev.errors import BadInput, Unsupported
from numdev.measurement.operation import Cost, Inputs, Operation, Output, Result, Workload
from numdev.operations.base import Compiled, Emulated, Entries, InDtype, Seeded, Steps, columns, jit, power_of_two
from numdev.settings import held, setting

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class Problem(Seeded):
    """a `[m, k]` and b `[k, n]`."""

    m: int = setting(128, "rows of a", "count")
    n: int = setting(128, "columns of b", "count")
    k: int = setting(4096, "products of a sum", "count")
    kind: Entries = setting(Entries.NORMAL, "entries of a and b: normal, uniform in [0, 1), or normal with outliers")

    @property
    def largest(self) -> int:
        return max(self.m * self.k, self.k * self.n, self.m * self.n)

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"a": self.kind.draw(generator, self.m, self.k), "b": self.kind.draw(generator, self.k, self.n)}

    def naive(self, fmt: Format) -> Torch:
        return Torch(fmt)


@dataclass(frozen=True, repr=False)
class Policy(Steps):
    """One Cast or Dot for each step; a `kernel` stores inputs and c in its format, all else is in FP32."""

    factors = {"product": ("inputs", "inputs")}  # noqa: RUF012

    inputs: Cast = setting(None, "a and b as the algorithm receives them", "format")
    product: Dot = setting(
        None, "the running sum of a split; behind `@`, the products of a tile, after which it is rounded or promoted", "format"
    )
    partial: Cast = setting(None, "the sum of a split as it is stored; not rounded where there is one split", "format")
    combine: Cast = setting(None, "the running sum of the splits", "format")
    output: Cast = setting(None, "c as it is returned", "format")


class Order(Enum):
    """How the sums of splits are added: one after the other, pair by pair, or in a random order of arrival, by the seed."""

    FORWARD = "forward"
    PAIRS = "pairs"
    ARRIVAL = "arrival"


@dataclass(frozen=True)
class SplitK(Emulated):
    """`splits` contiguous ranges of the inner dimension, whose sums are added up; each step under a policy."""

    precision: Policy = held(follows="precision")
    splits: int = setting(1, "contiguous ranges of products that are summed apart", "count")
    order: Order = setting(Order.FORWARD, "in which the sums of splits are added: forward, pairs, or arrival, a random one")
    seed: int = 0  # of the random order: that of the replicate

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise BadInput("variant.splits", self.splits, "give a whole number of at least 1")
        if self.order is not Order.FORWARD and self.splits < 3:
            raise BadInput("variant.order", self.order.value, "two sums have one order; give at least 3 splits")

    def replicate(self, seed: int) -> SplitK:
        """The order of arrival of another launch."""
        return replace(self, seed=seed) if self.order is Order.ARRIVAL else self

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.precision.carrier

    @property
    def formats(self) -> dict[str, Format]:
        return {"c": self.precision.format}

    def __call__(self, a: Tensor, b: Tensor) -> Result:
        policy, size = self.precision, math.ceil(a.shape[-1] / self.splits)
        unit = policy.units.get("product")
        sums = [policy.product(x, y, unit=unit).double() for x, y in zip(a.split(size, 1), b.split(size, 0), strict=True)]
        if len(sums) > 1:
            sums = [policy.partial(each) for each in sums]
        if self.order is Order.ARRIVAL:
            order = torch.randperm(len(sums), generator=torch.Generator().manual_seed(self.seed)).tolist()
            sums = [sums[i] for i in order]
        while len(sums) > 1:
            pairs = zip(sums[::2], sums[1::2], strict=False) if self.order is Order.PAIRS else [(sums[0], sums[1])]
            added = [policy.do(Elementary.ADD, "combine", x, y) for x, y in pairs]
            sums = added + (sums[2 * len(added) :])
        return Result({"c": policy.output(sums[0])})


class Call(Enum):
    """Torch's product that is called."""

    MM = "mm"
    BMM = "bmm"
    EINSUM = "einsum"
    VECTORS = "vectors"
    SCALED = "scaled"


@dataclass(frozen=True)
class Torch(InDtype):
    """Torch's matrix product; golden is that in FP64."""

    OUTPUTS = ("c",)
    FORMATS = (*InDtype.FORMATS, E4M3FN)

    call: Call = setting(
        Call.MM, "which of torch's products: mm, bmm, einsum, vectors (a product for each row), or scaled, FP8 on a GPU"
    )
    splits: int = setting(
        1, "contiguous ranges of products, whose sums in FP32 are added up; of several all but c is in FP32", "count"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits < 1 or (self.splits > 1 and self.call is not Call.MM):
            raise BadInput("variant.splits", self.splits, "give a whole number of at least 1, and 1 beside another call than mm")
        if (self.format.bits == 8) is not (self.call is Call.SCALED):
            raise BadInput("variant.call", self.call.value, "scaled multiplies e4m3fn, and the others fp64, fp32, bf16 or fp16")

    @property
    def formats(self) -> dict[str, Format]:
        return {"c": BF16 if self.call is Call.SCALED else self.format}

    def __call__(self, a: Tensor, b: Tensor) -> Result:
        if self.call is Call.SCALED:
            if not a.is_cuda:
                raise Unsupported("variant.call", "scaled products of FP8 are measured on a GPU; use device=cuda")
            one, columns = torch.ones((), device=a.device), b.mT.contiguous().mT  # cuBLAS takes columns
            return Result({"c": torch._scaled_mm(a, columns, one, one, out_dtype=torch.bfloat16)}, kernel="torch _scaled_mm")
        a, b = a.to(self.dtype), b.to(self.dtype)
        if self.splits > 1:
            wide = torch.promote_types(self.dtype, torch.float32)
            size = math.ceil(a.shape[-1] / self.splits)
            sums = [x.to(wide) @ y.to(wide) for x, y in zip(a.split(size, 1), b.split(size, 0), strict=True)]
            return Result({"c": sum(sums[1:], sums[0]).to(self.dtype)}, kernel=f"torch mm splits={self.splits}")
        c = {
            Call.MM: lambda: a @ b,
            Call.BMM: lambda: torch.bmm(a[None], b[None])[0],
            Call.EINSUM: lambda: torch.einsum("mk,kn->mn", a, b),
            Call.VECTORS: lambda: torch.stack([row @ b for row in a]),
        }[self.call]()
        return Result({"c": c}, kernel=f"torch {self.call.value}")


@jit
def _matmul(
    a_ptr: tl.tensor, b_ptr: tl.tensor, c_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, k: tl.tensor, size: tl.tensor,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(split * size, tl.minimum(split * size + size, k), BK):
        inner = start + tl.arange(0, BK)
        inside = inner < k  # splits are whole blocks
        a = tl.load(a_ptr + rows[:, None] * k + inner[None, :], mask=(rows < m)[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_ptr + inner[:, None] * n + columns[None, :], mask=inside[:, None] & (columns < n)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = c_ptr + split * m * n + rows[:, None] * n + columns[None, :]
    tl.store(place, total.to(c_ptr.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@dataclass(frozen=True)
class Triton(Compiled):
    """A Triton kernel with FP32 accumulators; the sums of splits are stored in FP32 and added up in their order."""

    OUTPUTS = ("c",)

    br: int = setting(32, "rows of a tile of c, a power of two", "count")
    bc: int = setting(32, "columns of a tile of c, a power of two", "count")
    bk: int = setting(64, "products that a program loads at once, a power of two", "count")
    splits: int = setting(1, "contiguous ranges of products, each summed by a program of its own", "count")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("br", "bc", "bk"):
            power_of_two(name, getattr(self, name))
        if self.splits < 1:
            raise BadInput("variant.splits", self.splits, "give a whole number of at least 1")

    def __call__(self, a: Tensor, b: Tensor) -> Result:
        (m, k), n = a.shape, b.shape[1]
        size = math.ceil(math.ceil(k / self.splits) / self.bk) * self.bk
        splits = math.ceil(k / size)
        sums = a.new_empty(splits, m, n, dtype=torch.float32)
        _matmul(a)[(math.ceil(m / self.br), math.ceil(n / self.bc), splits)](a, b, sums, m, n, k, size, self.br, self.bc, self.bk)
        c = sums[0]
        for each in sums[1:]:
            c = c + each
        return Result({"c": self.stored(c)}, kernel=f"triton matmul {self.br}x{self.bc}x{self.bk} splits={splits}")


@dataclass(frozen=True)
class Products(Workload):
    """Counts two operations for each product."""

    def cost(self, problem: Problem, variant: Any, output: Any, device: torch.device) -> Cost:
        return Cost(2 * problem.m * problem.n * problem.k)


MATMUL = Operation(
    name="matmul",
    golden=Torch(FP64),
    inputs=(Inputs(("a", "b")),),
    outputs=(Output("c", "a b"),),
    rows={"a": 0, "c": 0},
    steps=tuple(field.name for field in fields(Policy)),
    settings=columns(Problem, Policy, SplitK, Torch, Triton),
    workload=Products(),
    smaller="smaller problem.m, problem.n or problem.k",
)
