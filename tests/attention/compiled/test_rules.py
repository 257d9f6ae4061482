"""Which runs the compiled passes take, and what a record says of it."""

from __future__ import annotations

from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
import torch

import numdev as nd
from numdev.attention.compiled import rules
from numdev.attention.compiled.rules import FUSED, unsupported_reason
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.recurrence import BackwardRun, Run
from numdev.attention.softmax import Maximum, OnlineSoftmax, SumOver
from numdev.attention.steps import Steps
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Tiling
from tests.attention.backward.cases import draw_all
from tests.cases import draw

pytestmark = pytest.mark.xdist_group("compiled")  # compiled once, by one worker

pytest.importorskip("numba")

NO_MASK, SIZES = Mask(), (1, 1, 1, 20, 20, 8)
BF16 = Precision.parse("bf16")


def run(precision: Precision, mask: Mask = NO_MASK) -> Run:
    q, k, v = (x.to(precision.carrier) for x in draw((1, 1, 1, 20, 40, 8)))
    return Run(Steps.of(precision, 20), OnlineSoftmax(), q[:, :, None], k[:, :, None], v[:, :, None], mask, 0.5, None)


REFUSED = [
    ("fp64", {}, "FP64"),
    ("bf16", {"values": "bf16:stochastic"}, "precision.values: bf16:stochastic (rounding stochastic)"),
    ("bf16", {"values": "bf16:toward_zero"}, "precision.values: bf16:toward_zero (rounding toward_zero)"),
    ("bf16", {"values": "bf16:flush"}, "precision.values: bf16:flush (subnormals"),
    ("bf16", {"row_sum": "e8m13"}, "FP64"),
    ("bf16", {"probabilities": "mxfp8_e4m3"}, "precision.probabilities: mxfp8_e4m3"),
    ("bf16", {"probabilities": "posit8"}, "posit8 (listing"),
]


@pytest.mark.parametrize(("name", "steps", "reason"), REFUSED)
def test_policies_that_go_by_tensor_operations(name: str, steps: dict[str, str], reason: str) -> None:
    policy = Precision.parse(name).with_step(**steps)
    with by(Path.COMPILED):
        assert unsupported_reason(run(BF16), Tiling()) is None
        assert reason in str(unsupported_reason(run(policy), Tiling()))
        assert Tiled(policy, Tiling(16, 16))(*policy.round_inputs(*draw(SIZES)), Mask()).kernel == ""


@pytest.mark.parametrize(
    ("precision", "reason"),
    [
        (BackwardPrecision.golden(), "FP64"),
        (BackwardPrecision.parse("bf16").with_step(ds="bf16:stochastic"), "precision.ds: bf16:stochastic (rounding"),
        (BackwardPrecision.parse("bf16").with_step(difference="posit8"), "posit8 (listing"),
    ],
)
def test_backward_policies_that_go_by_tensor_operations(
    precision: BackwardPrecision, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str | None] = []

    def noted(run: BackwardRun) -> str | None:
        reasons.append(rules.backward_unsupported_reason(run))
        return reasons[-1]

    monkeypatch.setattr("numdev.attention.tiled.backward_unsupported_reason", noted)
    with by(Path.COMPILED):
        variant = TiledBackward(Tiled(Precision.parse("kernel_bf16")), precision)
        assert variant(*precision.round_inputs(*draw_all(SIZES)), Mask()).kernel == ""
    assert reason in str(reasons[0])


def test_recurrences_that_go_by_tensor_operations() -> None:
    """And inputs and outputs, which `Cast` itself rounds, may be anything."""
    others = {
        "maximum": Maximum.LOCAL,
        "sum_over": SumOver.PROBABILITIES,
        "tie_shift": 2.0,
        "p_scale": 2.0,
        "rescale_threshold": 1.0,
    }
    with by(Path.COMPILED):
        for name, value in others.items():
            changed = replace(run(BF16), softmax=OnlineSoftmax(**{name: value}))  # type: ignore[arg-type]
            assert f"softmax.{name}" in str(unsupported_reason(changed, Tiling()))
        assert unsupported_reason(run(BF16.with_step(inputs="posit8", output="posit8")), Tiling()) is None


def test_reasons_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    wild, differentiated = run(BF16, Mask(causal=True)), run(BF16)
    wild.v[..., 3, 2] = torch.inf
    differentiated.k.requires_grad_()
    with by(Path.COMPILED):
        assert "finite" in str(unsupported_reason(wild, Tiling()))
        assert "differentiate" in str(unsupported_reason(differentiated, Tiling()))
        with torch.no_grad():
            assert unsupported_reason(differentiated, Tiling()) is None
        assert unsupported_reason(run(Precision.parse("kernel_bf16")), Tiling()) is None
    with by(Path.TENSORS):
        assert "asked for" in str(unsupported_reason(run(BF16), Tiling()))
    assert "short" in str(unsupported_reason(run(BF16), Tiling()))
    monkeypatch.setattr(rules, "_FEWEST_SCORES", 1)
    assert unsupported_reason(run(BF16), Tiling()) is None
    assert "as fast" in str(unsupported_reason(run(Precision.parse("kernel_bf16")), Tiling()))


def test_without_numba_tensor_operations_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        assert name == "numba"
        return None

    monkeypatch.setattr(rules, "find_spec", find)
    with by(Path.COMPILED):
        assert "not installed" in str(unsupported_reason(run(BF16), Tiling()))


@pytest.mark.parametrize("path", [Path.COMPILED, Path.TENSORS])
def test_the_record_says_what_ran(path: Path) -> None:
    problem = nd.Problem(nd.Distribution(nd.Kind.NORMAL), nd.Shape(queries=32, head_dim=8))
    with by(path):
        record = nd.measure(problem, Tiled(BF16, Tiling(16, 16)), seeds=1, device="cpu")
    assert record.kernel == (FUSED if path is Path.COMPILED else "")
