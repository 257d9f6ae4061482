"""Formats against tables decoded code by code, and against torch's own codes and limits."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, TF32, Format, Specials, format_of
from numdev.errors import BadInput
from tests.oracles.table import Table

SMALL = [
    *(Format(e, m, s) for e in range(2, 7) for m in range(1, 7) if 1 + e + m <= 8 for s in Specials),
    *(Format(0, bits - 1, Specials.FINITE) for bits in range(2, 9)),
]
TABLED = [*SMALL, BF16, FP16]
WITH_DTYPE = [FP64, FP32, BF16, FP16, E4M3FN, E5M2]

formats = st.one_of(
    st.builds(Format, st.integers(2, 11), st.integers(1, 52)),
    st.builds(Format, st.integers(2, 10), st.integers(1, 52), st.sampled_from([Specials.NAN_ONLY, Specials.FINITE])),
    st.builds(Format, st.just(0), st.integers(1, 31), st.just(Specials.FINITE)),
)


@pytest.mark.parametrize("fmt", TABLED, ids=str)
def test_values_and_derived_facts_equal_the_decoded_table(fmt: Format) -> None:
    table = Table(fmt)
    magnitudes = table.numbers[:-1]
    assert fmt.values().tolist() == [-x for x in reversed(magnitudes) if x] + list(magnitudes)
    assert fmt.values().dtype == torch.float64
    assert fmt.max == table.largest
    assert fmt.min_subnormal == magnitudes[1]
    assert fmt.bits == 1 + math.ceil(math.log2(len(magnitudes)))
    if not fmt.is_integer:
        assert fmt.min_normal == table.smallest_normal
        above_one = magnitudes[magnitudes > 1].min() if (magnitudes > 1).any() else table.numbers[-1]
        assert fmt.u == (above_one - 1) / 2


@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=str)
def test_derived_facts_equal_those_of_the_dtype(fmt: Format) -> None:
    assert fmt.dtype is not None
    info = torch.finfo(fmt.dtype)
    assert (fmt.max, fmt.min_normal, 2 * fmt.u, fmt.bits) == (info.max, info.tiny, info.eps, info.bits)
    assert fmt.min_subnormal == info.tiny * info.eps
    assert format_of(fmt.dtype) == fmt


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3FN, E5M2], ids=str)
def test_values_are_what_torch_reads_from_every_code(fmt: Format) -> None:
    assert fmt.dtype is not None
    integer = torch.int16 if fmt.bits == 16 else torch.uint8
    codes = torch.arange(2**fmt.bits).to(integer)
    read = codes.view(fmt.dtype).double()
    assert torch.equal(read[read.isfinite()].unique(), fmt.values())
    assert bool(read.isinf().any()) == fmt.has_infinity
    assert bool(read.isnan().any()) == fmt.has_nan


def test_covers_is_inclusion_of_the_tables() -> None:
    tables = {fmt: set(fmt.values().tolist()) for fmt in SMALL}
    for wide, numbers in tables.items():
        for narrow, others in tables.items():
            assert wide.covers(narrow) == (others <= numbers), f"{wide} covers {narrow}"


@given(formats, st.floats(allow_nan=False, allow_infinity=False))
def test_ulp_by_rational_arithmetic(fmt: Format, x: float) -> None:
    exponent = fmt.emin
    magnitude = Fraction(abs(x))
    while exponent < fmt.emax and magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    expected = float(Fraction(2) ** (exponent - fmt.mantissa_bits))  # 0 below FP64's smallest number
    assert fmt.ulp(torch.tensor(x, dtype=torch.float64)).item() == expected


@given(formats)
def test_name_reads_back(fmt: Format) -> None:
    assert Format.parse(fmt.name) == fmt
    assert Format.parse(str(fmt)) == fmt


@pytest.mark.parametrize("text", ["", "bf17", "e4m3ieee", "e0m3", "e4", "m3", "int", "int1", "int0", "int33", "BF16"])
def test_unknown_names_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="^format: "):
        Format.parse(text)


WIDTHS = [*((e, m, Specials.IEEE) for e, m in ((1, 3), (12, 3), (-1, 3), (5, 0), (5, 53), (0, 3)))]
WIDTHS += [(0, 3, Specials.NAN_ONLY), *((0, m, Specials.FINITE) for m in (0, 32)), (11, 10, Specials.NAN_ONLY)]


@pytest.mark.parametrize(("exponent", "mantissa", "specials"), [*WIDTHS, (11, 10, Specials.FINITE)])
def test_impossible_widths_are_refused(exponent: int, mantissa: int, specials: Specials) -> None:
    with pytest.raises(BadInput, match="^format: 'e") as caught:
        Format(exponent, mantissa, specials)
    assert caught.value.field == "format"


def test_what_has_no_table_or_no_format_is_refused() -> None:
    with pytest.raises(BadInput, match="^format: 'tf32'"):
        TF32.values()
    with pytest.raises(BadInput, match=r"^dtype: 'torch\.int32'"):
        format_of(torch.int32)
