"""Compiled passes give the bits of tensor operations: casts at every breakpoint, operations that round once, whole runs.

`tests/attention/test_accepts.py` runs them with every policy and recurrence that they list.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import BF16, FP16, FP32, TF32, Format
from numdev.arithmetic.rounding import Cast, Overflow
from numdev.attention.base import Gradients, Output
from numdev.attention.compiled.rules import COMPILED
from numdev.attention.differentiable import saved_by
from numdev.attention.mask import Mask
from numdev.attention.path import Path as Way
from numdev.attention.path import by
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Normalise, OnlineSoftmax
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from tests.arithmetic.test_formats import SMALL
from tests.cases import MASKS, Inputs, draw_all
from tests.oracles.table import Table, assert_same

pytest.importorskip("numba")

from numdev.attention.compiled import passes, run
from numdev.attention.compiled.run import encode

pytestmark = pytest.mark.xdist_group("compiled")  # compiled once, by one worker

NARROW = [fmt for fmt in (*SMALL, BF16, FP16) if fmt.listing is None and FP32.covers(fmt) and fmt.precision <= 11]


def patterns(count: int = 1 << 14) -> torch.Tensor:
    """Numbers of every exponent, subnormal ones, infinities and NaN."""
    info = torch.iinfo(torch.int32)
    bits = torch.cat([torch.randint(info.min, info.max, (count,), dtype=torch.int32), torch.arange(-64, 64, dtype=torch.int32)])
    return torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, FP32.max, -FP32.max])])


@pytest.mark.parametrize("fmt", [*NARROW, TF32, Format(8, 1), Format(8, 9), Format(7, 3), FP32], ids=str)
def test_every_breakpoint_and_any_bits_are_rounded_as_the_cast_does(fmt: Format) -> None:
    x = torch.cat([patterns(), torch.from_numpy(Table(fmt).breakpoints(np.float32))]) if fmt in NARROW else patterns()
    every = [overflow for overflow in Overflow if fmt.has_nan or overflow is Overflow.SATURATE]
    for cast in [Cast(fmt, overflow=overflow) for overflow in ([None] if fmt == FP32 else every)]:
        rounded = x.numpy().copy()
        passes.cast(rounded, encode(cast))
        assert_same(rounded, cast(x), x, f"{cast}, compiled")


OPERATIONS: dict[Operation, Callable[..., None]] = {
    Operation.ADD: passes.plus,
    Operation.SUBTRACT: lambda x, y, op: passes.minus(x.reshape(-1, 1), y, op),
    Operation.MULTIPLY: lambda x, y, op: passes.times(x.reshape(-1, 1), y, op),
    Operation.DIVIDE: lambda x, y, op: passes.over(x.reshape(-1, 1), y, op),
}


@pytest.mark.parametrize(("operation", "way"), [*OPERATIONS.items(), (Operation.MULTIPLY, passes.weigh)])
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
    def imported() -> tuple[str, str]:
        variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=True)
        hits, folder = done.stdout.split()
        assert hits == "1" or "compiling the arithmetic of tiles for this processor" in done.stderr
        return hits, folder

    assert imported()[0] == "0"
    hits, folder = imported()
    assert hits == "1"
    assert Path(folder).is_relative_to(tmp_path)


FORWARD = Tiled(Precision.parse("kernel_bf16"))


def both(variant: Tiled, inputs: tuple[torch.Tensor, ...], mask: Mask) -> tuple[Output, Output]:
    q, k, v = inputs
    with by(Way.TENSORS):
        tensors = variant(q, k, v, mask, 0.3)
    with by(Way.COMPILED):
        return tensors, variant(q, k, v, mask, 0.3)


def both_backward(variant: TiledBackward, inputs: Inputs, mask: Mask) -> tuple[Gradients, Gradients]:
    """From what one forward pass saved."""
    with by(Way.TENSORS):
        saved = saved_by(variant.forward, variant.reads, inputs[:3], mask, 0.3)
        tensors = variant.backward(*inputs, saved, mask, 0.3)
    with by(Way.COMPILED):
        return tensors, variant.backward(*inputs, saved, mask, 0.3)


def assert_bits(tensors: Output | Gradients, compiled: Output | Gradients) -> None:
    assert (tensors.kernel, compiled.kernel) == ("", COMPILED)
    for name, a in tensors.tensors().items():
        b = compiled.tensors()[name]
        same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
        assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} of {name} differ"
    assert compiled.counters == tensors.counters


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("name", "tiling"), [("bf16", Tiling(16, 16)), ("kernel_fp16", Tiling(20, 12, Order.RANDOM)), ("e4m3fn", Tiling(8, 32))]
)
def test_batch_entries_of_different_lengths(name: str, tiling: Tiling, mask: str) -> None:
    forward, backward = Precision.parse(name), BackwardPrecision.parse(name)
    inputs = draw_all((2, 4, 2, 37, 53, 24))
    assert_bits(*both(Tiled(forward, tiling), forward.round_inputs(*inputs[:3]), MASKS[mask]))
    assert_bits(*both_backward(TiledBackward(FORWARD, backward, tiling), backward.round_inputs(*inputs), MASKS[mask]))


@pytest.mark.parametrize("turns", [Turns(None), Turns(2), Turns(3)], ids=str)
def test_the_walks_of_kernels(turns: Turns) -> None:
    """Heads apart, and meetings of a few tiles of queries."""
    precision = BackwardPrecision.parse("kernel_bf16")
    inputs = precision.round_inputs(*draw_all((1, 4, 2, 300, 260, 16)))
    for mask in (Mask(), Mask(causal=True)):
        assert_bits(*both_backward(TiledBackward(FORWARD, precision, Tiling(64, 32), turns=turns), inputs, mask))


@pytest.mark.parametrize("name", ["bf16", "e4m3fn", "kernel_bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_stay_where_they_were(name: str, value: float) -> None:
    backward = BackwardPrecision.parse(name)
    for which in range(4):
        inputs = backward.round_inputs(*draw_all((1, 2, 1, 20, 20, 8)))
        inputs[which][0, 0, 7, 3] = value
        assert_bits(*both_backward(TiledBackward(FORWARD, backward, Tiling(16, 16)), inputs, Mask()))
        for normalise in Normalise:
            variant, mask = Tiled(Precision.parse(name), Tiling(16, 16), OnlineSoftmax(normalise)), Mask(causal=which != 2)
            assert_bits(*both(variant, inputs[:3], mask))


@pytest.mark.parametrize("name", ["bf16", "kernel_bf16"])
def test_blocks_and_threads_change_no_bit_and_arguments_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, mask = torch.get_num_threads(), Mask(causal=True)
    inputs = BackwardPrecision.parse(name).round_inputs(*draw_all((2, 4, 2, 150, 70, 16)))
    kept = [x.clone() for x in inputs]
    forward = Tiled(Precision.parse(name), Tiling(16, 16))
    backward = TiledBackward(FORWARD, BackwardPrecision.parse(name), Tiling(16, 16))
    assert_bits(*both(forward, inputs[:3], mask))
    monkeypatch.setattr(run, "_WORKSPACE", 1)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert_bits(*both(forward, inputs[:3], mask))
            assert_bits(*both_backward(backward, inputs, mask))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
