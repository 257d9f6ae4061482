"""Microscaled formats against exact rationals, from their published rules alone, and against gfloat where it has them."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import gfloat
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numdev.arithmetic.formats import E4M3FN
from numdev.arithmetic.microscale import MICROSCALED, BlockScale, Microscaled
from numdev.arithmetic.quantise import Quantised
from numdev.arithmetic.rounding import Cast
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.tiled import Tiled
from numdev.errors import BadInput
from tests.cases import draw

POWERS = [name for name in MICROSCALED if name.startswith("mx")]
BLOCK_ONLY = "e2m1finite/16/e4m3"

# Element formats as the standard tabulates them (OCP MX v1.0, tables 2 to 5): exponent and mantissa bits, largest, its exponent.
ELEMENTS: dict[str, tuple[int, int, int | Fraction, int]] = {
    "mxfp8_e4m3": (4, 3, 448, 8),
    "mxfp8_e5m2": (5, 2, 57344, 15),
    "mxfp6_e3m2": (3, 2, 28, 4),
    "mxfp6_e2m3": (2, 3, Fraction(15, 2), 2),
    "mxfp4": (2, 1, 6, 2),
    "nvfp4": (2, 1, 6, 2),
    BLOCK_ONLY: (2, 1, 6, 2),
}
SCALE = (4, 3, 448, 8)  # E4M3
numbers = st.floats(-1e4, 1e4).map(lambda x: x if abs(x) > 1e-6 else 0.0) | st.integers(-64, 64).map(lambda i: i / 8)


def table(exponent_bits: int, mantissa_bits: int, largest: int | Fraction) -> list[Fraction]:
    """All numbers of a format that are not negative, from its definition, ascending; every second has an even code."""
    bias, found = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, fraction = divmod(code, 2**mantissa_bits)
        mantissa = Fraction(fraction, 2**mantissa_bits) + (1 if exponent else 0)
        found.append(mantissa * Fraction(2) ** (max(exponent, 1) - bias))
    return [value for value in found if value <= largest]


def nearest(x: Fraction, values: list[Fraction]) -> Fraction:
    """The nearest number, at a tie that of even code, beyond the largest the largest; the sign is kept."""
    size = abs(x)
    low = max(i for i, value in enumerate(values) if value <= size)
    if low + 1 < len(values):
        below, above = size - values[low], values[low + 1] - size
        low += above < below or (above == below and low % 2 == 1)
    return values[low] if x >= 0 else -values[low]


def floor_log2(x: Fraction) -> int:
    power = x.numerator.bit_length() - x.denominator.bit_length()
    return power if Fraction(2) ** power <= x else power - 1


def oracle(row: list[float], name: str, block: int, tensor: Fraction | None = None) -> list[Fraction]:
    """Rounding of one row of blocks, each step in rationals."""
    exponent_bits, mantissa_bits, largest, emax = ELEMENTS[name]
    values, result = table(exponent_bits, mantissa_bits, largest), []
    for start in range(0, len(row), block):
        part = [Fraction(x) for x in row[start : start + block]]
        top = max(abs(x) for x in part)
        if top == 0:
            scale = Fraction(0)
        elif name in POWERS:
            scale = Fraction(2) ** min(max(floor_log2(top) - emax, -127), 127)
        else:
            whole = Fraction(1) if tensor is None else tensor
            scale = nearest(top / largest / whole, table(*SCALE[:3])) * whole
        result += [nearest(x / scale, values) * scale if scale else Fraction(0) for x in part]
    return result


def tensor_scale(rows: list[list[float]]) -> Fraction:
    """That of NVFP4, an FP32 number."""
    largest = max(abs(Fraction(x)) for row in rows for x in row)
    exact = largest / (6 * 448)
    if exact == 0:
        return Fraction(1)
    quantum = Fraction(2) ** (max(floor_log2(exact), -126) - 23)
    return round(exact / quantum) * quantum


@settings(max_examples=60)
@given(st.sampled_from([*MICROSCALED, BLOCK_ONLY]), st.integers(1, 70), st.integers(1, 3), st.data())
def test_is_the_rule_in_exact_rationals(name: str, width: int, height: int, data: st.DataObject) -> None:
    """Bit for bit but for NVFP4, whose two scales multiply to 28 bits and more: 2 roundings of FP64."""
    rows = data.draw(st.lists(st.lists(numbers, min_size=width, max_size=width), min_size=height, max_size=height))
    fmt = Microscaled.parse(name)
    got = fmt(torch.tensor(rows, dtype=torch.float64))
    tensor = tensor_scale(rows) if name == "nvfp4" else None
    for row, rounded in zip(rows, got.tolist(), strict=True):
        for value, wanted in zip(rounded, oracle(row, name, fmt.block, tensor), strict=True):
            assert abs(Fraction(value) - wanted) <= (abs(wanted) * Fraction(2) ** -51 if name == "nvfp4" else 0)


@pytest.mark.parametrize("carrier", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POWERS)
def test_agrees_with_gfloat(name: str, carrier: torch.dtype) -> None:
    info = getattr(gfloat_formats, f"format_info_{name}_e2m1" if name == "mxfp4" else f"format_info_{name}")
    generator = torch.Generator().manual_seed(1)
    size = (40, 32)
    x = torch.randn(size, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(-90, 90, (40, 1), generator=generator)
    x = x.to(carrier).double()
    expected = np.stack([gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in x.numpy()])
    assert torch.equal(Microscaled.parse(name)(x.to(carrier)).double(), torch.from_numpy(expected))


@pytest.mark.parametrize("name", POWERS)
def test_the_error_is_that_of_an_element_or_of_its_saturation(name: str) -> None:
    """Within `X max(u |x / X|, q / 2)`, q the spacing of the smallest numbers; beyond `max X` the result is that."""
    fmt = Microscaled.parse(name)
    x = torch.randn(50, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounded, element = fmt(x), fmt.element.to
    largest = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(largest)) - element.emax).expand(50, 2, 32).flatten(1)
    bound = scale * torch.clamp(element.u * (x / scale).abs(), min=element.min_subnormal / 2)
    saturated = (x / scale).abs() > element.max
    assert bool(((rounded - x).abs() <= bound)[~saturated].all())
    assert bool((rounded.abs() == element.max * scale)[saturated].all())
    assert bool(saturated.any())


def test_scales_stay_in_their_range() -> None:
    """E8M0 ends at 2^-127 and 2^127: smaller blocks lose bits, and vanish at last."""
    fmt = Microscaled.parse("mxfp4")
    for power, expected in ((-128, 2.0**-128), (-129, 0.0), (-300, 0.0), (129, 2.0**129), (131, 6.0 * 2.0**127)):
        x = torch.full((1, 32), 2.0**power, dtype=torch.float64)
        assert fmt(x).unique().tolist() == [expected], power


def test_zeros_and_blocks_that_vanish_are_zero() -> None:
    for name in (*MICROSCALED, BLOCK_ONLY):
        assert torch.equal(Microscaled.parse(name)(torch.zeros(2, 40)), torch.zeros(2, 40))
    tiny = torch.full((1, 16), 2.0**-12)  # 2^-12 / 6 is below half of E4M3's smallest number, 2^-9
    assert torch.equal(Microscaled.parse(BLOCK_ONLY)(tiny), torch.zeros(1, 16))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*POWERS, BLOCK_ONLY])
def test_what_is_no_number_spoils_its_block_alone(name: str, bad: float) -> None:
    fmt = Microscaled.parse(name)
    x = torch.randn(3, 3 * fmt.block, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spoilt = x.clone()
    spoilt[1, fmt.block + 2] = bad
    got, inside = fmt(spoilt), torch.zeros_like(x, dtype=torch.bool)
    inside[1, fmt.block : 2 * fmt.block] = True
    assert torch.equal(got.isnan(), inside)
    assert torch.equal(got[~inside], fmt(x)[~inside])


@settings(max_examples=30)
@given(st.sampled_from([*POWERS, BLOCK_ONLY]), st.integers(1, 40), st.integers(1, 9), st.integers(0, 99))
def test_blocks_are_alone(name: str, width: int, block: int, seed: int) -> None:
    """A block's numbers depend on no other: a whole row is its blocks in turn, along any dimension."""
    named = Microscaled.parse(name)
    fmt = Microscaled(named.element, block, named.scale)
    x = torch.randn(2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    parts = [fmt(x[:, a:b]) for a, b in pairwise([*range(0, width, block), width])]
    assert torch.equal(fmt(x), torch.cat(parts, 1))
    assert torch.equal(fmt.along(x.T, 0), fmt(x).T)


def test_the_argument_is_left_alone_and_its_type_kept() -> None:
    x = torch.randn(4, 40)
    kept = x.clone()
    assert Microscaled.parse("mxfp8_e4m3")(x).dtype is torch.float32
    assert torch.equal(x, kept)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp6_e2m3"])
def test_blocks_of_inputs_lie_along_what_is_summed_over(name: str) -> None:
    """Of q and k along head_dim, of v along tokens: enlarging one number changes its block and nothing else."""
    fmt = Microscaled.parse(name)
    inputs = draw((1, 2, 2, 70, 70, 70))
    inputs[0][0, 0, 0, 0] = 1000.0  # NVFP4's scale of the tensor is not to move
    quantised, plain = Quantised(fmt), Quantised(fmt)(*inputs)
    for place, axis in ((1, -1), (2, -2)):
        inputs[place][0, 0, 0, 0] = 999.0
        first = [t.clone() for t in inputs]
        first[place][0, 0, 35, 35] = 9.0
        changed = (quantised(*first)[place] != quantised(*inputs)[place])[0, 0].nonzero()
        along = changed[:, axis]
        start = 35 // fmt.block * fmt.block
        assert set(changed[:, -3 - axis].tolist()) == {35}
        assert set(along.tolist()) <= set(range(start, start + fmt.block))
        assert len(along) > 1
    assert torch.equal(plain[0], fmt(inputs[0]))


def test_p_of_a_tile_is_microscaled_by_runs_of_keys() -> None:
    """With V the unit matrix the output is P~ itself: SageAttention3's, for scores that make known P."""
    precision = Precision.parse("sage3")
    scores = torch.tensor([0.0, -1.0, -2.0, -3.0] * 8, dtype=torch.float64)
    q, k = torch.ones(1, 1, 1, 1), scores.reshape(1, 1, 32, 1)
    v = torch.eye(32, dtype=torch.float64).reshape(1, 1, 32, 32)
    wide = Tiled(Precision.golden().with_step(probabilities=precision.probabilities))
    p = torch.exp(scores)
    got = wide(q, k, v, Mask(), 1.0).out.flatten() * p.sum()
    assert isinstance(precision.probabilities, Microscaled)
    wanted = oracle(p.tolist(), BLOCK_ONLY, 16)
    assert got.tolist() == pytest.approx([float(x) for x in wanted], rel=1e-14)


def test_names_and_texts() -> None:
    for name, fmt in MICROSCALED.items():
        assert str(fmt) == name
        assert Microscaled.is_named_by(name)
        assert Microscaled.parse(f"{fmt.element}/{fmt.block}/{fmt.scale.value}") == fmt
    assert str(Microscaled.parse("e2m1finite/16/e4m3")) == "e2m1finite/16/e4m3"
    assert repr(Microscaled.parse("e4m3fn:saturate/8/e8m0")) == "Microscaled(e4m3fn:saturate/8/e8m0)"
    assert not Microscaled.is_named_by("e2m1finite")
    assert [fmt.block for fmt in MICROSCALED.values()] == [32] * 5 + [16]
    assert MICROSCALED["nvfp4"].scale is BlockScale.E4M3_FP32


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("e2m1finite/32", "microscaled"),
        ("e2m1finite/32/e5m2", "microscaled"),
        ("e2m1finite/x/e8m0", "microscaled"),
        ("e2m1finite/0/e8m0", "microscaled.block"),
        ("e4m3fn/32/e8m0", "microscaled.element"),
        ("e2m7z/32/e8m0", "format"),
    ],
)
def test_what_is_no_microscaled_format_is_refused(text: str, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        Microscaled.parse(text)
    assert caught.value.field == field


def test_elements_saturate_and_scales_too() -> None:
    """Above 448 * 6 the scale is E4M3's largest number and every element at most 6 of it."""
    x: Tensor = torch.full((1, 16), 1e5, dtype=torch.float64)
    assert Microscaled.parse(BLOCK_ONLY)(x).unique().tolist() == [E4M3FN.max * 6]
    assert Cast.parse("e2m1finite")(torch.tensor([7.0])).tolist() == [6.0]
