"""Matrix products whose running sum has a format of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float

from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import format_of
from numdev.arithmetic.noise import Noise
from numdev.arithmetic.products import product, row_sums
from numdev.arithmetic.rounding import Cast
from numdev.errors import BadInput
from numdev.lazy import torch

Watch = Callable[..., None]  # of three tensors


@dataclass(frozen=True)
class Dot:
    """One matrix product and the format of its running sum.

    Products are formed and added in the carrier; after every `every` of them the running sum is rounded to
    `accumulate`. `every=None` rounds once per tile, which for FP32 and FP64 in their own carrier is the native product.
    `Dot(Cast.parse("e8m13:toward_zero"), 32)` keeps 13 fraction bits and truncates after every 32 products, as tensor cores do.
    """

    accumulate: Cast
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise BadInput("precision.every", self.every, "give the number of products between roundings, at least 1")

    @staticmethod
    def parse(text: str) -> Dot:
        """Read `cast` or `cast@every`: `fp32`, `bf16@64`, `e8m13:toward_zero@32`."""
        cast, at, every = text.partition("@")
        if at and not every.isdigit():
            raise BadInput("dot", text, "after @ comes the number of products between roundings, such as bf16@64")
        return Dot(Cast.parse(cast), int(every) if at else None)

    def __str__(self) -> str:
        return f"{self.accumulate}" if self.every is None else f"{self.accumulate}@{self.every}"

    describe = __str__  # in a configuration

    def __repr__(self) -> str:
        return f"Dot({self})"

    def __call__(
        self,
        a: Float[torch.Tensor, "*batch rows inner"],
        b: Float[torch.Tensor, "*#batch inner columns"],
        noise: Noise | None = None,
    ) -> Float[torch.Tensor, "*batch rows columns"]:
        """`a @ b`. A row of the result depends on that row of `a` and on `b` alone, whatever the number of rows."""
        if self.every is None:
            return self.accumulate.apply_(product(a, b), noise)
        total: torch.Tensor | None = None
        for start in range(0, a.shape[-1], self.every):
            part = product(a[..., start : start + self.every], b[..., start : start + self.every, :])
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
