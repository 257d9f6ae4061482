"""Tiled attention, forward and backward, by compiled passes against tensor operations, and against the double loop."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.tiled import double_loop
from benchmarks.timing import Result, paired
from numdev import Mask, Precision, Tiled, Tiling
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Gradients, Output
from numdev.attention.differentiable import saved_by
from numdev.attention.path import Path, by
from numdev.attention.precision import BackwardPrecision
from numdev.attention.tiled import TiledBackward

_SCALE, _RUNS, _COUNTED = 0.125, 3, 11
_POLICIES = {name: Precision.parse(name) for name in ("bf16", "fp16", "kernel_bf16", "e4m3fn")}
_POLICIES["e4m3fn:saturate"] = Precision.throughout(Cast.parse("e4m3fn:saturate"))
Inputs = tuple[Tensor, Tensor, Tensor]


def attend(path: Path, tiled: Tiled, inputs: Inputs) -> Output:
    with by(path):
        return tiled(*inputs, Mask(), _SCALE)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN too: every sum of 2048 numbers is beyond the largest of E4M3."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def results() -> list[Result]:
    """4 heads, N = 2048, d = 64: every comparison with both sides in turn."""
    generator = torch.Generator().manual_seed(0)
    drawn = tuple(torch.rand(1, 4, 2048, 64, generator=generator, dtype=torch.float64) for _ in range(3))
    found = []
    for side, against_loop in ((64, 6.0), (16, 45.0)):
        tiling = Tiling(side, side)
        for name, step in _POLICIES.items():
            quiet, counting = Tiled(step, tiling, count=False), Tiled(step, tiling)
            inputs = step.round_inputs(*drawn)
            compiled, tensors = attend(Path.COMPILED, counting, inputs), attend(Path.TENSORS, counting, inputs)
            if not same(compiled.out, tensors.out) or compiled.counters != tensors.counters:
                raise AssertionError(f"compiled passes and tensor operations differ: {name}, Br = Bc = {side}")
            case = f"{name}, Br = Bc = {side}"
            ours = partial(attend, Path.COMPILED, quiet, inputs)
            theirs = partial(attend, Path.TENSORS, quiet, inputs)
            counted = partial(attend, Path.COMPILED, counting, inputs)
            found.append(paired(f"compiled passes against tensor operations, {case}", ours, theirs, at_least=1.0, runs=_RUNS))
            found.append(paired(f"counting in compiled passes, {case}", counted, ours, at_most=1.1, runs=_COUNTED))
            if name == "bf16":
                loop = partial(double_loop, *inputs, _SCALE, tiling, step)
                title = f"compiled passes against the double loop, {case}, bit-equal"
                found.append(paired(title, ours, loop, at_least=against_loop, runs=_RUNS))
    return found + [gradients(name, side) for side in (64, 16) for name in ("bf16", "fp16", "kernel_bf16", "e4m3fn")]


def gradients(name: str, side: int) -> Result:
    """The backward pass by compiled passes against itself by tensor operations: 4 heads, N = 1024, d = 64, counting."""
    generator = torch.Generator().manual_seed(0)
    step = BackwardPrecision.parse(name)
    drawn = (torch.rand(1, 4, 1024, 64, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = step.round_inputs(*drawn)
    variant = TiledBackward(Tiled(Precision.parse(name)), step, Tiling(side, side))
    saved = saved_by(variant.forward, variant.reads, inputs[:3], Mask(), _SCALE)

    def run(path: Path) -> Gradients:
        with by(path):
            return variant.backward(*inputs, saved, Mask(), _SCALE)

    compiled, tensors = run(Path.COMPILED), run(Path.TENSORS)
    equal = all(same(x, tensors.tensors()[output]) for output, x in compiled.tensors().items())
    if not equal or compiled.counters != tensors.counters:
        raise AssertionError(f"compiled passes and tensor operations differ: backward, {name}, Br = Bc = {side}")
    title = f"backward by compiled passes against tensor operations, {name}, Br = Bc = {side}"
    return paired(title, partial(run, Path.COMPILED), partial(run, Path.TENSORS), at_least=1.0, runs=_RUNS)
