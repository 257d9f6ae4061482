"""The softmax of each row, `p = exp(x - m) / l`: an operation of one file, outside of the package."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from numdev import BadInput, Cast, Dot, Format
from numdev.arithmetic.elementary import Operation as Elementary
from numdev.arithmetic.formats import FP64
from numdev.measurement.operation import Inputs, Operation, Output, Result
from numdev.operations.base import Emulated, Entries, InDtype, Seeded, Steps, columns
from numdev.settings import held, setting


@dataclass(frozen=True)
class Problem(Seeded):
    """x `[rows, columns]`."""

    rows: int = setting(256, "rows of x", "count")
    columns: int = setting(1024, "columns of x", "count")
    kind: Entries = setting(Entries.NORMAL, "entries of x: normal, uniform in [0, 1), or normal with outliers")

    @property
    def largest(self) -> int:
        return self.rows * self.columns

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"x": self.kind.draw(generator, self.rows, self.columns)}

    def naive(self, fmt: Format) -> Eager:
        return Eager(fmt)


@dataclass(frozen=True, repr=False)
class Policy(Steps):
    """One Cast or Dot for each step."""

    inputs: Cast = setting(None, "x as the algorithm receives it", "format")
    exponential: Cast = setting(None, "x - m, then exp", "format")
    sum: Dot = setting(None, "l, the running sum of the exponentials", "format")
    output: Cast = setting(None, "p", "format")


@dataclass(frozen=True)
class Blocked(Emulated):
    """Exponentials are summed in blocks of columns, in FP64, before the running sum is rounded; each step under a policy."""

    precision: Policy = held(follows="precision")
    block: int = setting(256, "columns that are summed before the running sum is rounded", "count")

    def __post_init__(self) -> None:
        if self.block < 1:
            raise BadInput("variant.block", self.block, "give the number of columns, at least 1")

    @property
    def formats(self) -> dict[str, Format]:
        return {"p": self.precision.format, "lse": self.precision.sum.accumulate.to}

    def __call__(self, x: Tensor) -> Result:
        policy, m = self.precision, x.amax(-1, keepdim=True)
        exponentials = policy.exponential(policy.do(Elementary.SUBTRACT, "exponential", x, m).exp())
        first, *others = exponentials.split(self.block, -1)
        total = policy.sum.sum(first)
        for part in others:
            total = policy.do(Elementary.ADD, "sum", total, policy.sum.sum(part))
        return Result({"p": policy.do(Elementary.DIVIDE, "output", exponentials, total), "lse": m + total.log()})


class Eager(InDtype):
    """Torch's softmax in the format; golden is that in FP64."""

    OUTPUTS = ("p", "lse")

    def __call__(self, x: Tensor) -> Result:
        return Result({"p": x.to(self.dtype).softmax(-1), "lse": x.to(self.dtype).logsumexp(-1, keepdim=True)})


SOFTMAX = Operation(
    name="rows",
    golden=Eager(FP64),
    inputs=(Inputs(("x",)),),
    outputs=(Output("p", "the softmax of each row"), Output("lse", "log of the sum of the exponentials of a row")),
    steps=tuple(field.name for field in fields(Policy)),
    settings=columns(Problem, Policy, Blocked),
    smaller="fewer rows or columns",
)
