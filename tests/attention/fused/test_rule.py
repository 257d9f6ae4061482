"""Which runs the compiled passes take, and what a record says of it."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
import torch

import numdev as nd
from numdev.attention.fused import rule
from numdev.attention.fused.rule import FUSED, obstacle
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import Precision
from numdev.attention.recurrence import Run
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.steps import Steps
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from tests.cases import draw

pytestmark = pytest.mark.xdist_group("fused")  # compiled once, by one worker

pytest.importorskip("numba")


NO_MASK = Mask()


def run(precision: Precision, mask: Mask = NO_MASK, keys: int = 40) -> Run:
    q, k, v = (x.to(precision.carrier) for x in draw((1, 1, 1, 20, keys, 8)))
    return Run(Steps.of(precision, 20), OnlineSoftmax(), q[:, :, None], k[:, :, None], v[:, :, None], mask, 0.5, None)


BF16 = Precision.parse("bf16")
REFUSED = [
    ("fp64", {}, "FP64"),
    ("bf16", {"row_sum": "e8m13"}, "FP64"),
    ("bf16", {"values": "bf16:stochastic"}, "precision.values: bf16:stochastic (rounding stochastic)"),
    ("bf16", {"probabilities": "mxfp8_e4m3"}, "precision.probabilities: mxfp8_e4m3"),
    ("bf16", {"probabilities": "posit8"}, "posit8 (listing"),
]


@pytest.mark.parametrize(("name", "steps", "reason"), REFUSED)
def test_what_it_does_not_take(name: str, steps: dict[str, str], reason: str) -> None:
    policy = Precision.parse(name).with_step(**steps)
    with by(Path.COMPILED):
        assert obstacle(run(BF16), Tiling()) is None
        found = obstacle(run(policy), Tiling())
        assert found is not None
        assert reason in found
        assert Tiled(policy, Tiling(16, 16))(*policy.round_inputs(*draw((1, 1, 1, 20, 20, 8))), Mask()).kernel == ""


def test_a_list_of_numbers_may_be_the_inputs_or_the_output() -> None:
    with by(Path.COMPILED):
        assert obstacle(run(BF16.with_step(inputs="posit8", output="posit8")), Tiling()) is None


def test_what_the_run_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    wild, differentiated = run(BF16, Mask(causal=True)), run(BF16)
    wild.v[..., 3, 2] = torch.inf
    differentiated.k.requires_grad_()
    with by(Path.COMPILED):
        assert "finite" in str(obstacle(wild, Tiling()))
        assert "differentiate" in str(obstacle(differentiated, Tiling()))
        with torch.no_grad():
            assert obstacle(differentiated, Tiling()) is None
        assert "one pass" in str(obstacle(run(BF16, keys=600), Tiling(bc=600)))
        assert obstacle(run(BF16.with_step(row_sum="bf16@64"), keys=600), Tiling(bc=600)) is None
        assert obstacle(run(BF16, keys=600), Tiling(bc=100)) is None
    with by(Path.TENSORS):
        assert "asked for" in str(obstacle(run(BF16), Tiling()))
    assert "short" in str(obstacle(run(BF16), Tiling()))
    monkeypatch.setattr(rule, "_FEWEST_SCORES", 1)
    assert obstacle(run(BF16), Tiling()) is None
    assert "as fast" in str(obstacle(run(Precision.parse("kernel_bf16")), Tiling()))
    with by(Path.COMPILED):
        assert obstacle(run(Precision.parse("kernel_bf16")), Tiling()) is None


def test_without_numba_tensor_operations_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        assert name == "numba"
        return None

    monkeypatch.setattr(rule, "find_spec", find)
    with by(Path.COMPILED):
        assert "not installed" in str(obstacle(run(BF16), Tiling()))


def test_another_order_of_torchs_sums_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from numdev.attention.fused import walk

    assert walk.sums_as_torch(64)
    monkeypatch.setattr(walk, "row_sums", lambda x: x.flip(-1).sum(-1))
    for length in (3, 9, 16, 64, 200):
        assert not walk.sums_as_torch(length)


@pytest.mark.parametrize("path", [Path.COMPILED, Path.TENSORS])
def test_the_record_says_what_ran(path: Path) -> None:
    problem = nd.Problem(nd.Distribution(nd.Kind.NORMAL), nd.Shape(queries=32, head_dim=8))
    with by(path):
        record = nd.measure(problem, Tiled(BF16, Tiling(16, 16)), seeds=1, device="cpu")
    assert record.kernel == (FUSED if path is Path.COMPILED else "")
