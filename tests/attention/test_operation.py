"""The backward pass measured as an operation: its inputs, its steps, and the speed of every implementation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from numdev import BadInput, Captured, Mask, Record, Status, Tiling
from numdev.arithmetic.formats import BF16, FP32
from numdev.attention import cost
from numdev.attention.base import Gradients
from numdev.attention.exact import ExactBackward
from numdev.attention.instrumented import InstrumentedBackward
from numdev.attention.naive import NaiveBackward
from numdev.attention.operation import ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import BackwardProblem, Normal, Problem, Shape, draw_do
from numdev.attention.softmax import OutputForDelta, Recompute
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.triton import Triton, TritonBackward
from numdev.attention.vendor.sdpa import Backend, SdpaBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.measurement import speed as module
from numdev.measurement.deviation import COMPARISON
from numdev.measurement.runner import Runner
from numdev.measurement.speed import DEVIATIONS, MEASURED, Budget, Speeds, of_beside

CPU = torch.device("cpu")
QUICK = Budget(1e-4, 3, 3)
PROBLEM = Problem(Normal(), Shape(2, 4, 2, 32, 48, 16), Mask(causal=True))
INTERPRETED = Problem(Normal(), Shape(1, 2, 1, 20, 24, 16), Mask(causal=True))  # two tiles each way, the last of them ragged
SQUARE = Problem(Normal(), Shape(2, 4, 4, 32, 32, 16), Mask(causal=True))
WORKLOAD = ATTENTION_BACKWARD.workload
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


def test_do_is_drawn_by_a_rule_of_its_own() -> None:
    """N(0, 1) to within five standard errors, the same for a seed, another for each, and no part of q, k or v."""
    problem = Problem(Normal(), Shape(1, 4, 2, 256, 64, 64))
    do = draw_do(problem, 3, CPU)["do"]
    assert do.dtype == torch.float64
    assert do.shape == problem.shape.q
    n = do.numel()
    assert abs(float(do.mean())) < 5 / n**0.5
    assert abs(float(do.square().mean()) - 1) < 5 * (2 / n) ** 0.5
    assert torch.equal(draw_do(problem, 3, CPU)["do"], do)
    others = [problem.inputs(seed)["q"] for seed in range(20)] + [draw_do(problem, seed, CPU)["do"] for seed in (0, 1, 2, 4)]
    for other in others:
        # Independent draws have a correlation of 0 with the standard error 1 / sqrt(n).
        assert abs(float((other * do).mean())) < 5 / n**0.5


def test_a_captured_do_is_taken(tmp_path: Path) -> None:
    """Golden's dV is P^T dO with the dO of the file, and not with a drawn one; a mean to add to it is refused."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 8, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    save_file({"a.q": q, "a.k": k, "a.v": v, "a.do": do}, tmp_path / "x.safetensors")
    source, shape = Captured(str(tmp_path / "x.safetensors")), Shape(queries=8, keys=8, head_dim=4)
    problem = BackwardProblem(source, shape)
    for seed in (0, 1):
        drawn = ATTENTION_BACKWARD.draw(problem, seed, CPU)
        assert torch.equal(drawn[3], do[None, seed : seed + 1])
        p = (0.5 * q[seed] @ k[seed].mT).softmax(-1)  # head_dim 4 has the scale 1/2
        found = ATTENTION_BACKWARD.exact(*drawn, **problem.arguments()).tensors()["dv"]
        assert torch.allclose(found[0, 0], p.mT @ do[seed], rtol=1e-13, atol=1e-14)  # sums of 8 terms near 1 in FP64
    with pytest.raises(BadInput, match=r"^problem\.do_mean: 1"):
        ATTENTION_BACKWARD.draw(BackwardProblem(source, shape, do_mean=1.0), 0, CPU)
