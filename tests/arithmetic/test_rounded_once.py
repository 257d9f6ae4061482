"""Operations that round once, against rational arithmetic: every operation and mode, wide operands, gaps beyond the carrier."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, TF32, Format, format_of
from numdev.arithmetic.rounding import Cast, Overflow, Rounding
from tests.oracles.table import round_exactly

CARRIERS = [torch.float32, torch.float64]
DETERMINISTIC = [mode for mode in Rounding if mode is not Rounding.STOCHASTIC]
TARGETS = {
    torch.float32: [BF16, FP16, TF32, E4M3FN, E5M2, Format(8, 13), Format(8, 21)],
    torch.float64: [BF16, FP16, FP32, Format(11, 20), Format(11, 50)],
}
COUNT = 64


def numbers(fmt: Format, spread: int, seed: int, carrier: torch.dtype) -> Tensor:
    """Numbers of a format with full significands, their exponents over `2 spread` binades, some of them powers of two."""
    generator = torch.Generator().manual_seed(seed)
    bits = min(fmt.precision, 52)
    significand = torch.randint(2 ** (bits - 1), 2**bits, (COUNT,), generator=generator).double()
    significand[::7] = 2.0 ** (bits - 1)
    exponent = torch.randint(-spread, spread + 1, (COUNT,), generator=generator)
    sign = torch.randint(0, 2, (COUNT,), generator=generator) * 2 - 1
    return (sign * torch.ldexp(significand, exponent - bits + 1)).to(carrier)


def exactly(operation: Operation, x: float, y: float) -> Fraction:
    a, b = Fraction(x), Fraction(y)
    if operation is Operation.ADD:
        return a + b
    if operation is Operation.SUBTRACT:
        return a - b
    return a * b if operation is Operation.MULTIPLY else a / b


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("mode", DETERMINISTIC)
@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
def test_every_operation_is_rounded_once(carrier: torch.dtype, mode: Rounding, operation: Operation) -> None:
    """Operands of the target's width and of the carrier's; exponents as near as 1 and as far apart as 80 binades."""
    whole = format_of(carrier)
    for target in TARGETS[carrier]:
        cast = Cast(target, mode)
        for left, right in ((target, target), (target, whole), (whole, whole), (FP16, BF16)):
            for spread in (1, 12, 40):
                x, y = numbers(left, spread, 1, carrier), numbers(right, spread, 2, carrier)
                got = RoundedOnce(operation, cast, left, right, carrier)(x.clone(), y)
                for a, b, result in zip(x.tolist(), y.tolist(), got.tolist(), strict=True):
                    exact = exactly(operation, a, b)
                    want = round_exactly(exact, target, mode, cast.overflow or Overflow.INFINITY)
                    same = result == want or (math.isnan(result) and math.isnan(want))
                    assert same, f"{a} {operation.value} {b} to {cast}: {result}, not {want}"


def test_constants_are_as_wide_as_their_significand() -> None:
    for constant, harmless in ((0.125, True), (0.17677669, False), (127.0, True)):
        operation = RoundedOnce(Operation.MULTIPLY, Cast(BF16), BF16, constant, torch.float32)
        assert operation.is_harmless == harmless
    x = numbers(BF16, 10, 7, torch.float32)
    got = RoundedOnce(Operation.MULTIPLY, Cast(BF16), BF16, 0.17677669, torch.float32)(x.clone(), 0.17677669)
    factor = Fraction(torch.tensor(0.17677669).item())
    want = [round_exactly(Fraction(a) * factor, BF16, Rounding.NEAREST_EVEN, Overflow.INFINITY) for a in x.tolist()]
    assert got.tolist() == want


@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
def test_beyond_the_carrier_directed_modes_stop_at_the_largest_number(carrier: torch.dtype) -> None:
    top = torch.full((1,), format_of(carrier).max, dtype=carrier)
    target = Format(8, 7) if carrier is torch.float32 else Format(11, 20)
    for operation in (Operation.ADD, Operation.MULTIPLY):
        toward = RoundedOnce(operation, Cast(target, Rounding.TOWARD_ZERO), FP64, FP64, carrier)
        nearest = RoundedOnce(operation, Cast(target), FP64, FP64, carrier)
        assert toward(top.clone(), top).item() == target.max
        assert nearest(top.clone(), top).item() == math.inf
    infinite = torch.full((1,), math.inf, dtype=carrier)
    assert RoundedOnce(Operation.ADD, Cast(target, Rounding.DOWN), FP64, FP64, carrier)(infinite.clone(), top).item() == math.inf


@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
@pytest.mark.parametrize("gap", [2, 10, 30])
def test_a_stochastic_sum_has_the_right_expectation(gap: int, carrier: torch.dtype) -> None:
    """256 + 2^-gap in BF16, whose ulp is 2 there: up with the probability 2^-(gap + 1), also where the carrier loses the term.

    The number of steps up is binomial; six deviations, and never more than a handful where fewer than one is expected.
    """
    count = 1 << 19
    x = torch.full((count,), 256.0, dtype=carrier)
    cast = Cast(BF16, Rounding.STOCHASTIC, seed=3)
    got = RoundedOnce(Operation.ADD, cast, BF16, FP32, carrier)(x, 2.0**-gap)
    up = int((got == 258).sum())
    assert up + int((got == 256).sum()) == count
    expected = count * 2.0 ** -(gap + 1)
    assert abs(up - expected) <= 6 * math.sqrt(expected) + 1
