"""Formats that are lists of numbers: what the lists hold, by other definitions, and every rounding in exact arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.arithmetic.elementary import Operation, RoundedOnce
from numdev.arithmetic.formats import Format
from numdev.arithmetic.listing import LISTINGS, Listing, posit
from numdev.arithmetic.rounding import Cast, Overflow, Rounding, Subnormals
from numdev.errors import BadInput

NAMES = sorted(LISTINGS)
DTYPES = {"e4m3fnuz": torch.float8_e4m3fnuz, "e5m2fnuz": torch.float8_e5m2fnuz}


def points(fmt: Format) -> torch.Tensor:
    """Every number, every point where rounding turns, their neighbours in FP64, and what is beyond; both signs."""
    assert fmt.listing is not None
    held = np.array([*fmt.listing.numbers, *fmt.listing.turns, *(1.0009765625 * fmt.max, 2 * fmt.max, 1e300)])
    around = np.concatenate([held, np.nextafter(held, np.inf), np.nextafter(held, -np.inf)])
    return torch.from_numpy(np.concatenate([around, -around]))


@pytest.mark.parametrize("name", DTYPES)
def test_fnuz_is_torchs_own(name: str) -> None:
    fmt, dtype = Format.parse(name), DTYPES[name]
    decoded = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    assert torch.equal(decoded[decoded.isfinite()].sort().values, fmt.values())
    assert fmt.u == 2.0 ** -(int(name[3]) + 1)
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = x[x.abs() <= fmt.max]
    mine = Cast(fmt)(x)
    assert torch.equal(mine, x.to(dtype).float())


def encoded(x: Fraction, bits: int) -> int:
    """The code of the posit nearest to a positive number, by rounding its unlimited encoding (standard of 2022, section 4.1)."""
    power = 0
    while x >= Fraction(2) ** (power + 1):
        power += 1
    while x < Fraction(2) ** power:
        power -= 1
    regime, exponent = divmod(power, 4)
    text = "1" * (regime + 1) + "0" if regime >= 0 else "0" * -regime + "1"
    text += f"{exponent:02b}"
    rest = x / Fraction(2) ** power - 1
    for _ in range(64):
        rest *= 2
        text += "1" if rest >= 1 else "0"
        rest -= rest >= 1
    code, tail = int(text[: bits - 1], 2), text[bits - 1 :]
    above_half = tail[0] == "1" and ("1" in tail[1:] or rest > 0)
    half = tail[0] == "1" and not above_half
    code += above_half or (half and code % 2 == 1)
    return min(max(code, 1), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("bits", [8, 16])
@given(x=st.floats(min_value=2.0**-70, max_value=2.0**70))
def test_posits_round_as_their_encoding_does(bits: int, x: float) -> None:
    cast, numbers = Cast(Format.listed(posit(bits))), posit(bits).numbers
    result = float(cast(torch.tensor(x, dtype=torch.float64)))
    assert result == numbers[len(numbers) // 2 + encoded(Fraction(x), bits)]
    assert float(cast(torch.tensor(-x, dtype=torch.float64))) == -result


def neighbours(x: float | Fraction, listing: Listing) -> tuple[int, int]:
    """The places of the numbers around `x`, the outermost one for what is beyond."""
    low, high = bisect_right(listing.numbers, x) - 1, bisect_left(listing.numbers, x)  # type: ignore[type-var]
    return max(low, 0), min(high, len(listing.numbers) - 1)


@pytest.mark.parametrize("mode", [mode for mode in Rounding if mode is not Rounding.STOCHASTIC])
@pytest.mark.parametrize("name", ["nf4", "posit8", "e4m3fnuz"])
def test_every_turning_point_by_exact_comparison(name: str, mode: Rounding) -> None:
    fmt = Format.parse(name)
    listing = fmt.listing
    assert listing is not None
    x = points(fmt)
    for given_, got in zip(x.tolist(), Cast(fmt, mode, Overflow.SATURATE)(x).tolist(), strict=True):
        low, high = neighbours(given_, listing)
        place = {Rounding.UP: high, Rounding.DOWN: low, Rounding.TOWARD_ZERO: low if given_ > 0 else high}.get(mode, high)
        if mode is Rounding.ODD:
            place = low if (low - listing.numbers.index(0.0)) % 2 else high
        elif mode.is_nearest and low != high:
            turn = listing.turns[low]
            tie = given_ > 0 if mode is Rounding.NEAREST_AWAY else (high - listing.numbers.index(0.0)) % 2 == 0
            place = high if Fraction(given_) > Fraction(turn) or (given_ == turn and tie) else low
        if low == high:
            place = low
        assert got == listing.numbers[place], (given_, mode)


def test_what_is_beyond() -> None:
    far = torch.tensor([math.inf, -math.inf, 1e30, math.nan])
    assert Cast(Format.parse("e4m3fnuz"))(far).isnan().all()
    assert Cast.parse("e4m3fnuz:saturate")(far)[:3].tolist() == [240.0, -240.0, 240.0]
    assert Cast(Format.parse("nf4"))(far)[:3].tolist() == [1.0, -1.0, 1.0]
    assert Cast(Format.parse("posit8"))(torch.tensor([1e-30, -1e-30])).tolist() == [2.0**-24, -(2.0**-24)]
    with pytest.raises(BadInput, match="no normal numbers"):
        Cast(Format.parse("nf4"), subnormals=Subnormals.FLUSHED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", Rounding)
@pytest.mark.parametrize("name", ["posit8", "posit16", "posit8:saturate"])
def test_what_is_no_real_number_becomes_nar(name: str, mode: Rounding, dtype: torch.dtype) -> None:
    """Standard for Posit Arithmetic 2022: converting an infinity or NaN gives NaR, and every finite number a posit."""
    cast = replace(Cast.parse(name), rounding=mode)
    top = cast.to.max
    finite = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 2 * top, 0.0], dtype=dtype)
    assert cast(torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)).isnan().all()
    assert cast(finite).tolist() == [top, -top, top, 0.0]
    zero = torch.zeros(1, dtype=dtype)
    quotient = RoundedOnce(Operation.DIVIDE, cast, cast.to, cast.to, dtype)
    assert quotient(torch.ones(1, dtype=dtype), zero).isnan().all()


@pytest.mark.parametrize(
    ("numbers", "turns"),
    [((0.0, 1.0), ()), ((1.0, 2.0), (1.5,)), ((1.0, 0.0), (0.5,)), ((0.0, 1.0), (1.5,))],
)
def test_a_list_that_is_none_is_refused(numbers: tuple[float, ...], turns: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Listing("mine", numbers, turns)
