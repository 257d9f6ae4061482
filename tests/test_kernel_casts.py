"""Casts inside kernels against `numdev.rounding.Cast`, which the table oracle holds."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from numdev.errors import Unsupported
from numdev.kernels import casts
from numdev.rounding import Cast

FORMATS = ["bf16", "fp16", "tf32", "e4m3fn", "e5m2", "e8m3", "e5m5", "e4m3", "e2m1finite", "e3m4fn", "fp32"]
OPTIONS = ["", ":toward_zero", ":saturate", ":toward_zero:saturate", ":flush"]
BLOCK = 1 << 15


@triton.jit  # type: ignore[untyped-decorator]
def _run(x, y, count, SPEC: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, casts.cast(tl.load(x + i, mask=i < count), SPEC), mask=i < count)


def patterns() -> torch.Tensor:
    """Every upper half word with the lower ones that stand at, beside and between the breakpoints of 16-bit formats."""
    upper = torch.arange(2**16, dtype=torch.int64).sub(2**15).mul(2**16)
    return (
        torch.cat([upper + low for low in (0, 1, 0x1000, 0x2000, 2**15 - 1, 2**15, 2**15 + 1)])
        .to(torch.int32)
        .view(torch.float32)
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_same_bits_as_the_specification(name: str, options: str, device: str) -> None:
    cast = Cast.parse(name + options)
    if name == "fp32" and options:
        with pytest.raises(Unsupported, match=r"precision\.output"):
            casts.spec(cast, "precision.output")
        return
    x = patterns().to(device)
    y = torch.full_like(x, 12345.0)
    _run[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), casts.spec(cast, "precision.output"), BLOCK)
    expected = cast(x)
    same = ((y == expected) & (y.signbit() == expected.signbit())) | (y.isnan() & expected.isnan())
    assert bool(same.all()), f"{x[~same][0].item()} became {y[~same][0].item()}, not {expected[~same][0].item()}"


@pytest.mark.parametrize("text", ["bf16:stochastic", "bf16:up", "fp16:odd", "fp64", "int8", "e11m20"])
def test_what_registers_cannot_do_is_refused(text: str) -> None:
    with pytest.raises(Unsupported, match=r"precision\.values: "):
        casts.spec(Cast.parse(text), "precision.values")
