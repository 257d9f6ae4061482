"""Compiled casts at every breakpoint, against the sorted table of the format and against `Cast`; operations that round once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, INT8, TF32, Format
from numdev.arithmetic.products import row_sums
from numdev.arithmetic.rounding import Cast, Overflow, Subnormals
from tests.arithmetic.test_formats import SMALL
from tests.oracles.table import Table, assert_same

pytest.importorskip("numba")

from numdev.attention.fused import layout as at
from numdev.attention.fused import rounding
from numdev.attention.fused.recipe import Table as Function
from numdev.attention.fused.recipe import encode

pytestmark = pytest.mark.xdist_group("fused")  # compiled once, by one worker

DETERMINISTIC = [mode for mode in Rounding if mode is not Rounding.STOCHASTIC]
NARROW = [fmt for fmt in (*SMALL, BF16, FP16) if fmt.listing is None and FP32.covers(fmt) and fmt.precision <= 11]


def casts(fmt: Format) -> Iterator[Cast]:
    for mode, overflow, subnormals in itertools.product(DETERMINISTIC, Overflow, Subnormals):
        possible = fmt.has_nan or overflow is Overflow.SATURATE
        if possible and not (fmt.is_integer and subnormals is Subnormals.FLUSHED):
            yield Cast(fmt, mode, overflow, subnormals)


def compiled(cast: Cast, x: np.ndarray) -> np.ndarray:
    rounded = x.copy()
    rounding.cast(rounded, encode(cast))
    return rounded


def patterns(count: int = 1 << 14) -> torch.Tensor:
    """Numbers of every exponent, subnormal ones, infinities and NaN."""
    info = torch.iinfo(torch.int32)
    bits = torch.cat([torch.randint(info.min, info.max, (count,), dtype=torch.int32), torch.arange(-64, 64, dtype=torch.int32)])
    return torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, FP32.max, -FP32.max])])


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_every_breakpoint_equals_the_table(fmt: Format) -> None:
    table = Table(fmt)
    x = table.breakpoints(np.float32)
    located = table.locate(x)
    for cast in casts(fmt):
        assert cast.overflow is not None
        assert_same(compiled(cast, x), located.round(cast.rounding, cast.overflow, cast.subnormals), x, f"{cast}, compiled")


@pytest.mark.parametrize("fmt", [*NARROW, TF32, Format(8, 1), Format(8, 9), Format(7, 3), FP32], ids=str)
def test_any_bits_are_rounded_as_the_cast_does(fmt: Format) -> None:
    x = patterns()
    for cast in [Cast(FP32)] if fmt == FP32 else casts(fmt):
        assert_same(compiled(cast, x.numpy()), cast(x), x, str(cast))


def test_every_way_of_a_cast_is_in_use() -> None:
    texts = {"fp32": at.NOTHING, "bf16": at.BY_CARRY, "bf16:saturate": at.ON_BITS, "fp16": at.BY_ADDER, "fp16:flush": at.SCALED}
    assert {text: int(encode(Cast.parse(text))[at.KIND]) for text in texts} == texts


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3FN, E5M2, TF32, INT8], ids=str)
def test_a_table_is_the_function_of_every_number(fmt: Format) -> None:
    cast = Cast(fmt)
    numbers = cast(patterns())
    table = Function.of(cast, torch.exp)
    found = numbers.numpy().copy()
    rounding.look_up(found, table.values, table.shift, table.base)
    assert_same(found, cast(numbers.exp()), numbers, f"exp of {fmt}")


OPERATIONS: dict[Operation, Callable[..., None]] = {
    Operation.ADD: rounding.plus,
    Operation.SUBTRACT: lambda x, y, op: rounding.minus(x.reshape(-1, 1), y, op),
    Operation.MULTIPLY: lambda x, y, op: rounding.times(x.reshape(-1, 1), y, op),
    Operation.DIVIDE: lambda x, y, op: rounding.over(x.reshape(-1, 1), y, op),
}


WAYS = [*OPERATIONS.items(), (Operation.MULTIPLY, rounding.weigh)]


@pytest.mark.parametrize(("operation", "way"), WAYS)
@pytest.mark.parametrize("text", ["fp32", "bf16", "fp16:toward_zero", "e4m3fn:saturate", "e5m2:odd", "tf32", "bf16:up:flush"])
def test_operations_round_once_as_the_specification(operation: Operation, way: Callable[..., None], text: str) -> None:
    """Any FP32 operands, near each other too, where TwoSum and the rest of a product decide."""
    cast = Cast.parse(text)
    x, y = patterns(), patterns()
    near = torch.randn(4096)
    x, y = torch.cat([x, near, near]), torch.cat([y, torch.randn(4096) * 2.0**-12, near * (1 + 2.0**-9)])
    specified = RoundedOnce(operation, cast, FP32, FP32, torch.float32)
    got = x.numpy().copy()
    way(got, y.numpy(), encode(cast, careful=not specified.is_harmless))
    assert_same(got, specified(x.clone(), y.clone()), x, f"{operation} to {cast}")


@pytest.mark.parametrize("length", [*range(1, 80), 96, 127, 128, 200, 255, 256, 511, 512])
def test_sums_have_the_bits_of_torchs(length: int) -> None:
    x = torch.ldexp(torch.rand(32, length), torch.randint(-16, 1, (32, length)))
    lanes = np.empty(32, np.float32)
    assert [float(rounding.sum_of(row, lanes)) for row in x.numpy()] == row_sums(x).flatten().tolist()


def test_the_largest_of_a_row() -> None:
    x = patterns()[: 1 << 14].reshape(-1, 16)
    x = torch.cat([x.nan_to_num(1.0), x, torch.full((2, 16), -math.inf)])
    largest = np.empty(len(x), np.float32)
    rounding.largest_of(x.numpy(), largest)
    assert_same(largest, x.amax(-1), largest, "amax")
