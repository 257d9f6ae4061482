"""What is measured on: shapes, a mask, a scale, and where q, k and v come from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.attention.mask import Mask
from numdev.errors import BadInput

REPLICATES = 10
"""Draws of a distribution, unless a number is given."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one problem. `kv_heads` below `heads` is grouped-query attention, 1 multi-query attention."""

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    queries: int = 1024
    keys: int = 1024
    head_dim: int = 64

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim"):
            if getattr(self, name) < 1:
                raise BadInput(f"problem.{name}", getattr(self, name), "give a whole number of at least 1")
        if self.heads % self.kv_heads:
            raise BadInput("problem.kv_heads", self.kv_heads, f"it must divide problem.heads, {self.heads}")

    @property
    def packed(self) -> Shape:
        """With one query the heads that share k and v as rows of one head, which is how kernels compute them; else as it is."""
        if self.queries > 1:
            return self
        return replace(self, heads=self.kv_heads, queries=self.heads // self.kv_heads)

    @property
    def q(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.head_dim

    @property
    def kv(self) -> tuple[int, int, int, int]:
        return self.batch, self.kv_heads, self.keys, self.head_dim


@runtime_checkable
class Source(Protocol):
    """Where q, k and v come from: a seeded distribution or captured tensors."""

    def draw(
        self, shape: Shape, scale: float, seed: int
    ) -> tuple[
        Float[Tensor, "batch heads queries dim"],
        Float[Tensor, "batch kv_heads keys dim"],
        Float[Tensor, "batch kv_heads keys dim"],
    ]:
        """q, k, v in FP64 on the CPU, a function of the arguments alone."""
        ...

    def gradient(self, shape: Shape, seed: int) -> Float[Tensor, "batch heads queries dim"] | None:
        """dO of a replicate, in FP64 on the CPU; None where the source has none, and the backward pass draws one."""
        ...

    def mask(self, shape: Shape, **stated: Any) -> Mask:
        """The mask under which the tensors were computed, its fields replaced by those stated; nothing masked for drawn ones."""
        ...

    def scale(self) -> float | None:
        """The scale under which the tensors were computed; None for 1/sqrt(head_dim), and for drawn ones."""
        ...

    def replicates(self, shape: Shape) -> int | None:
        """How many replicates there are; None where any number can be drawn."""
        ...

    def cluster(self, shape: Shape, seed: int) -> str:
        """The group of replicates that are alike to which one belongs, such as a layer; empty where all are independent."""
        ...


_OF_SOURCE = Mask()
"""Stands, by its identity, for the mask of the source."""


@dataclass(frozen=True)
class Problem:
    """One attention problem; `problem.inputs(seed)` draws its replicate.

    Attributes:
        shape: see `Shape`.
        source: see `Source`.
        mask: which keys a query sees; unless given, the mask of the source: that of captured tensors, or none.
        scale: of the scores; unless given, that of captured tensors, or `1/sqrt(head_dim)`.
    """

    source: Source
    shape: Shape = field(default_factory=Shape)
    mask: Mask = _OF_SOURCE
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.mask is _OF_SOURCE:
            object.__setattr__(self, "mask", self.source.mask(self.shape))
        if self.scale is None:
            object.__setattr__(self, "scale", self.source.scale())
        self.mask.check(self.shape.batch, self.shape.keys)
        if self.scale is not None and not 0 < self.scale < float("inf"):
            raise BadInput("problem.scale", self.scale, "give a positive finite factor, or null for 1/sqrt(head_dim)")

    @property
    def softmax_scale(self) -> float:
        return float(self.shape.head_dim**-0.5) if self.scale is None else self.scale

    def inputs(self, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The replicate's `q`, `k`, `v` in FP64: drawn on the CPU, so the same on every device.

        Raises:
            BadInput: if the source cannot serve the shape or the seed, or holds NaN or Inf.
        """
        q, k, v = self.source.draw(self.shape, self.softmax_scale, seed)
        return {"q": q.to(device), "k": k.to(device), "v": v.to(device)}

    def replicates(self, seeds: int | None = None) -> int:
        """How many replicates a measurement has: `seeds` where given, else all that the source has, else `REPLICATES`."""
        return (self.source.replicates(self.shape) or REPLICATES) if seeds is None else seeds

    def cluster(self, seed: int) -> str:
        """See `Source.cluster`."""
        return self.source.cluster(self.shape, seed)

    @property
    def bytes(self) -> int:
        """About what a measurement holds at once: inputs, rounded inputs, golden twice, baseline, state, in FP64."""
        q, k = self.shape.batch * self.shape.heads * self.shape.queries, self.shape.batch * self.shape.kv_heads * self.shape.keys
        return 8 * self.shape.head_dim * (12 * q + 6 * k)

    def arguments(self) -> dict[str, Mask | float]:
        """What an attention takes besides the tensors."""
        return {"mask": self.mask, "scale": self.softmax_scale}
