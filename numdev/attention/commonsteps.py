"""What the forward and the backward pass have in common under a policy: the scores, the exponentials, and the way to round once.

Minus infinity stands for "no number": the score of a key that is not seen, or the maximum or LSE of a row that has seen none. It
is never rounded, saturated or subtracted, and its exponential is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.elementary import RoundedOnce
from numdev.arithmetic.noise import Noise
from numdev.attention.operations import Row, operation

NEVER = float("-inf")
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CommonSteps:
    """What attention does to tensors of one carrier. A method works in the memory of its first argument where it can.

    Attributes:
        precision: the format of each step.
        carrier: the dtype of all tensors.
        noise: where stochastic rounding takes its random numbers; None without it.
    """

    table: ClassVar[Mapping[str, Row]]

    precision: Any
    carrier: torch.dtype
    noise: Noise | None = None

    def at(self, split: int, tile: int, rows: int) -> None:
        """Begin the rounding events of a tile, on a block of rows; see `Noise.at`."""
        if self.noise is not None:
            self.noise.at(split, tile, rows)

    def scores(self, q: Tensor, keys: Tensor, factor: float) -> Tensor:
        """`S = factor Q K^T`."""
        s: Tensor = self.precision.scores(q, keys, self.noise)
        return s if factor == 1.0 else self._do("scale scores", s, factor)

    def exponential(self, s: Tensor, m: Tensor, exp: Function) -> Tensor:
        """`P = exp(S - m)`, 0 where S or m is no number; the backward pass has LSE for m."""
        cast = self.precision.exponential
        never = None if cast.keeps_minus_infinity else s == NEVER
        if never is not None:
            s.masked_fill_(never, 0.0)
        difference = self._do("shift scores", s, m.masked_fill(m == NEVER, 0.0))
        p: Tensor = cast.apply_(exp(difference), self.noise)
        return p if never is None else p.masked_fill_(never, 0.0)

    def _do(self, name: str, x: Tensor, y: Tensor | float) -> Tensor:
        return self._operation(name, y if isinstance(y, float) else 1.0)(x, y, self.noise)

    def _operation(self, name: str, constant: float) -> RoundedOnce:
        """An operation, made when it is first asked for: it is done at every tile."""
        key = name, constant
        if key not in self._known:
            self._known[key] = operation(self.precision, self.carrier, name, constant, self.table)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[str, float], RoundedOnce]:
        return {}
