"""Which runs the compiled passes take, and what a record says of it."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
import torch

import numdev as nd
from numdev.attention.compiled import rules
from numdev.attention.compiled.rules import COMPILED, unsupported_reason
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import Precision
from numdev.attention.recurrence import Run
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.steps import Steps
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from tests.cases import draw

pytestmark = pytest.mark.xdist_group("compiled")  # compiled once, by one worker

pytest.importorskip("numba")

NO_MASK, SIZES = Mask(), (1, 1, 1, 20, 20, 8)
BF16 = Precision.parse("bf16")


def run(precision: Precision, mask: Mask = NO_MASK) -> Run:
    q, k, v = (x.to(precision.carrier) for x in draw((1, 1, 1, 20, 40, 8)))
    return Run(Steps.of(precision, 20), OnlineSoftmax(), q[:, :, None], k[:, :, None], v[:, :, None], mask, 0.5, None)


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
    assert record.kernel == (COMPILED if path is Path.COMPILED else "")
