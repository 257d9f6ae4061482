"""Split-KV of the portable kernel: how it divides the keys of few queries of itself, and how it combines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from numdev.arithmetic.formats import FP16
from numdev.arithmetic.rounding import Cast
from numdev.attention import triton as fast
from numdev.attention.emulation import emulation_of
from numdev.attention.exact import Exact
from numdev.attention.kernels import portable
from numdev.attention.kernels.launch import device_of, split_count
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.steps import Steps
from numdev.attention.tiling import Tiling
from numdev.attention.triton import Kernel, Triton
from numdev.errors import BadInput
from tests.attention.bounds import kernel_budget
from tests.cases import POLICIES, Sizes, draw, lse_of, on

SMALL = Triton(FP16, br=16, bc=16, kernel=Kernel.PORTABLE)


@pytest.fixture(autouse=True)
def _eight_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "device_of", lambda device: replace(device_of(device), multiprocessors=8))


@pytest.mark.parametrize("sizes", [(1, 4, 2, 1, 110, 24), (1, 1, 1, 3, 150, 16)], ids=str)
def test_the_name_states_the_splits_and_the_result_is_that_of_the_same_number(sizes: Sizes, device: str) -> None:
    inputs = on(device, SMALL.round_inputs(*draw(sizes)))
    own, splits = SMALL(*inputs, Mask()), split_count(sizes[0] * sizes[2], sizes[4], 16, 8)
    assert splits > 1
    assert own.kernel.endswith(f" splits={splits} combined=lse")
    same = replace(SMALL, splits=splits)(*inputs, Mask())
    assert torch.equal(own.out, same.out)
    assert torch.equal(lse_of(own), lse_of(same))
    golden = Exact()(*inputs, Mask())
    bound, _ = kernel_budget(SMALL.precision, SMALL.softmax, *inputs, sizes[5] ** -0.5, 20)
    assert float((own.out.double() - golden.out).abs().max()) <= bound


@pytest.mark.parametrize(
    ("queries", "mask", "splits", "launched"),
    [(1, Mask(), 1, 1), (1, Mask(), 5, 5), (1, Mask(window=9), None, 1), (17, Mask(), None, 1)],
)
def test_a_number_is_taken_and_many_queries_and_windows_are_not_split(
    queries: int, mask: Mask, splits: int | None, launched: int, device: str
) -> None:
    inputs = on(device, draw((1, 1, 1, queries, 100, 16)))
    assert replace(SMALL, splits=splits)(*inputs, mask).launch.splits == launched


@pytest.mark.parametrize("name", ["kernel_bf16", "uniform_bf16", "uniform_e5m2", "narrow_sum", "fp32"])
@pytest.mark.parametrize("splits", [2, 7])
def test_the_kernel_combines_as_its_specification_does(name: str, splits: int, device: str) -> None:
    """Casts and order are equal. Logarithms that differ by whole numbers of `ln 2` would need exact exponentials, so a
    weight may be off by an ulp of FP32 before it is rounded: one rounding of each step more, at most.
    """
    policy = POLICIES[name]
    generator = torch.Generator().manual_seed(0)
    parts = policy.accumulator.apply_(torch.randn(splits, 2, 3, 5, 24, generator=generator))
    lse = policy.row_sum.accumulate.apply_(torch.randn(splits, 2, 3, 5, generator=generator))
    lse[0, 0, 0], lse[:, 1, 1] = float("-inf"), float("-inf")
    parts[0, 0, 0], parts[:, 1, 1] = 0.0, 0.0
    expected, total = Steps.of(policy, 5).combine(
        [(o.clone(), part[..., None].clone()) for o, part in zip(parts, lse, strict=True)]
    )
    request = portable.Request(policy, Tiling(16, 16, splits=splits), OnlineSoftmax(), exactly=True)
    out, got = portable.combined(request, parts.to(device), lse.to(device), torch.float32)
    coarsest = max(policy.rescale.to.u, policy.row_sum.accumulate.to.u, policy.accumulator.to.u)
    assert float((out.cpu() - expected).abs().max()) <= 4 * splits * coarsest * float(parts.abs().max())
    assert torch.equal(got.cpu() == float("-inf"), total[..., 0] == float("-inf"))
    seen = total[..., 0] > float("-inf")
    assert float((got.cpu() - total[..., 0])[seen].abs().max()) <= 4 * splits * coarsest * float(
        lse[lse > float("-inf")].abs().max() + 2
    )
    assert bool((out[1, 1] == 0).all())


@pytest.mark.parametrize("narrow", ["e4m3fn", "e4m3fn:saturate", "e5m2"])
def test_a_split_without_a_sum_has_no_weight_in_any_format(narrow: str, device: str) -> None:
    """Its minus infinity is never rounded: to a format without one it would be NaN or the least number."""
    policy = Precision.parse("kernel_bf16").with_step(rescale=Cast.parse(narrow))
    parts, lse = torch.randn(2, 1, 1, 5, 16), torch.zeros(2, 1, 1, 5)
    parts[0], lse[0] = 0.0, float("-inf")
    request = portable.Request(policy, Tiling(16, 16, splits=2), OnlineSoftmax(), exactly=True)
    out, whole = portable.combined(request, parts.to(device), lse.to(device), torch.float32)
    assert torch.equal(out.cpu(), parts[1])
    assert torch.equal(whole.cpu(), lse[1])


def test_an_emulation_asks_for_the_splits_that_only_the_gpu_knows() -> None:
    few = Shape(heads=4, kv_heads=2, queries=1, keys=512, head_dim=64)
    with pytest.raises(BadInput, match=r"tiling\.splits.*give a number"):
        emulation_of(SMALL, few)
    assert emulation_of(Triton(FP16, bc=16, kernel=Kernel.PORTABLE, splits=3), few).tiling.splits == 3
    assert emulation_of(SMALL, Shape(queries=64, keys=512, head_dim=64)).tiling.splits == 1
    assert emulation_of(Triton(kernel=Kernel.HOPPER), few).tiling.splits == 1
    assert emulation_of(Triton(kernel=Kernel.HOPPER), Shape(queries=64, keys=512, head_dim=256)).tiling.bc == 64
