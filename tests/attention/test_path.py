"""Which tiled runs compiled code takes, passes on a CPU and the instrumented kernel on a GPU, and what a record says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import numdev as nd
from numdev.attention import instrumented
from numdev.attention.compiled import rules
from numdev.attention.compiled.rules import COMPILED, unsupported_reason
from numdev.attention.emulation import emulation_of
from numdev.attention.instrumented import Instrumented, kernel_refusal
from numdev.attention.kernels import portable
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.recurrence import Run
from numdev.attention.softmax import EXPONENTIALS, OnlineSoftmax, SumOver
from numdev.attention.steps import Steps
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Triton
from numdev.errors import Unsupported
from tests.cases import draw, lse_of, on

BF16, KERNEL_BF16 = Precision.parse("bf16"), Precision.parse("kernel_bf16")
KERNEL = Instrumented(BF16)
CAUSAL = Mask(causal=True)


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter stands in for a GPU."""
    monkeypatch.setattr(instrumented, "is_on_gpu", lambda x: True)


@pytest.fixture
def always(on_any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is too short."""
    monkeypatch.setattr(instrumented, "_FEWEST_TILES", 1)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(precision: Precision = BF16, dim: int = 8) -> Inputs:
    return precision.round_inputs(*draw((1, 1, 1, 20, 40, dim)))


def by_kernel(tensors: Inputs, mask: Mask, kernel: Instrumented = KERNEL) -> str:
    """Why a run goes without the instrumented kernel; empty where it does not."""
    return kernel_refusal(kernel, *tensors, mask, None, None) or ""


def by_passes(tensors: Inputs, mask: Mask, precision: Precision = BF16) -> str:
    """Why a run goes without compiled passes."""
    q, k, v = (x.to(precision.carrier)[:, :, None] for x in tensors)
    return unsupported_reason(Run(Steps.of(precision, 20), OnlineSoftmax(), q, k, v, mask, 0.5, None), Tiling()) or ""


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("precision", {"precision": Precision.parse("fp64")}),
    ("precision", {"precision": BF16.with_step(row_sum="e8m13")}),
    ("precision.values", {"precision": BF16.with_step(values="bf16:stochastic")}),
    ("precision.probabilities", {"precision": BF16.with_step(probabilities="mxfp8_e4m3")}),
    ("precision.probabilities", {"precision": BF16.with_step(probabilities="posit8")}),
    ("precision.accumulator", {"precision": BF16.with_step(accumulator="bf16:up")}),
    ("precision.quantise.smoothing", {"precision": Precision.parse("sage3")}),
    ("tiling.order", {"tiling": Tiling(order=Order.RANDOM)}),
    ("tiling.bc", {"tiling": Tiling(bc=300)}),
    ("softmax.exp", {"softmax": OnlineSoftmax(exp=EXPONENTIALS["exp2_fa4"])}),
    ("softmax.tie_shift", {"softmax": OnlineSoftmax(tie_shift=2.0)}),
    ("softmax.sum_over", {"softmax": OnlineSoftmax(sum_over=SumOver.PROBABILITIES)}),
    ("problem.head_dim", {}),
]


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize(("field", "changed"), REFUSED)
def test_what_the_kernel_does_not_implement(field: str, changed: dict[str, Any], device: str) -> None:
    """`Tiled` goes without it, and `Instrumented` refuses by name."""
    kernel = replace(KERNEL, **changed)
    q, k, v = inputs(kernel.precision, 16 if changed else 300)
    with by(Path.COMPILED):
        reason = by_kernel((q, k, v), Mask(), kernel)
    assert any(word in reason for word in (field, "stochastically", "problem.head_dim"))
    with pytest.raises(Unsupported) as error:
        kernel(*on(device, (q, k, v)), Mask())
    assert error.value.field == field


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("path", [by_kernel, by_passes])
def test_what_a_run_decides_for_any_path(path: Any) -> None:
    pytest.importorskip("numba")
    q, k, v = inputs()
    wild, trained = v.clone(), k.clone().requires_grad_()
    wild[..., 3, 2] = torch.inf
    with by(Path.COMPILED):
        assert path((q, k, v), CAUSAL) == path((q, k, wild), Mask()) == ""
        assert "finite" in path((q, k, wild), CAUSAL)
        assert "differentiate" in path((q, trained, v), Mask())
        with torch.no_grad():
            assert path((q, trained, v), Mask()) == ""
    with by(Path.TENSORS):
        assert "asked for" in path((q, k, v), Mask())
    assert "short" in path((q, k, v), Mask())


@pytest.mark.usefixtures("on_any_device")
def test_what_a_run_decides_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, kernel = inputs(), Instrumented(BF16, Tiling(16, 16))
    with by(Path.COMPILED):
        for why, count, scale in (("counted", True, None), ("emulation", False, None), ("problem.scale", None, -1.0)):
            assert why in str(kernel_refusal(kernel, *tensors, Mask(), scale, count))
    for name, least in (("_MOST_SCORES", 20 * 40), ("_FEWEST_TILES", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(instrumented, name, least + 1)
            assert "short" in by_kernel(tensors, Mask(), kernel)
            patch.setattr(instrumented, name, least)
            assert by_kernel(tensors, Mask(), kernel) == ""
    monkeypatch.setattr(instrumented, "triton_version", lambda: "none")
    assert "not installed" in by_kernel(tensors, Mask())
    monkeypatch.undo()
    assert "not on a GPU" in by_kernel(tensors, Mask())


def test_what_a_run_decides_for_compiled_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    with by(Path.COMPILED):
        assert by_passes(inputs(), Mask(), KERNEL_BF16) == ""
        monkeypatch.setattr(rules, "find_spec", lambda name: None)
        assert "numba is not installed" in by_passes(inputs(), Mask())
    monkeypatch.undo()
    monkeypatch.setattr(rules, "_FEWEST_SCORES", 1)
    assert by_passes(inputs(), Mask()) == ""
    assert "as fast" in by_passes(inputs(), Mask(), KERNEL_BF16)


def test_an_emulation_is_never_by_the_kernel_that_it_predicts() -> None:
    emulated = emulation_of(Triton(nd.Format.parse("fp16"), br=64, bc=64, kernel=nd.Kernel.PORTABLE), Shape(queries=20))
    assert emulated.count is False


@pytest.mark.usefixtures("always")
def test_it_is_the_instrumented_kernel_whatever_the_rows_of_a_tile(device: str) -> None:
    policy = Precision.parse("fp16")
    q, k, v = on(device, policy.round_inputs(*draw((1, 2, 1, 20, 20, 8))))
    expected = Instrumented(policy, Tiling(64, 16))(q, k, v, CAUSAL, 0.3)
    for br in (1, 500):
        got = Tiled(policy, Tiling(br, 16))(q, k, v, CAUSAL, 0.3)
        assert torch.equal(got.out, expected.out)
        assert torch.equal(lse_of(got), lse_of(expected))
        assert (got.launch, got.counters) == (expected.launch, {})
    counted = Tiled(policy, Tiling(16, 16), count=True)(q, k, v, CAUSAL, 0.3)
    assert counted.counters
    assert counted.kernel == ""


@pytest.mark.usefixtures("always")
def test_a_tile_that_does_not_fit_goes_by_tensor_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*arguments: object) -> None:
        raise Unsupported("tiling", "it needs more shared memory than the GPU has")

    monkeypatch.setattr(portable, "run", too_large)
    got = Tiled(BF16)(*inputs(), Mask())
    assert got.kernel == ""
    assert got.counters


@pytest.mark.usefixtures("always")
def test_a_record_names_the_kernel_and_has_no_counters() -> None:
    problem = nd.Problem(nd.Distribution(nd.Kind.NORMAL), nd.Shape(queries=16, keys=16, head_dim=8))
    record = nd.measure(problem, Tiled(Precision.parse("fp16"), Tiling(16, 16)), seeds=2)
    assert record.kernel.startswith("numdev instrumented br=64 bc=16")
    assert record.table("counters") == [{"seed": 0}, {"seed": 1}]


@pytest.mark.xdist_group("compiled")  # compiled once, by one worker
@pytest.mark.parametrize("path", [Path.COMPILED, Path.TENSORS])
def test_a_record_names_compiled_passes(path: Path) -> None:
    pytest.importorskip("numba")
    problem = nd.Problem(nd.Distribution(nd.Kind.NORMAL), nd.Shape(queries=32, head_dim=8))
    with by(path):
        record = nd.measure(problem, Tiled(BF16, Tiling(16, 16)), seeds=1, device="cpu")
    assert record.kernel == (COMPILED if path is Path.COMPILED else "")
