"""The speed of the backward pass: its cost model against counts by brute force, and records of every implementation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from numdev.arithmetic.formats import BF16, FP16, FP32
from numdev.attention import cost
from numdev.attention.base import Gradients
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.differentiable import Backward
from numdev.attention.distributions import Normal
from numdev.attention.exact import ExactBackward
from numdev.attention.instrumented import InstrumentedBackward
from numdev.attention.mask import Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.operation import ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.softmax import OutputForDelta, Recompute
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import KernelLaunch, Tiling
from numdev.attention.triton import Triton, TritonBackward
from numdev.attention.vendor.flex import FlexBackward
from numdev.attention.vendor.sdpa import Backend, SdpaBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.measurement.deviation.measurement import COMPARISON
from numdev.measurement.runner import Runner
from numdev.measurement.speed import measurement as module
from numdev.measurement.speed.columns import MEASURED, of_beside
from numdev.measurement.speed.measurement import DEVIATIONS, Speeds
from numdev.measurement.speed.timing import Budget
from numdev.results.record import Record, Status

CPU = torch.device("cpu")
QUICK = Budget(1e-4, 3, 3)
PROBLEM = Problem(Normal(), Shape(2, 4, 2, 32, 48, 16), Mask(causal=True))
INTERPRETED = Problem(Normal(), Shape(1, 2, 1, 20, 24, 16), Mask(causal=True))  # two tiles each way, the last of them ragged
SQUARE = Problem(Normal(), Shape(2, 4, 4, 32, 32, 16), Mask(causal=True))
WORKLOAD = ATTENTION_BACKWARD.workload
TWICE, ONCE = True, False


KERNEL, TILES = BackwardPrecision.kernel(BF16), Tiling(16, 32)
TILED = TiledBackward(Tiled(Precision.kernel(BF16), TILES), KERNEL, TILES)
VARIANTS: dict[str, Any] = {
    "tiled": TILED,
    "unrounded": replace(TILED, recompute=Recompute(output=OutputForDelta.UNROUNDED)),
    "naive": NaiveBackward.eager(BF16),
    "exact": ExactBackward(),
    "vanilla": VanillaBackward(FP32),
    "math": SdpaBackward(Backend.MATH, BF16),
    "flash": SdpaBackward(Backend.FLASH, FP32),
    "triton": TritonBackward(Triton(br=16, bc=16), br=16, bc=16),
    "instrumented": InstrumentedBackward(Tiled(Precision.kernel(BF16), TILES), KERNEL, TILES),
}


def test_what_implementations_declare() -> None:
    def model(variant: Any) -> CostModel:
        found = variant.cost_model(KernelLaunch())
        assert isinstance(found, CostModel)
        return found

    assert ExactBackward().cost_model(KernelLaunch()) is None
    vanilla = (VARIANTS["naive"], VARIANTS["vanilla"], VARIANTS["math"])
    assert all(model(variant).algorithm is Algorithm.VANILLA and model(variant).holds_scores for variant in vanilla)
    tiled = (TILED, SdpaBackward(), FlexBackward(32, 32), VARIANTS["triton"], VARIANTS["instrumented"])
    assert {model(variant).algorithm for variant in tiled} == {Algorithm.TILED}
    assert [model(variant).recomputes_twice for variant in tiled] == [ONCE, ONCE, ONCE, TWICE, TWICE]
    assert [(model(variant).br, model(variant).bc) for variant in tiled] == [
        (16, 32),
        (None, None),  # the tile that is given to FlexAttention is that of its forward pass
        (None, None),
        (16, 16),
        (16, 32),
    ]
    assert [model(variant).width for variant in tiled[:-1]] == [Width(2.0, 2.0)] * 4
    assert all(isinstance(variant, Backward) for variant in (*VARIANTS.values(), FlexBackward()))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(module, "matmul_flops", lambda dtype, device, tf32: 1e9)
    return Runner(Speeds(ATTENTION_BACKWARD, QUICK), "cpu")


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("triton", "instrumented")])  # slow where interpreted
def test_forward_backward_and_both_are_in_the_record(runner: Runner, name: str) -> None:
    problem = SQUARE if name in ("flash", "math") else PROBLEM
    found = runner.measure(problem, VARIANTS[name], seeds=1)
    assert found.status is Status.OK, found.reason
    (row,) = found.rows
    assert set(row) == {*(column.name for column in COMPARISON), *MEASURED, *of_beside(WORKLOAD.beside), *DEVIATIONS}
    operations = row["operations"]
    assert operations == cost.backward_operations(problem)
    assert (row["forward_operations"], row["both_operations"]) == (operations * 2 // 5, operations * 7 // 5)
    for part in ("", "forward_", "both_"):
        assert 0 < row[f"{part}latency_low"] <= row[f"{part}latency"] <= row[f"{part}latency_high"]
    if name == "exact":
        assert math.isnan(row["model_bytes"])
    else:
        assert Record.from_json(found.to_json()) == found
        assert row["both_model_bytes"] == row["model_bytes"] + row["forward_model_bytes"] > row["model_bytes"] > 0
    assert row["output"] == "dq"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted on machines without a GPU")
@pytest.mark.parametrize("name", VARIANTS)
def test_each_pass_does_the_work_and_can_be_made_again(name: str) -> None:
    special = {"flash": SQUARE, "math": SQUARE, "triton": INTERPRETED, "instrumented": INTERPRETED}
    problem, variant = special.get(name, PROBLEM), VARIANTS[name]
    inputs = ATTENTION_BACKWARD.prepared(problem, variant, 0, CPU)
    q, k, v, do = inputs
    expected = variant(q, k, v, do, problem.mask, problem.softmax_scale).tensors()
    attend, backward = variant.passes(q, k, v, do, problem.mask, problem.softmax_scale)
    left = attend()
    for found in (backward(left), backward(attend()), backward(left)):
        assert isinstance(found, Gradients)
        for output, tensor in found.tensors().items():
            if name == "exact":  # delta of a saved O is rounded with it, that of the call is not: 48 keys of order 1
                assert float((tensor - expected[output]).abs().max()) < 1e-13, output
            else:
                assert torch.equal(tensor.double(), expected[output].double()), output
    forward = variant.forward_pass
    out = forward(*forward.round_inputs(q, k, v), problem.mask, problem.softmax_scale).out
    assert torch.equal(attend().out.double(), out.double())


def test_the_backward_pass_alone_makes_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    own = Tiled.__call__

    def counted(self: Tiled, *arguments: Any) -> Any:
        calls.append("forward")
        return own(self, *arguments)

    monkeypatch.setattr(Tiled, "__call__", counted)
    inputs = ATTENTION_BACKWARD.prepared(PROBLEM, TILED, 0, CPU)
    q, k, v, do = inputs
    attend, backward = TILED.passes(q, k, v, do, PROBLEM.mask, PROBLEM.softmax_scale)
    assert calls == []
    output = attend()
    assert calls == ["forward"]
    first = backward(output)
    call = ATTENTION_BACKWARD.workload.bound(PROBLEM, TILED, inputs)
    calls.clear()
    assert torch.equal(call().dq, first.dq)
    assert calls == []


def test_every_head_holds_the_drawn_group() -> None:
    inputs = ATTENTION_BACKWARD.prepared(PROBLEM, SdpaBackward(Backend.MATH, FP16), 0, CPU)
    assert [tuple(x.shape) for x in inputs] == [(2, 4, 32, 16), (2, 2, 48, 16), (2, 2, 48, 16), (2, 4, 32, 16)]
    assert all(x.dtype == torch.float16 and x.is_contiguous() for x in inputs)
    do = inputs[3]
    assert torch.equal(do[0, :2], do[1, 2:])


def test_memory_that_is_not_there(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(queries=1025, keys=1025)
    assert WORKLOAD.needed_bytes(Problem(Normal(), shape), VanillaBackward(FP32)) == 8 * 4 * 1025 * 64 + 3 * 4 * 1025**2
    monkeypatch.setattr(module, "available_bytes", lambda device: 1 << 20)
    assert runner.measure(Problem(Normal(), shape), VanillaBackward(FP32)).status is Status.OUT_OF_MEMORY
