"""Casts: every breakpoint of every narrow format in every mode against a sorted table, and the fast paths bit by bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import gfloat
import numpy as np
import pytest
import torch
from gfloat import RoundMode
from gfloat import formats as gfloat_formats
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, TF32, Format, Specials
from numdev.arithmetic.rounding import Cast, Noise, Overflow, Rounding, Subnormals, round_scaled
from numdev.errors import BadInput
from tests.arithmetic.test_formats import SMALL, formats
from tests.oracles.table import Table, assert_same, round_exactly

CARRIERS = [np.float32, np.float64]
DETERMINISTIC = [mode for mode in Rounding if mode is not Rounding.STOCHASTIC]


def casts(fmt: Format, modes: Sequence[Rounding]) -> Iterator[Cast]:
    """Every cast to a format that can be asked for."""
    for mode, overflow, subnormals in itertools.product(modes, Overflow, Subnormals):
        possible = fmt.has_nan or overflow is Overflow.SATURATE
        if possible and not (fmt.is_integer and subnormals is Subnormals.FLUSHED):
            yield Cast(fmt, mode, overflow, subnormals)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("fmt", [*SMALL, BF16, FP16], ids=str)
def test_every_breakpoint_equals_the_table(fmt: Format, carrier: type[np.floating]) -> None:
    """Stochastic rounding goes to a neighbour, and keeps what is exact."""
    table = Table(fmt)
    x = table.breakpoints(carrier)
    at, tensor = table.locate(x), torch.from_numpy(x)
    for cast in casts(fmt, list(Rounding)):
        assert cast.overflow is not None
        result, how = cast(tensor), (cast.rounding, cast.overflow, cast.subnormals)
        assert result.dtype == tensor.dtype
        if cast.rounding is Rounding.STOCHASTIC:
            low, high = (at.result(index, *how) for index in (at.below, at.above))
            expected = np.where(result.numpy() == low, low, high)
        else:
            expected = at.round(*how)
        assert_same(result, expected, x, f"{cast} from {carrier.__name__}")


GFLOAT = {
    BF16: gfloat_formats.format_info_bfloat16,
    FP16: gfloat_formats.format_info_binary16,
    E4M3FN: gfloat_formats.format_info_ocp_e4m3,
    E5M2: gfloat_formats.format_info_ocp_e5m2,
    Format(3, 2, Specials.FINITE): gfloat_formats.format_info_ocp_e3m2,
    Format(2, 3, Specials.FINITE): gfloat_formats.format_info_ocp_e2m3,
    Format(2, 1, Specials.FINITE): gfloat_formats.format_info_ocp_e2m1,
}
GFLOAT_MODES = {
    Rounding.NEAREST_EVEN: RoundMode.TiesToEven,
    Rounding.NEAREST_AWAY: RoundMode.TiesToAway,
    Rounding.TOWARD_ZERO: RoundMode.TowardZero,
    Rounding.UP: RoundMode.TowardPositive,
    Rounding.DOWN: RoundMode.TowardNegative,
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("fmt", GFLOAT, ids=str)
def test_every_breakpoint_equals_gfloat(fmt: Format) -> None:
    x = Table(fmt).breakpoints(np.float64)
    for cast in casts(fmt, list(GFLOAT_MODES)):
        if cast.subnormals is Subnormals.KEPT:
            saturate = cast.overflow is Overflow.SATURATE
            theirs = gfloat.round_ndarray(GFLOAT[fmt], x, GFLOAT_MODES[cast.rounding], saturate)
            assert_same(cast(torch.from_numpy(x)), theirs, x, f"{cast} against gfloat")


def random_patterns(integer: torch.dtype, count: int = 1 << 16) -> Tensor:
    """Uniform over bit patterns: every exponent, subnormals, NaN and infinity."""
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max, (count,), dtype=integer)
    subnormal = torch.randint(0, 1 << 20, (count // 16,), dtype=integer)
    carrier = torch.float32 if integer is torch.int32 else torch.float64
    return torch.cat([bits, subnormal]).view(carrier)


FROM_FP32 = [TF32, E4M3FN, E5M2, Format(8, 13), Format(8, 21), Format(8, 22)]
FROM_FP64 = [BF16, FP16, FP32, TF32, Format(10, 50), Format(11, 20), Format(11, 51)]


@pytest.mark.parametrize(
    ("fmt", "integer"), [*((fmt, torch.int32) for fmt in FROM_FP32), *((fmt, torch.int64) for fmt in FROM_FP64)], ids=str
)
def test_the_cast_in_use_equals_the_specification(fmt: Format, integer: torch.dtype) -> None:
    """Whichever path a nearest-even cast takes from a carrier, near the format's own range too."""
    bits = random_patterns(integer)
    info = torch.finfo(bits.dtype)
    scaled = torch.randn(1 << 16, dtype=bits.dtype)
    spread = [scaled * factor for factor in (1.0, fmt.max / 2, fmt.min_normal, max(fmt.min_subnormal, info.tiny) * 4)]
    x = torch.cat([bits, *spread])
    specified = round_scaled(x, fmt, Rounding.NEAREST_EVEN)
    beyond = math.inf if fmt.has_infinity else math.nan
    over = specified.abs() > fmt.max
    limited = torch.where(over, torch.full_like(x, beyond).copysign(x), specified)
    assert_same(Cast(fmt)(x), limited, x, str(fmt))


ties = st.builds(
    lambda sign, exponent, top, tail: math.ldexp(sign * (top * 2**42 + tail % 2**42), exponent),
    st.sampled_from([-1, 1]),
    st.one_of(st.integers(-1200, 960), st.integers(-210, 90)),
    st.integers(0, 2**11),
    st.one_of(st.sampled_from([k + d for k in (0, 2**21, 2**38, 2**41) for d in (-1, 0, 1)]), st.integers(0, 2**42)),
)


@given(
    st.one_of(st.floats(allow_nan=False, allow_infinity=False), ties),
    st.sampled_from([TF32, Format(8, 13), Format(11, 30), FP32, Format(11, 4), Format(3, 40)]),
    st.sampled_from(DETERMINISTIC),
    st.sampled_from(Overflow),
)
def test_wide_formats_equal_rational_arithmetic(x: float, fmt: Format, mode: Rounding, overflow: Overflow) -> None:
    if math.isfinite(x):
        got = Cast(fmt, mode, overflow)(torch.tensor([x], dtype=torch.float64)).item()
        assert_same(got, round_exactly(x, fmt, mode, overflow), x, f"{fmt} {mode} {overflow}")


@pytest.mark.parametrize("carrier", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("x", [1 + 2.0**-12, -3.3, 1e-5, 2.0**-24 * 0.7, 1 + 2.0**-10 * 0.9])
def test_stochastic_rounding_is_unbiased(x: float, carrier: torch.dtype) -> None:
    """Of n results, `n f` go away from zero, `f` being the distance from below in units of the gap.

    The count is binomial with deviation `sqrt(n f (1 - f))`; six of them are exceeded once in 5e8 (the seed is fixed, so
    that the test does not flicker). The generator's own grain of 2^-24 adds at most 1.
    """
    cast, count = Cast(FP16, Rounding.STOCHASTIC, seed=1), 1 << 18
    exact = torch.tensor(x, dtype=carrier).item()
    table = Table(FP16)
    located = table.locate(np.array([exact]))
    low, high = float(table.numbers[located.below[0]]), float(table.numbers[located.above[0]])
    share = (abs(exact) - low) / (high - low)
    results = cast(torch.full((count,), x, dtype=carrier)).abs()
    away = int((results == high).sum())
    assert away + int((results == low).sum()) == count
    assert 0 < share < 1
    assert abs(away - count * share) <= 6 * math.sqrt(count * share * (1 - share)) + 1


def test_stochastic_rounding_is_independent_between_events_places_and_seeds() -> None:
    """Half-way values: two runs that share no randomness agree in half the places, give or take six deviations."""
    x = torch.full((4, 4, 64, 64), 1 + 2.0**-11)

    def up(seed: int, noise: Noise) -> Tensor:
        return Cast(FP16, Rounding.STOCHASTIC, seed=seed)(x, noise) > x

    first, count = Noise(total_rows=64), x.numel()
    events = [up(7, first) for _ in range(4)]
    base = events[0]
    tiles = []
    for split, tile in ((0, 0), (0, 1), (1, 0), (-1, -1), (0, -1)):
        first.at(split, tile, 0)
        tiles.append(up(7, first))
    others = [*events[1:], *tiles, up(8, Noise(total_rows=64)), *(base.roll(1, axis) for axis in range(4))]
    for other in others:
        assert abs(int((base == other).sum()) - count / 2) <= 6 * math.sqrt(count / 4)
    for one, other in itertools.combinations(tiles, 2):
        assert abs(int((one == other).sum()) - count / 2) <= 6 * math.sqrt(count / 4)


@pytest.mark.parametrize("carrier", [torch.float32, torch.float64], ids=str)
def test_stochastic_rounding_repeats_and_knows_the_place_of_a_row(carrier: torch.dtype) -> None:
    x = torch.randn(3, 50, 20, dtype=carrier)
    cast = Cast.parse("bf16:stochastic:seed=5")
    first = cast(x, Noise(total_rows=50))
    assert torch.equal(cast(x, Noise(total_rows=50)), first)
    assert not torch.equal(Cast.parse("bf16:stochastic:seed=6")(x, Noise(total_rows=50)), first)
    assert not torch.equal(cast(x.flip(1), Noise(total_rows=50)).flip(1), first)
    assert torch.equal(cast(x[:, 20:33], Noise(rows=20, total_rows=50)), first[:, 20:33])


@pytest.mark.parametrize("text", ["bf16", "e4m3fn", "fp16:up", "int8", "bf16:stochastic:seed=3", "tf32", "fp16:odd:flush"])
@pytest.mark.parametrize("carrier", [torch.float32, torch.float64], ids=str)
def test_in_place_on_any_layout(text: str, carrier: torch.dtype) -> None:
    cast = Cast.parse(text)
    base = torch.randn(6, 10, 8, dtype=carrier) * 20
    kept = base.clone()
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda t: t.mT,
        "strided": lambda t: t[:, ::3, 1::2],
        "strided line": lambda t: t[0, 0, ::2],
        "row": lambda t: t[2],
        "whole": lambda t: t,
        "scalar": lambda t: t[1, 2, 3],
        "empty": lambda t: t[:0],
    }
    for name, view in views.items():
        touched = base.clone()
        part = view(touched)
        want = cast(view(base).contiguous())
        returned = cast.apply_(part)
        assert torch.equal(part, want), name
        assert returned is part, name
        outside = base.clone()
        view(outside).copy_(want)
        assert torch.equal(touched, outside), f"{name}: what is outside the view changed"
    cast(base)
    assert torch.equal(base, kept)


@given(
    formats,
    st.sampled_from(Rounding),
    st.one_of(st.none(), st.sampled_from(Overflow)),
    st.sampled_from(Subnormals),
    st.integers(0, 99),
)
def test_text_reads_back(fmt: Format, mode: Rounding, overflow: Overflow | None, subnormals: Subnormals, seed: int) -> None:
    seed = seed if mode is Rounding.STOCHASTIC else 0
    overflow = overflow if fmt.has_nan else None
    cast = Cast(fmt, mode, overflow, Subnormals.KEPT if fmt.is_integer else subnormals, seed)
    assert Cast.parse(str(cast)) == cast
    assert str(Cast.parse(str(cast))) == str(cast)


HALF = [("bf16", torch.float16), ("bf16", torch.bfloat16), ("fp64", torch.float16)]


@pytest.mark.parametrize(("text", "dtype"), [*HALF, *((text, torch.float32) for text in ("e11m20", "e9m7", "int26"))])
def test_a_carrier_that_cannot_hold_the_format_is_refused(text: str, dtype: torch.dtype) -> None:
    with pytest.raises(BadInput, match="^dtype: "):
        Cast.parse(text)(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("carrier", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("text", ["fp32", "fp64", "fp32:saturate", "fp32:flush", "bf16"])
def test_a_cast_is_known_as_the_identity_where_it_changes_nothing(text: str, carrier: torch.dtype) -> None:
    cast, x = Cast.parse(text), torch.tensor([1e-40, -1e-40, 1 / 3, math.inf, -math.inf], dtype=carrier)
    y = cast(x)
    assert cast.is_identity_on(carrier) == torch.equal(y, x)
    if carrier is torch.float32 and text != "bf16":
        tiny, top = 0.0 if cast.subnormals is Subnormals.FLUSHED else 1e-40, FP32.max if "saturate" in text else math.inf
        assert_same(y, torch.tensor([tiny, -tiny, 1 / 3, top, -top]), x, text)


IMPOSSIBLE = {
    "format": ["bf17"],
    "cast": ["bf16:nearest", "bf16:seed=-1", "bf16:seed=x", "bf16:", "bf16:up:down", "e4m3fn:saturate:infinity"],
    "seed": ["bf16:seed=3", "bf16:seed=0", "bf16:up:seed=3"],
    "overflow": ["int8:infinity", "e2m1finite:infinity"],
    "subnormals": ["int8:flush"],
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_impossible_casts_are_refused(field: str) -> None:
    for text in IMPOSSIBLE[field]:
        with pytest.raises(BadInput, match=f"^{field}: "):
            Cast.parse(text)
