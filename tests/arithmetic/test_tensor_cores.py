"""The unit of a tensor core: against exact rationals, against readings of our own, and on a GPU against all bits of 2^20 sums."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numdev import BadInput, Dot
from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from numdev.arithmetic.rounding import Cast
from numdev.arithmetic.tensor_cores import UNITS, Architecture, Unit

PAIRS = [(BF16, BF16), (FP16, FP16), (E4M3FN, E4M3FN), (E5M2, E5M2), (E4M3FN, E5M2), (E5M2, E4M3FN)]
CASES = [(each, *pair) for each in Architecture for pair in PAIRS if each.unit(*pair) is not None]
HOPPER = [(a, b) for architecture, a, b in CASES if architecture is Architecture.HOPPER]


def unit_of(architecture: Architecture, left: Format, right: Format) -> Unit:
    unit = architecture.unit(left, right)
    assert unit is not None
    return unit


def exponent(x: Fraction, fmt: Format) -> int:
    """Of a number that is not 0, as it is stored: `2^e <= |x| < 2^(e + 1)`, or that of subnormal numbers."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return max(e if abs(x) >= Fraction(2) ** e else e - 1, fmt.emin)


def cut(x: Fraction, lowest: int) -> Fraction:
    """The multiple of `2^lowest` next to `x` on the side of 0."""
    ulp = Fraction(2) ** lowest
    return Fraction(abs(x) // ulp) * ulp * (1 if x > 0 else -1)


def chain(a: list[float], b: list[float], c: float, unit: Unit, formats: tuple[Format, Format]) -> float:
    """The sum by the rules of the module's docstring, in exact rationals, one instruction after another."""
    for k in range(0, len(a), unit.products):
        pairs = list(zip(a[k : k + unit.products], b[k : k + unit.products], strict=True))
        exact = torch.tensor([*(x * y for x, y in pairs), c], dtype=torch.float64)
        if not bool(exact.isfinite().all()):
            c = float(exact.sum())  # IEEE 754's, for NaN and infinities
            continue
        terms = [(Fraction(x) * Fraction(y), x, y) for x, y in pairs if x and y]
        exponents = [exponent(Fraction(x), formats[0]) + exponent(Fraction(y), formats[1]) for _, x, y in terms]
        exponents += [exponent(Fraction(c), FP32)] if c else []
        top = max([unit.floor, *exponents])
        total = sum((cut(term, top - unit.fraction) for term in [*(t for t, _, _ in terms), Fraction(c)]), Fraction(0))
        stored = cut(total, exponent(total, FP32) - unit.stored) if total else total
        sign = -1.0 if stored < 0 else 1.0
        c = sign * (float("inf") if abs(stored) >= 2**128 else float(abs(stored)))
    return c


def patterns(fmt: Format, shape: tuple[int, ...], generator: torch.Generator, first: int, last: int, style: str) -> Tensor:
    """Numbers of a format in FP64 whose exponent codes are in a range; 0 is that of subnormal numbers and of zero."""
    m = fmt.mantissa_bits
    code = torch.randint(first, last + 1, shape, generator=generator)
    bits = {"any": torch.randint(0, 2**m, shape, generator=generator), "powers": torch.zeros(shape, dtype=torch.int64)}
    fraction = bits.get(style, torch.full(shape, 2**m - 1))
    sign = 1 - 2 * torch.randint(0, 2, shape, generator=generator)
    numbers = torch.ldexp((fraction + 2**m * (code > 0)).double() * sign, code.clamp(min=1) + fmt.emin - 1 - m)
    return numbers.clamp(-fmt.max, fmt.max)  # E4M3's largest code is NaN


def cancel(a: Tensor, b: Tensor) -> None:
    """Of each 8 products the second is minus the first: where these are the largest, what they cut off the others shows."""
    pairs = a[..., 1::8].shape[-1]
    a[..., 1::8], b[..., 1::8] = -a[..., ::8][..., :pairs], b[..., ::8][..., :pairs]


def range_of(fmt: Format, low: float, width: float) -> tuple[int, int]:
    """A range of exponent codes: where it begins, and how much of the rest it has, both from 0 to 1."""
    last = fmt.emax - fmt.emin + 1
    first = round(low * last)
    return first, first + round(width * (last - first))


def same_bits(got: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors of FP32 numbers are the same bits, or NaN both."""
    got, expected = got.float(), expected.float()
    return (got.view(torch.int32) == expected.view(torch.int32)) | (got.isnan() & expected.isnan())


styles = st.sampled_from(["any", "powers", "largest"])
kinds = st.sampled_from(["plain", "cancelling", "sparse", "special", "from zero"])
ranges = st.tuples(st.sampled_from([0.0, 0.0, 0.1, 0.2, 0.5, 0.9, 1.0]), st.sampled_from([0.0, 0.0, 0.1, 0.3, 1.0]))


@settings(max_examples=400)
@given(st.sampled_from(CASES), st.integers(1, 70), ranges, ranges, st.integers(-40, 40), styles, kinds, st.integers(0, 2**20))
def test_equals_exact_rationals(
    case: tuple[Architecture, Format, Format],
    inner: int,
    of_a: tuple[float, float],
    of_b: tuple[float, float],
    shift: int,
    style: str,
    kind: str,
    seed: int,
) -> None:
    """From subnormal numbers to overflow, the accumulator near the largest product; powers of two lie at the edges of cuts."""
    (_, left, right), unit, generator = case, unit_of(*case), torch.Generator().manual_seed(seed)
    codes = range_of(left, *of_a), range_of(right, *of_b)
    a, b = patterns(left, (3, inner), generator, *codes[0], style), patterns(right, (inner, 2), generator, *codes[1], style)
    last = max(0, min(254, sum(fmt.emin - 1 + code for fmt, (_, code) in zip((left, right), codes, strict=True)) + 127 + shift))
    c = patterns(FP32, (3, 2), generator, max(last - 20, 0), last, "any")
    if kind == "cancelling":
        cancel(a, b.T)
    if kind == "sparse":
        a[torch.rand(a.shape, generator=generator) < 0.7] = 0.0
    if kind == "special":
        a[0, inner // 2], b[inner // 3, 1] = (float("nan"), float("inf")) if seed % 2 else (float("-inf"), float("inf"))
        c[1, 0] = float("inf") if seed % 3 else float("nan")
    c = torch.zeros_like(c) if kind == "from zero" else c
    got = check(case, a, b, None if kind == "from zero" else c)
    assert bool(same_bits(unit(a[1:2], b, c[1:2]), got[1:2]).all()), "rows are independent"


def check(case: tuple[Architecture, Format, Format], a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    """The sums, which are those in exact rationals."""
    unit, starts = unit_of(*case), [[0.0] * b.shape[1]] * len(a) if c is None else c.tolist()
    rows = zip(a.tolist(), starts, strict=True)
    sums = [[chain(x, y, start, unit, case[1:]) for y, start in zip(b.T.tolist(), row, strict=True)] for x, row in rows]
    got = unit(a, b, c)
    assert bool(same_bits(got, torch.tensor(sums, dtype=torch.float64)).all()), (got, sums)
    return got


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[1] in (BF16, E4M3FN)], ids=lambda case: f"{case[0].value}-{case[1]}"
)
def test_near_the_smallest_numbers_of_fp32(case: tuple[Architecture, Format, Format]) -> None:
    """BF16's smallest products are below them, where the smallest exponent that terms are aligned to cuts; FP8's are 0 there."""
    generator, sums = torch.Generator().manual_seed(3), 0
    for largest in range(-165, -120):  # exponents of the products
        first = max(1, largest + 126)
        a = patterns(BF16, (4, 40), generator, first, first + 2, "any") * (case[1] == BF16)
        b = torch.ldexp(
            torch.ones(40, 4, dtype=torch.float64), torch.randint(largest - 6, largest + 1, (40, 4), generator=generator)
        )
        b = b.mul(2.0 ** -(first - 127)).clamp(min=2.0**-133) * (case[1] == BF16)
        c = patterns(FP32, (4, 4), generator, 0, 2, "any") * torch.randint(0, 2, (4, 4), generator=generator)
        sums += int(check(case, a, b, c if largest % 2 else None).count_nonzero())
    assert sums > 100
    zero = -torch.zeros(1, 1, dtype=torch.float64)
    assert float(torch.copysign(torch.ones(()), unit_of(*case)(zero, zero + 1.0, zero))) == 1.0


def test_what_was_read_from_an_h200() -> None:
    """One `wgmma` at a time: the figures that the module cites as readings of our own."""
    x = torch.zeros(10, 32, dtype=torch.float64)
    x[:, 0], x[:, 1], ones = 256.0, 2.0 ** -torch.arange(10), torch.ones(32, 1, dtype=torch.float64)
    units = {fmt: unit_of(Architecture.HOPPER, fmt, fmt) for fmt in (E4M3FN, E5M2, BF16, FP16)}
    lost = {fmt: (unit(x, ones) == 256.0).flatten().tolist() for fmt, unit in units.items()}
    assert lost[E4M3FN] == lost[E5M2] == [False] * 6 + [True] * 4
    assert lost[BF16] == lost[FP16] == [False] * 10
    start, more = torch.tensor([[2.0**23]], dtype=torch.float64), torch.tensor([[1.5]], dtype=torch.float64)
    for fmt in (BF16, FP16):
        assert units[fmt](more, ones[:1], start) - start == 1.0


def test_promotion_adds_the_sums_of_the_tensor_cores_in_fp32() -> None:
    """The product of every 64 begins anew; `start` is what they add to."""
    generator = torch.Generator().manual_seed(1)
    a, b = (patterns(E4M3FN, shape, generator, 1, 15, "any").float() for shape in ((5, 200), (200, 3)))
    unit, dot = unit_of(Architecture.HOPPER, E4M3FN, E4M3FN), Dot.parse("hopper@64")
    assert (str(dot), dot.accumulate, dot.architecture) == ("hopper@64", Cast(FP32), Architecture.HOPPER)
    total = torch.zeros(5, 3)
    for first in range(0, 200, 64):
        total = total + unit(a[:, first : first + 64], b[first : first + 64])
    assert torch.equal(dot(a, b, unit=unit), total)
    assert torch.equal(Dot.parse("hopper")(a, b, unit=unit), unit(a, b))
    assert torch.equal(dot(a, b, unit=unit, start=total), unit(a, b, total))
    assert not torch.equal(unit(a, b), total)
    for refused in (Dot.parse("hopper"), Dot.parse("volta@4")):
        with pytest.raises(BadInput, match="^dot: "):
            replace(refused, accumulate=Cast(BF16))


def test_matrices_share_the_right_operand() -> None:
    """As in `product`: its last leading dimension is 1 where matrices of the left one share it."""
    unit, a, b = UNITS[Architecture.AMPERE][BF16,], torch.randn(2, 3, 4, 40).bfloat16().float(), torch.randn(2, 1, 40, 5)
    got = unit(a, b := b.bfloat16().float())
    for i in range(2):
        for j in range(3):
            assert torch.equal(got[i, j], unit(a[i, j], b[i, 0]))


@triton.jit  # type: ignore[untyped-decorator]
def multiply(p_a, p_b, p_c, p_out, K: tl.constexpr, EVERY: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: `out = c + a b^T` of 64 rows and 64 columns, by `wgmma`; EVERY is None without promotion."""
    rows, depth = tl.arange(0, 64), tl.arange(0, K)
    o_ab = tl.program_id(0) * 64 * K + rows[:, None] * K + depth[None, :]
    o_c = tl.program_id(0) * 64 * 64 + rows[:, None] * 64 + rows[None, :]
    b_a, b_b, b_c = tl.load(p_a + o_ab), tl.load(p_b + o_ab), tl.load(p_c + o_c)
    tl.store(p_out + o_c, tl.dot(b_a, b_b.T, b_c, max_num_imprecise_acc=EVERY, out_dtype=tl.float32))


TORCH = {BF16: torch.bfloat16, FP16: torch.float16, E4M3FN: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
TRITON = {BF16: "*bf16", FP16: "*fp16", E4M3FN: "*fp8e4nv", E5M2: "*fp8e5"}
PROGRAMS = 256  # of 64 x 64 sums each: 2^20


def drawn(fmt: Format, what: str, generator: torch.Generator, inner: int, *, is_left: bool) -> Tensor:
    """`[PROGRAMS, 64, inner]` numbers, the exponents of each program within a range of its own.

    Sums of BF16 products are within the normal numbers of FP32, except at the `edges`.
    """
    low, high = (70, 185) if fmt == BF16 and what != "edges" else (0, fmt.emax - fmt.emin + 1)
    parts = list[Tensor]()
    for program in range(PROGRAMS):
        width = min(high - low, 1 + program % 40)  # binades, so that the exponents of products cover twice as many
        first = int(torch.randint(low, high - width + 1, (), generator=generator))
        if what == "subnormals" and (is_left or program % 2):
            first, width = 0, program % 3
        style = ("any", "powers", "largest")[program % 3]
        parts.append(patterns(fmt, (64, inner), generator, first, first + width, style))
    x = torch.stack(parts)
    if what == "special":
        places = torch.rand(x.shape, generator=generator)
        infinity = float("nan") if fmt == E4M3FN else float("inf")
        x = x.masked_fill(places < 3e-4, float("nan")).masked_fill((places > 3e-4) & (places < 1e-3), infinity)
    if what == "zeros":
        x = x.masked_fill(torch.rand(x.shape, generator=generator) < 0.6, 0.0)
    assert torch.equal(x.to(TORCH[fmt]).double().nan_to_num(7e7), x.nan_to_num(7e7)), "these are numbers of the format"
    return x


def started(a: Tensor, b: Tensor, what: str, generator: torch.Generator) -> Tensor:
    """Accumulators of FP32: 0, one as large as a product of the program up to factors of 2^20, or any FP32 number."""
    size = (a.nan_to_num(1.0, 1.0, 1.0).abs().amax((1, 2)) * b.nan_to_num(1.0, 1.0, 1.0).abs().amax((1, 2))).clamp(max=2.0**100)
    shift = torch.randint(-20, 21, (PROGRAMS, 64, 64), generator=generator)
    near = torch.ldexp(torch.rand(PROGRAMS, 64, 64, dtype=torch.float64, generator=generator) - 0.5, shift) * size[:, None, None]
    anywhere = patterns(FP32, (PROGRAMS, 64, 64), generator, 0, 253, "any")
    which = torch.arange(PROGRAMS)[:, None, None] % 4
    c = torch.where(which == 0, 0.0, torch.where(which == 3, anywhere, near)).float()
    return c if what != "special" else c.masked_fill(torch.rand(c.shape, generator=generator) < 1e-3, float("-inf"))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("what", ["plain", "cancelling", "zeros", "subnormals", "special", "edges"])
@pytest.mark.parametrize(("instructions", "every"), [(1, None), (4, None), (4, 1), (8, 2)])
@pytest.mark.parametrize("formats", HOPPER, ids=lambda formats: "-".join(map(str, formats)))
def test_a_gpu_gives_the_same_bits(formats: tuple[Format, Format], instructions: int, every: int | None, what: str) -> None:
    """2^20 sums a case, of one instruction and of several, promoted or not; Triton promotes FP8 alone."""
    unit = unit_of(Architecture.HOPPER, *formats)
    if every is not None and unit.products != 32:
        pytest.skip("Triton promotes sums of FP8 products alone")
    generator, inner = torch.Generator().manual_seed(instructions), instructions * unit.products
    a, b = (drawn(fmt, what, generator, inner, is_left=left) for fmt, left in zip(formats, (True, False), strict=True))
    if what == "cancelling":
        cancel(a, b)
    c, step = started(a, b, what, generator), inner if every is None else every * unit.products
    on_gpu, out = [x.to(TORCH[fmt]).cuda() for x, fmt in zip((a, b), formats, strict=True)], torch.empty_like(c, device="cuda")
    multiply[PROGRAMS,](*on_gpu, c.cuda(), out, inner, None if every is None else step, num_warps=4)
    a, b, total = a.cuda(), b.mT.contiguous().cuda(), c.cuda()
    for k in range(0, inner, step):
        sums = unit(a[..., k : k + step], b[..., k : k + step, :], total.double() if every is None else None).float()
        total = sums if every is None else total + sums
    wrong = (~same_bits(out, total)).nonzero()
    first = tuple(wrong[0].tolist()) if len(wrong) else ()
    assert not len(wrong), (
        f"{len(wrong)} of {out.numel()}; at {first}: {out[first].item()!r} for {total[first].item()!r}, c {c[first].item()!r}, "
        f"a {a[first[0], first[1]].tolist()}, b {b[first[0], :, first[2]].tolist()}"
    )


@pytest.mark.slow
def test_the_kernel_of_the_gpu_test_is_a_chain_of_instructions() -> None:
    """As it is compiled for an H100: so many `wgmma`, each on the sum of the last; additions in FP32 only where it promotes."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.arithmetic.test_tensor_cores"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr


def check_compiled() -> None:
    from tests.attention.kernels.test_compiled import compile_for

    for formats in HOPPER:
        products = unit_of(Architecture.HOPPER, *formats).products
        for instructions, every in ((1, None), (4, None), *(((4, 1), (8, 2)) if products == 32 else ())):
            values: dict[str, Any] = {"K": instructions * products, "EVERY": None if every is None else every * products}
            types = {"p_a": TRITON[formats[0]], "p_b": TRITON[formats[1]], "p_c": "*fp32", "p_out": "*fp32"}
            ptx = compile_for(multiply, values, types, 90, {"num_warps": 4}).asm["ptx"]
            assert ptx.count("wgmma.mma_async.sync.aligned.m64n64k") == instructions, (formats, values)
            promotions = 0 if every is None else instructions // every
            additions = ptx.count("add.f32") + ptx.count("add.rn.f32") + 2 * ptx.count("add.rn.f32x2")
            assert additions == promotions * 32, (formats, values, additions)  # 64 x 64 sums in 128 threads


if __name__ == "__main__":
    check_compiled()
