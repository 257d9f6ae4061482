"""Sums, differences, products and quotients that are rounded to a format once, in any mode.

The carrier rounds the exact result, and the cast rounds it again. This double rounding is innocuous for rounding to nearest if
the operands have `p` bits and the carrier at least `2p + 2` (Figueroa 1995), or if the carrier's result is exact. In all other
cases (directed modes, operands wider than the format, formats that the carrier barely holds) an error-free transformation gives
the carrier's result `s` and the exact remainder `e`; where `e` is not 0, `s` is moved to its neighbour with an odd last bit
(round to odd). Rounding that number to at most `q - 2` of its `q` bits gives the same as rounding the exact result, in every
mode (Boldo & Melquiond 2008, Theorem 1). For stochastic rounding `s` moves towards `e` with a probability of `|e|` divided by
the distance to the neighbour, which preserves the expectation.

Sums: TwoSum (Knuth 1997, section 4.2.2, Theorem B). Products: exact in FP64 for FP32 operands, TwoProduct by Dekker's
splitting (1971) for FP64. Quotients: in FP64 for FP32 operands, since no quotient of two 24-bit numbers is nearer to another
24-bit number or to a tie of two than `2^-50` relative; for FP64 by the exact remainder `a - s b`.

Limits: an FP64 product below `2^-960` loses its remainder, unless that is 0. An FP32 product below `2^-126` whose operands are so
narrow that it would otherwise be exact is first rounded to a multiple of `2^-149`; in a format with the exponent range of FP32
this can move the result by one subnormal number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from numdev.arithmetic.formats import Format, format_of
from numdev.arithmetic.rounding import Cast, Noise, Rounding, is_odd, toward
from numdev.lazy import torch

_SPLITTER = 2.0**27 + 1.0  # Dekker's, for 53 bits


class Operation(Enum):
    """An elementary operation of two operands."""

    ADD = "add"
    SUBTRACT = "subtract"
    MULTIPLY = "multiply"
    DIVIDE = "divide"


Operand = Format | float  # a number of a format, or a constant


@dataclass(frozen=True)
class RoundedOnce:
    """`cast(x o y)` with one rounding of the exact result."""

    operation: Operation
    cast: Cast  # the format and mode of the result
    left: Operand  # the format or constant of the first operand; the carrier must hold it
    right: Operand  # likewise of the second
    carrier: torch.dtype  # of the operands

    @cached_property
    def is_harmless(self) -> bool:
        """Whether the carrier's own operation, then the cast, rounds as if once."""
        bits = format_of(self.carrier).precision
        if self.cast.is_identity_on(self.carrier):
            return True
        left, right = (min(_bits(operand), bits) for operand in (self.left, self.right))
        if self.operation is Operation.MULTIPLY and left + right <= bits:
            return True
        if self.cast.to.listing is not None:
            return False
        p = self.cast.to.precision
        if not self.cast.rounding.is_nearest or max(left, right) > p or 2 * p + 2 > bits:
            return False
        # The operands of a sum must not lie between two subnormal numbers of the format either.
        additive = self.operation in (Operation.ADD, Operation.SUBTRACT)
        return not additive or all(isinstance(x, Format) and self.cast.to.covers(x) for x in (self.left, self.right))

    def __call__(self, x: torch.Tensor, y: torch.Tensor | float, noise: Noise | None = None) -> torch.Tensor:
        """The result, in the memory of `x`, whose shape it has."""
        if self.operation is Operation.DIVIDE:  # CUDA divides by a number as it multiplies by its rounded reciprocal
            y = _operand(y, x)
        if self.is_harmless:
            return self.cast.apply_(_NATIVE[self.operation](x, y), noise)
        noise = noise or Noise()  # one for both draws of a stochastic rounding, which must differ
        s, e = _with_rest(self.operation, x, _operand(y, x))
        return self.cast.apply_(x.copy_(self._settle(s, e, noise)), noise)

    def _settle(self, s: torch.Tensor, e: torch.Tensor, noise: Noise) -> torch.Tensor:
        """`s` or its neighbour towards `e`, so that rounding it again rounds `s + e`."""
        inexact = (e != 0) & s.isfinite() & e.isfinite()
        neighbour = toward(s, e)
        if self.cast.rounding is Rounding.STOCHASTIC:
            bits = noise.uniform(s, self.cast.seed)
            moves = bits < e.abs() / (neighbour - s).abs()
        else:
            moves = ~is_odd(s)
        return torch.where(inexact & moves, neighbour, s)


def _bits(operand: Operand) -> int:
    """Significant bits of a format's numbers, or the bits that a constant adds to a product: none if it is a power of two."""
    if isinstance(operand, Format):
        return operand.precision
    numerator, _ = math.frexp(operand)[0].as_integer_ratio()
    return 0 if abs(numerator) == 1 else abs(numerator).bit_length()


def _operand(y: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    """`y` as a tensor beside `x`; a number is filled in there and not copied, so that a CUDA graph can hold it."""
    return y.to(x) if isinstance(y, torch.Tensor) else torch.full((), y, dtype=x.dtype, device=x.device)


def _with_rest(operation: Operation, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The carrier's result and the remainder to the exact one; finite operands give infinity only for a divisor of 0."""
    s, e = _EXACT[operation](x, y)
    ended = s.isinf() & x.isfinite() & y.isfinite()
    if operation is Operation.DIVIDE:
        ended &= y != 0
    top = format_of(s.dtype).max  # beyond it round to odd gives the largest number, whose last bit is odd
    return torch.where(ended, torch.full_like(s, top).copysign(s), s), torch.where(ended, 0.0, e)


def _two_sum(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = x + y
    part = s - x
    return s, (x - (s - part)) + (y - part)


def _two_product(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dtype is torch.float32:
        return _narrowed(x.double() * y.double())
    s = x * y
    x_high, y_high = _high(x), _high(y)
    x_low, y_low = x - x_high, y - y_high
    e = ((x_high * y_high - s) + x_high * y_low + x_low * y_high) + x_low * y_low
    lost = (s == 0) & (x != 0) & (y != 0)
    tiny = torch.full_like(s, format_of(s.dtype).min_subnormal).copysign(s)
    return s, torch.where(lost, tiny, e)


def _quotient(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dtype is torch.float32:
        return _narrowed(x.double() / y.double())
    s = x / y
    high, low = _two_product(s, y.expand_as(s))
    return s, ((x - high) - low) / y


def _narrowed(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP64 tensor rounded to FP32, and the remainder in FP64: in FP32 the remainder of a small number would underflow."""
    s = wide.float()
    return s, wide - s.double()


def _high(x: torch.Tensor) -> torch.Tensor:
    """The upper 26 bits of each number; those above `2^990` are split at a smaller scale."""
    large = x.abs() > 2.0**990
    scaled = torch.where(large, x * 2.0**-30, x)
    product = scaled * _SPLITTER
    high = product - (product - scaled)
    return torch.where(large, high * 2.0**30, high)


_NATIVE = {
    Operation.ADD: lambda x, y: x.add_(y),
    Operation.SUBTRACT: lambda x, y: x.sub_(y),
    Operation.MULTIPLY: lambda x, y: x.mul_(y),
    Operation.DIVIDE: lambda x, y: x.div_(y),
}
_EXACT = {
    Operation.ADD: _two_sum,
    Operation.SUBTRACT: lambda x, y: _two_sum(x, -y),
    Operation.MULTIPLY: _two_product,
    Operation.DIVIDE: _quotient,
}
