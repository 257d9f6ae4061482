"""Which tiled runs the instrumented kernel takes, and what a record says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import numdev as nd
from numdev.attention import instrumented
from numdev.attention.emulation import emulation_of
from numdev.attention.instrumented import Instrumented, kernel_refusal
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import EXPONENTIALS, OnlineSoftmax, SumOver
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Triton
from numdev.errors import Unsupported
from tests.cases import draw, on

BF16 = Precision.parse("bf16")
INSTRUMENTED = "numdev instrumented"
PLAIN, PLAIN_TILES = OnlineSoftmax(), Tiling()


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter stands in for a GPU."""
    monkeypatch.setattr(instrumented, "is_on_gpu", lambda x: True)


def reason(
    precision: Precision = BF16,
    tiling: Tiling = PLAIN_TILES,
    softmax: OnlineSoftmax = PLAIN,
    mask: Mask | None = None,
    count: bool | None = None,
    scale: float | None = None,
    dim: int = 8,
) -> str:
    """Why a short run goes without the kernel; empty where it does not."""
    q, k, v = precision.round_inputs(*draw((1, 1, 1, 20, 40, dim)))
    return kernel_refusal(Instrumented(precision, tiling, softmax), q, k, v, mask or Mask(), scale, count) or ""


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("problem.head_dim", {"dim": 300}),
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
]


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize(("field", "changed"), REFUSED)
def test_what_the_kernel_does_not_implement(field: str, changed: dict[str, Any], device: str) -> None:
    """`Tiled` goes without it, and `Instrumented` refuses by name."""
    stated: dict[str, Any] = {"precision": BF16, "tiling": PLAIN_TILES, "softmax": PLAIN} | changed
    with by(Path.COMPILED):
        assert reason() == ""
        assert any(word in reason(**changed) for word in (field, "stochastically", "problem.head_dim"))
    inputs = on(device, stated["precision"].round_inputs(*draw((1, 1, 1, 20, 40, stated.pop("dim", 16)))))
    with pytest.raises(Unsupported) as error:
        Instrumented(**stated)(*inputs, Mask())
    assert error.value.field == field


@pytest.mark.usefixtures("on_any_device")
def test_what_the_run_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Instrumented(BF16, PLAIN_TILES, PLAIN)
    q, k, v = BF16.round_inputs(*draw((1, 1, 1, 20, 40, 8)))
    wild, trained = v.clone(), k.clone().requires_grad_()
    wild[..., 3, 2] = torch.inf
    with by(Path.COMPILED):
        for why, changed in (("counted", {"count": True}), ("emulation", {"count": False}), ("problem.scale", {"scale": -1.0})):
            assert why in reason(**changed)  # type: ignore[arg-type]
        assert "finite" in str(kernel_refusal(kernel, q, k, wild, Mask(causal=True), None, None))
        assert kernel_refusal(kernel, q, k, wild, Mask(), None, None) is None
        assert "differentiate" in str(kernel_refusal(kernel, q, trained, v, Mask(), None, None))
        with torch.no_grad():
            assert kernel_refusal(kernel, q, trained, v, Mask(), None, None) is None
    with by(Path.TENSORS):
        assert "asked for" in reason()
    assert "short" in reason()
    for name, least in (("_MOST_SCORES", 20 * 40), ("_FEWEST_TILES", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(instrumented, name, least + 1)
            assert "short" in reason(tiling=Tiling(16, 16))
            patch.setattr(instrumented, name, least)
            assert reason(tiling=Tiling(16, 16)) == ""
    monkeypatch.setattr(instrumented, "_FEWEST_TILES", 1)
    monkeypatch.setattr(instrumented, "triton_version", lambda: "none")
    assert "not installed" in reason()
    monkeypatch.undo()
    assert "not on a GPU" in reason()


def test_an_emulation_is_never_by_the_kernel_that_it_predicts() -> None:
    emulated = emulation_of(Triton(nd.Format.parse("fp16"), br=64, bc=64, kernel=nd.Kernel.PORTABLE), Shape(queries=20))
    assert emulated.count is False


@pytest.fixture
def always(on_any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is too short."""
    monkeypatch.setattr(instrumented, "_FEWEST_TILES", 1)


@pytest.mark.usefixtures("always")
def test_it_is_the_instrumented_kernel_whatever_the_rows_of_a_tile(device: str) -> None:
    policy = Precision.parse("fp16")
    q, k, v = (x.to(device) for x in policy.round_inputs(*draw((1, 2, 1, 20, 20, 8))))
    expected = Instrumented(policy, Tiling(64, 16))(q, k, v, Mask(causal=True), 0.3)
    for br in (1, 500):
        got = Tiled(policy, Tiling(br, 16))(q, k, v, Mask(causal=True), 0.3)
        assert torch.equal(got.out, expected.out)
        assert got.lse is not None
        assert expected.lse is not None
        assert torch.equal(got.lse, expected.lse)
        assert (got.launch, got.counters) == (expected.launch, {})
    counted = Tiled(policy, Tiling(16, 16), count=True)(q, k, v, Mask(causal=True), 0.3)
    assert counted.counters
    assert not counted.kernel.startswith(INSTRUMENTED)


@pytest.mark.usefixtures("always")
def test_a_tile_that_does_not_fit_goes_by_tensor_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*arguments: object) -> None:
        raise Unsupported("tiling", "it needs more shared memory than the GPU has")

    from numdev.attention.kernels import portable

    monkeypatch.setattr(portable, "run", too_large)
    q, k, v = BF16.round_inputs(*draw((1, 1, 1, 20, 40, 8)))
    got = Tiled(BF16)(q, k, v, Mask())
    assert got.kernel == ""
    assert got.counters


@pytest.mark.usefixtures("always")
def test_a_record_names_the_kernel_and_has_no_counters() -> None:
    problem = nd.Problem(nd.Distribution(nd.Kind.NORMAL), nd.Shape(queries=16, keys=16, head_dim=8))
    record = nd.measure(problem, Tiled(Precision.parse("fp16"), Tiling(16, 16)), seeds=2)
    assert record.kernel.startswith(f"{INSTRUMENTED} br=64 bc=16")
    assert record.table("counters") == [{"seed": 0}, {"seed": 1}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_long_run_on_a_gpu_goes_by_the_kernel() -> None:
    policy, tiling = Precision.parse("bf16"), Tiling(128, 128)
    keys = instrumented._FEWEST_TILES * tiling.bc
    q, k, v = (torch.rand(1, 1, n, 64, device="cuda") for n in (1024, keys, keys))
    inputs = policy.round_inputs(q, k, v)
    assert Tiled(policy, tiling)(*inputs, Mask()).kernel.startswith(INSTRUMENTED)
    q, k, v = (x[:, :1, :64] for x in inputs)
    assert Tiled(policy, tiling)(q, k, v, Mask()).kernel == ""
    assert Tiled(policy, tiling, count=False)(*inputs, Mask()).kernel == ""
    with by(Path.TENSORS):
        got = Tiled(policy, tiling)(*inputs, Mask())
    assert got.counters
    assert got.kernel == ""
