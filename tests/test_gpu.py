"""A CUDA device against a CPU: the same casts, the same golden, and the same emulation."""

from __future__ import annotations

import pytest
import torch

from numdev import Cast, Distribution, Exact, Kind, Mask, Naive, Precision, Problem, Rounding, Shape, Tiled, Tiling, measure
from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, Format
from numdev.attention.softmax import Normalise, OnlineSoftmax
from tests.oracles.multiprecision import attention as multiprecision_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES = list(Rounding)


def all_bit_patterns(count: int) -> torch.Tensor:
    """FP32 bit patterns spread evenly over all of them, and every pattern of the upper half word."""
    spread = torch.linspace(-(2**31), 2**31 - 1, count, dtype=torch.float64).to(torch.int64).to(torch.int32)
    upper = torch.arange(2**16, dtype=torch.int64).sub(2**15).mul(2**16).to(torch.int32)
    neighbours = torch.cat([upper + offset for offset in (0, 1, 2**15 - 1, 2**15, 2**15 + 1)])
    return torch.cat([spread, neighbours]).view(torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal with the signs of zeros; any NaN is as good as any other."""
    same = (a == b) & (a.signbit() == b.signbit())
    return bool((same | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3FN, E5M2, Format(8, 10), Format(5, 2)])
def test_a_cast_gives_the_same_bits_on_both_devices(fmt: Format, mode: Rounding) -> None:
    x = all_bit_patterns(1 << 20)
    cast = Cast(fmt, mode)
    assert same_bits(cast(x), cast(x.cuda()).cpu())


def test_golden_on_the_gpu_is_within_its_stated_error() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 5, generator=generator, dtype=torch.float64) for n in (7, 11, 11))
    expected, _ = multiprecision_attention(q, k, v, Mask(causal=True), 5**-0.5)
    got = Exact()(q.cuda(), k.cuda(), v.cuda(), Mask(causal=True))
    bound = (5 + 11 + 10) * 2.0**-53 * 20 * float(v.abs().max())  # as tests/attention/test_exact.py derives, scores below 20
    assert float((got.out.cpu() - expected).abs().max()) <= bound


@pytest.mark.parametrize("normalise", list(Normalise))
@pytest.mark.parametrize("name", ["bf16", "kernel_bf16", "fp16", "fp32", "fp64"])
def test_one_tile_equals_naive_bit_for_bit(name: str, normalise: Normalise) -> None:
    generator = torch.Generator().manual_seed(1)
    policy = Precision.parse(name)
    q, k, v = policy.round_inputs(*(torch.rand(1, 2, 128, 64, generator=generator).cuda() for _ in range(3)))
    tiled = Tiled(policy, Tiling(64, 128), OnlineSoftmax(Normalise.END))(q, k, v, Mask())
    assert torch.equal(tiled.out, Naive(policy, Normalise.END)(q, k, v, Mask()).out)
    each = Tiled(policy, Tiling(64, 32), OnlineSoftmax(normalise))(q, k, v, Mask())
    twice = Tiled(policy, Tiling(64, 32), OnlineSoftmax(normalise))(q, k, v, Mask())
    assert torch.equal(each.out, twice.out), "the same inputs give the same bits"


def test_tiled_in_fp64_is_exact_to_roundoff() -> None:
    n, d = 1000, 64
    problem = Problem(Distribution(Kind.NORMAL), Shape(queries=n, keys=n, head_dim=d))
    record = measure(problem, Tiled(Precision.golden(), Tiling(64, 48)), seeds=2, device="cuda")
    worst = max(row["max_difference"] for row in record.rows if row["subject"] == "variant" and row["output"] == "out")
    assert worst <= 4 * n * 2.0**-53 * 5, "c N u max|v|, as for the CPU"
