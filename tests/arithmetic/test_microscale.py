"""Microscaled formats against exact rationals, from their published rules alone."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import E4M3FN, FP32, Format, Specials
from numdev.arithmetic.quantise import MICROSCALED, Microscaled, Quantised
from numdev.arithmetic.rounding import Overflow, Rounding
from numdev.errors import BadInput
from tests.cases import draw
from tests.oracles.table import Table, round_exactly

POWERS = [name for name in MICROSCALED if name.startswith("mx")]
BLOCK_ONLY = "e2m1finite/16/e4m3"

# Element formats as the standard tabulates them (OCP MX v1.0, tables 2 to 5).
ELEMENTS = {
    "mxfp8_e4m3": Format(4, 3, Specials.NAN_ONLY),
    "mxfp8_e5m2": Format(5, 2),
    "mxfp6_e3m2": Format(3, 2, Specials.FINITE),
    "mxfp6_e2m3": Format(2, 3, Specials.FINITE),
    **dict.fromkeys(("mxfp4", "nvfp4", BLOCK_ONLY), Format(2, 1, Specials.FINITE)),
}
numbers = st.floats(-1e4, 1e4).map(lambda x: x if abs(x) > 1e-6 else 0.0) | st.integers(-64, 64).map(lambda i: i / 8)


def nearest(x: Fraction, fmt: Format) -> Fraction:
    """The nearest number, at a tie that of even code, beyond the largest the largest."""
    return Fraction(round_exactly(x, fmt, Rounding.NEAREST_EVEN, Overflow.SATURATE))


def floor_log2(x: Fraction) -> int:
    power = x.numerator.bit_length() - x.denominator.bit_length()
    return power if Fraction(2) ** power <= x else power - 1


def oracle(row: list[float], name: str, block: int, tensor: Fraction) -> list[Fraction]:
    """Rounding of one row of blocks, each step in rationals; `tensor` is the scale of all blocks."""
    fmt, result = ELEMENTS[name], []
    largest = Fraction(float(Table(fmt).largest))
    for start in range(0, len(row), block):
        part = [Fraction(x) for x in row[start : start + block]]
        top = max(abs(x) for x in part)
        if top == 0:
            scale = Fraction(0)
        elif name in POWERS:
            scale = Fraction(2) ** min(max(floor_log2(top) - floor_log2(largest), -127), 127)
        else:
            scale = nearest(top / largest / tensor, E4M3FN) * tensor
        result += [nearest(x / scale, fmt) * scale if scale else Fraction(0) for x in part]
    return result


@settings(max_examples=60)
@given(st.sampled_from([*MICROSCALED, BLOCK_ONLY]), st.integers(1, 70), st.integers(1, 3), st.data())
def test_is_the_rule_in_exact_rationals(name: str, width: int, height: int, data: st.DataObject) -> None:
    """Bit for bit but for NVFP4, whose two scales multiply to 28 bits and more: 2 roundings of FP64."""
    rows = data.draw(st.lists(st.lists(numbers, min_size=width, max_size=width), min_size=height, max_size=height))
    fmt = Microscaled.parse(name)
    got = fmt(torch.tensor(rows, dtype=torch.float64))
    exact = max(abs(Fraction(x)) for row in rows for x in row) / (6 * 448)
    tensor = nearest(exact, FP32) if name == "nvfp4" and exact else Fraction(1)
    for row, rounded in zip(rows, got.tolist(), strict=True):
        for value, expected in zip(rounded, oracle(row, name, fmt.block, tensor), strict=True):
            assert abs(Fraction(value) - expected) <= (abs(expected) * Fraction(2) ** -51 if name == "nvfp4" else 0)


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
