"""Compiled casts at every breakpoint, against the sorted table of the format and against `Cast`; operations that round once."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import BF16, FP16, FP32, TF32, Format
from numdev.arithmetic.rounding import Cast, Overflow
from tests.arithmetic.test_formats import SMALL
from tests.oracles.table import Table, assert_same

pytest.importorskip("numba")

from numdev.attention.compiled import passes
from numdev.attention.compiled.run import encode

pytestmark = pytest.mark.xdist_group("compiled")  # compiled once, by one worker

NARROW = [fmt for fmt in (*SMALL, BF16, FP16) if fmt.listing is None and FP32.covers(fmt) and fmt.precision <= 11]


def casts(fmt: Format) -> Iterator[Cast]:
    for overflow in Overflow:
        if fmt.has_nan or overflow is Overflow.SATURATE:
            yield Cast(fmt, overflow=overflow)


def compiled(cast: Cast, x: np.ndarray) -> np.ndarray:
    rounded = x.copy()
    passes.cast(rounded, encode(cast))
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


OPERATIONS: dict[Operation, Callable[..., None]] = {
    Operation.ADD: passes.plus,
    Operation.SUBTRACT: lambda x, y, op: passes.minus(x.reshape(-1, 1), y, op),
    Operation.MULTIPLY: lambda x, y, op: passes.times(x.reshape(-1, 1), y, op),
    Operation.DIVIDE: lambda x, y, op: passes.over(x.reshape(-1, 1), y, op),
}


WAYS = [*OPERATIONS.items(), (Operation.MULTIPLY, passes.weigh)]


@pytest.mark.parametrize(("operation", "way"), WAYS)
@pytest.mark.parametrize("text", ["fp32", "bf16", "fp16", "e4m3fn:saturate", "e5m2", "tf32", "e8m13"])
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


def test_the_largest_of_a_row() -> None:
    x = patterns()[: 1 << 14].reshape(-1, 16)
    x = torch.cat([x.nan_to_num(1.0), x, torch.full((2, 16), -math.inf)])
    largest = np.empty(len(x), np.float32)
    passes.largest_of(x.numpy(), largest)
    assert_same(largest, x.amax(-1), largest, "amax")


PROGRAM = """
import numpy as np
from numdev.attention.compiled import passes
total = np.zeros((1, 1, 4), np.float32)
casts = np.zeros((passes.OPERATIONS, passes.FIELDS), np.int32)
passes.add_dq(total, np.ones((1, 1, 4), np.float32), np.zeros(3, np.int64), casts)
assert total.tolist() == [[[1.0] * 4]]
print(sum(passes.add_dq.stats.cache_hits.values()), passes.add_dq.stats.cache_path)
"""


def test_a_second_process_does_not_compile(tmp_path: Path) -> None:
    def run() -> tuple[str, str]:
        variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=True)
        hits, folder = done.stdout.split()
        assert (
            "compiling the arithmetic of tiles for this processor, which takes about half a minute" in done.stderr or hits == "1"
        )
        return hits, folder

    assert run()[0] == "0"
    hits, folder = run()
    assert hits == "1"
    assert Path(folder).is_relative_to(tmp_path)
