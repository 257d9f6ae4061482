"""The backward pass measured as an operation: its inputs, its steps, and every metric of every output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from numdev.arithmetic.formats import BF16
from numdev.attention.captured import Captured
from numdev.attention.distributions import Normal
from numdev.attention.exact import ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.operation import ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import BackwardProblem, Problem, Shape, draw_do
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import Deviations
from numdev.measurement.runner import Runner
from numdev.results.record import Record, Status

PROBLEM = Problem(Normal(), Shape(1, 4, 2, 48, 64, 16), Mask(causal=True))
VARIANT = TiledBackward(Tiled(Precision.kernel(BF16), Tiling(16, 16)), BackwardPrecision.kernel(BF16), Tiling(16, 16))


def measured(variant: TiledBackward, seeds: int = 3) -> Record:
    record = Runner(Deviations(ATTENTION_BACKWARD), "cpu").measure(PROBLEM, variant, NaiveBackward.eager(BF16), seeds=seeds)
    assert record.status is Status.OK, record.reason
    return record


def test_do_is_drawn_by_a_rule_of_its_own() -> None:
    """N(0, 1) to within five standard errors, the same for a seed, another for each, and no part of q, k or v."""
    cpu = torch.device("cpu")
    problem = Problem(Normal(), Shape(1, 4, 2, 256, 64, 64))
    do = draw_do(problem, 3, cpu)["do"]
    assert do.dtype == torch.float64
    assert do.shape == problem.shape.q
    n = do.numel()
    assert abs(float(do.mean())) < 5 / n**0.5
    assert abs(float(do.square().mean()) - 1) < 5 * (2 / n) ** 0.5
    assert torch.equal(draw_do(problem, 3, cpu)["do"], do)
    others = [problem.inputs(seed)["q"] for seed in range(20)] + [draw_do(problem, seed, cpu)["do"] for seed in (0, 1, 2, 4)]
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
        drawn = ATTENTION_BACKWARD.draw(problem, seed, torch.device("cpu"))
        assert torch.equal(drawn[3], do[None, seed : seed + 1])
        p = (0.5 * q[seed] @ k[seed].mT).softmax(-1)  # head_dim 4 has the scale 1/2
        found = ATTENTION_BACKWARD.exact(*drawn, **problem.arguments()).tensors()["dv"]
        assert torch.allclose(found[0, 0], p.mT @ do[seed], rtol=1e-13, atol=1e-14)  # sums of 8 terms near 1 in FP64
    with pytest.raises(BadInput, match=r"^problem\.do_mean: 1"):
        ATTENTION_BACKWARD.draw(BackwardProblem(source, shape, do_mean=1.0), 0, torch.device("cpu"))


@pytest.mark.parametrize(("step", "output"), [("ds", "dk"), ("dv_sum", "dv"), ("delta", "delta")])
def test_stochastic_steps_are_of_the_replicate(step: str, output: str) -> None:
    policy = BackwardPrecision.golden().with_step(**{step: "bf16:stochastic"})
    random = TiledBackward(Tiled(Precision.golden()), policy, Tiling(16, 16))
    found = [row for row in measured(random, 2).tables["deviation"] if row["subject"] == "variant" and row["output"] == output]
    first, second = (row["rmse"] for row in found if row["reference"] == "golden_same_inputs")
    q, k, v, do = ATTENTION_BACKWARD.draw(PROBLEM, 1, torch.device("cpu"))
    exact = ExactBackward()(q, k, v, do, PROBLEM.mask).tensors()[output]
    drawn = random.replicate(1)(q, k, v, do, PROBLEM.mask).tensors()[output]
    assert second == pytest.approx(float((exact - drawn).square().mean().sqrt()), rel=1e-9)
    assert first != second
