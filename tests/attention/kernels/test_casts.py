"""Casts inside kernels against `numdev.arithmetic.rounding.Cast`, which the table oracle holds."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from numdev.arithmetic.rounding import Cast
from numdev.attention.kernels import casts
from numdev.errors import Unsupported

FORMATS = ["bf16", "fp16", "tf32", "e4m3fn", "e5m2", "e8m3", "e5m5", "e4m3", "e2m1finite", "e3m4fn"]
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


@pytest.mark.parametrize("text", ["fp32", *(name + options for name in FORMATS for options in OPTIONS)])
def test_the_same_bits_as_the_specification(text: str, device: str) -> None:
    cast, x = Cast.parse(text), patterns().to(device)
    y = torch.full_like(x, 12345.0)
    _run[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), casts.spec(cast, "precision.output"), BLOCK)
    expected = cast(x)
    same = ((y == expected) & (y.signbit() == expected.signbit())) | (y.isnan() & expected.isnan())
    assert bool(same.all()), f"{x[~same][0].item()} became {y[~same][0].item()}, not {expected[~same][0].item()}"


@pytest.mark.parametrize(
    "text", ["bf16:stochastic", "bf16:up", "fp16:odd", "fp64", "int8", "e11m20", "fp32:saturate", "fp32:flush"]
)
def test_what_registers_cannot_do_is_refused(text: str) -> None:
    with pytest.raises(Unsupported, match=r"precision\.values: "):
        casts.spec(Cast.parse(text), "precision.values")


@triton.jit  # type: ignore[untyped-decorator]
def _operate(x, y, z, count, DIVIDE: tl.constexpr, SPEC: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < count, other=1.0)
    b = tl.load(y + i, mask=i < count, other=1.0)
    tl.store(z + i, casts.over(a, b, SPEC) if DIVIDE else casts.times(a, b, SPEC), mask=i < count)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """Any bits; few bits, whose products and quotients lie on breakpoints or one part in 2^23 beside; tiny and huge results."""
    generator = torch.Generator().manual_seed(9)
    shape = (1 << 17,)

    def bits(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int64)

    short = [bits(1, 2**9).float() * torch.exp2(bits(-30, 30).float()) for _ in range(2)]
    beside = [t * (1 + bits(-1, 2).float() * 2.0**-23) for t in short]
    tiny = [t * torch.exp2(bits(-80, -40).float()) for t in beside]
    anything = [bits(-(2**31), 2**31).to(torch.int32).view(torch.float32) for _ in range(2)]
    pairs = [short, beside, tiny, anything, [tiny[0], beside[1]], [tiny[0], anything[1]], [anything[0], tiny[1]]]
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


@pytest.mark.parametrize("divide", [False, True], ids=["times", "over"])
@pytest.mark.parametrize("text", ["bf16", "fp16", "tf32", "e4m3fn", "e5m2", "bf16:toward_zero", "e4m3fn:toward_zero:saturate"])
def test_products_and_quotients_are_rounded_once(text: str, divide: bool, device: str) -> None:
    """In FP64 a product of FP32 numbers is exact, and a quotient has the 2 p + 2 bits that make its rounding harmless."""
    cast = Cast.parse(text)
    x, y = (t.to(device) for t in operands())
    if divide:
        x, y = x[y != 0], y[y != 0]
    z = torch.full_like(x, 12345.0)
    spec = casts.spec(cast, "precision.output", once=True)
    block = 1024 if device == "cuda" else BLOCK  # the compiler unrolls a block, the interpreter wants it large
    _operate[(triton.cdiv(x.numel(), block),)](x, y, z, x.numel(), divide, spec, block)
    exact = x.double() / y.double() if divide else x.double() * y.double()
    expected = cast(exact).float()
    same = ((z == expected) & (z.signbit() == expected.signbit())) | (z.isnan() & expected.isnan())
    wrong = ~same
    assert bool(same.all()), f"{int(wrong.sum())}: {x[wrong][0]} and {y[wrong][0]} gave {z[wrong][0]}, not {expected[wrong][0]}"
