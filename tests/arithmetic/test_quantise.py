"""Numbers that share a scale: quantised inputs in units of the scale, microscaled formats against exact rationals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numdev import BadInput, Cast, Exact, Mask, Overflow, Rounding
from numdev.arithmetic.formats import E4M3FN, FP16, FP32, Format, Specials
from numdev.arithmetic.quantise import MICROSCALED, Microscaled, Quantised, Scale, Smoothing, random_hadamard
from tests.cases import U64, draw, lse_of, reach, weight_error
from tests.oracles.table import Table, round_exactly

GRIDS = ["int8", "int4", "e4m3fn", "e5m2", "e2m1finite"]
FINE = Cast(Format(8, 48))


def quantised_by(grid: str, scale: Scale) -> Quantised:
    """Groups that no length here is a multiple of; v has scales of its own where it cannot have those of q and k."""
    values = (Cast.parse(grid), Scale.CHANNEL) if scale is Scale.THREAD else (None, None)
    return Quantised(Cast.parse(grid), scale, 10, 12, values=values[0], values_scale=values[1])


def shares(name: str, scale: Scale, token: int, channel: int) -> tuple[int, ...]:
    """A key that the numbers of one head have in common that share a scale."""
    rows = 12 if name == "q" else 10
    thread = token % rows % 8
    return {
        Scale.TENSOR: (),
        Scale.HEAD: (),
        Scale.BLOCK: (token // rows,),
        Scale.ROW: (token,),
        Scale.CHANNEL: (-1 - channel,),
        Scale.THREAD: (token // rows, thread if name == "q" else thread // 2),
    }[scale]


def scales(name: str, x: Tensor, quantised: Quantised) -> Tensor:
    """The scale of every number, one by one."""
    scale = quantised.values_scale if name == "v" and quantised.values_scale else quantised.scale
    assert scale is not None
    largest: dict[tuple[int, ...], float] = {}
    places = list(itertools.product(*map(range, x.shape)))
    keys = {place: (() if scale is Scale.TENSOR else place[:2]) + shares(name, scale, *place[2:]) for place in places}
    for place, key in keys.items():
        largest[key] = max(largest.get(key, 0.0), abs(float(x[place])))
    result = torch.ones_like(x)
    for place, key in keys.items():
        result[place] = largest[key] / quantised.to.to.max if largest[key] and isinstance(quantised.to, Cast) else 1.0
    return result


@pytest.mark.parametrize("scale", Scale)
@pytest.mark.parametrize("grid", GRIDS)
def test_error_of_every_element_is_within_half_a_step(grid: str, scale: Scale) -> None:
    """`|x^ - x| <= s max(u |x / s|, q / 2)`, q being the spacing of the smallest numbers; 3 u of FP64 for the scaling."""
    quantised = quantised_by(grid, scale)
    tensors = draw((2, 4, 2, 13, 27, 6))
    tensors[1][0, 1] = 0.0
    fmt = Cast.parse(grid).to
    for name, x, rounded in zip("qkv", tensors, quantised(*tensors), strict=True):
        s = scales(name, x, quantised)
        relative = 0.0 if fmt.is_integer else fmt.u
        bound = s * torch.clamp(relative * (x / s).abs(), min=fmt.min_subnormal / 2) + 3 * U64 * x.abs()
        assert rounded.dtype is torch.float64
        assert bool(((rounded - x).abs() <= bound).all())
        assert bool(((rounded - x).abs() > 0).any())


@pytest.mark.parametrize("mode", ["up", "down", "nearest_away", "odd", "stochastic"])
def test_the_largest_element_never_overflows(mode: str) -> None:
    """`x / s` can come out above the largest number by a roundoff, which rounding away from zero would make NaN.

    Below it by a roundoff, rounding toward zero costs one step, 32 of 448.
    """
    tensors = draw((1, 1, 1, 300, 300, 3))
    for x, rounded in zip(tensors, Quantised(Cast.parse(f"e4m3fn:{mode}"), Scale.ROW)(*tensors), strict=True):
        assert bool(rounded.isfinite().all())
        assert float((rounded.abs().amax(-1) / x.abs().amax(-1) - 1).abs().max()) <= 32 / 448 + 3 * U64


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 12, 64, 80, 128])
def test_hadamard_is_orthogonal(dim: int) -> None:
    """Each entry is `+-1 / sqrt(n)` rounded, so an inner product of n such is off by at most (n + 2) u."""
    rotation = random_hadamard(dim, 3)
    size = dim & -dim
    off = (rotation @ rotation.T - torch.eye(dim, dtype=torch.float64)).abs().max()
    assert float(off) <= (size + 2) * U64
    block = rotation[:size, :size].abs()
    assert torch.equal(block, torch.full_like(block, 1 / math.sqrt(size)))
    assert bool((rotation[:size, size:] == 0).all())


FINE_CASES = [
    Quantised(FINE),
    Quantised(FINE, Scale.BLOCK, 5, hadamard=True),
    Quantised(FINE, smoothing=Smoothing.K),
    Quantised(FINE, smoothing=Smoothing.Q),
    Quantised(FINE, Scale.CHANNEL, smoothing=Smoothing.Q, smoothing_block=4),
    Quantised(FINE, Scale.THREAD, 8, 4, smoothing=Smoothing.QK, smoothing_block=2, values=FINE, values_scale=Scale.ROW),
    Quantised(FINE, Scale.ROW, smoothing=Smoothing.QK),
    Quantised(FINE, Scale.BLOCK, 5, hadamard=True, smoothing=Smoothing.QK, values=FINE),
]


@pytest.mark.parametrize("quantised", FINE_CASES, ids=str)
def test_on_a_fine_grid_softmax_is_unchanged(quantised: Quantised) -> None:
    """Only FP64 roundoff is left: two rotations of d terms and two additions of the mean, `(2 d + 6) u` of `2 max |x|`.

    The grid of 49 bits adds 16 u. A mean of q and its product with k add no more terms than that. A score is then off by
    `d max|q| max|k|` times twice that and its scale, exp makes it relative, and the rest is Exact's.
    """
    q, k, v = draw((1, 2, 2, 9, 13, 8))
    k += 3.0
    dim = 8
    got, want = (Exact()(*tensors, Mask(), dim**-0.5) for tensors in (quantised(q, k, v), (q, k, v)))
    inputs = 4 * (2 * dim + 6 + 16) * dim * float(q.abs().max() * k.abs().max()) / math.sqrt(dim)
    bound = (2 * inputs + 2 * weight_error(dim, 13, reach(q, k, 1 / math.sqrt(dim))) + 2 * 13) * U64
    assert float((got.out - want.out).abs().max()) <= bound * float(v.abs().max())
    assert float((lse_of(got) - lse_of(want)).abs().max()) <= bound


@pytest.mark.parametrize("block", [None, 16, 7])
@pytest.mark.parametrize("smoothing", [Smoothing.Q, Smoothing.QK])
def test_scores_with_a_mean_of_q_are_sageattention2s(smoothing: Smoothing, block: int | None) -> None:
    """`S = (q - c)^ . (k - b)^ + c . (k - b) + q' . b`, the last alike for a row: S in plain loops over blocks, up to that."""
    q, k, v = (t + 3.0 for t in draw((1, 2, 2, 40, 30, 8)))
    to = Cast.parse("int4")
    got_q, got_k, _ = Quantised(to, Scale.ROW, smoothing=smoothing, smoothing_block=block, values=FINE)(q, k, v)
    got = got_q @ got_k.mT
    centred = k - k.mean(2, keepdim=True) if smoothing.of_k else k
    plain = Quantised(to, Scale.ROW, values=FINE)
    expected = torch.zeros_like(got)
    size = block or 40
    for start in range(0, 40, size):
        part = q[:, :, start : start + size]
        mean = part.mean(2, keepdim=True)
        rounded, rounded_k, _ = plain(part - mean, centred, v)
        expected[:, :, start : start + size] = rounded @ rounded_k.mT + mean @ centred.mT
    apart = got - expected
    assert float((apart - apart[..., :1]).abs().max()) <= 100 * U64 * float(got.abs().max())
    if smoothing is Smoothing.Q:
        assert float(apart.abs().max()) <= 100 * U64 * float(got.abs().max())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"to": MICROSCALED["mxfp4"], "scale": Scale.ROW}, "scale"),
        ({"values_scale": Scale.CHANNEL}, "values_scale"),
        ({"values": MICROSCALED["nvfp4"], "values_scale": Scale.CHANNEL}, "values_scale"),
        ({"values": Cast(FP16), "values_scale": Scale.THREAD}, "values_scale"),
        ({"scale": Scale.THREAD}, "values_scale"),
        ({"smoothing_block": 8}, "smoothing_block"),
        ({"smoothing_block": 8, "smoothing": Smoothing.K}, "smoothing_block"),
        ({"smoothing_block": 0, "smoothing": Smoothing.Q}, "smoothing_block"),
        ({"block_q": 0}, "block_q"),
        ({"scale": Scale.BLOCK, "block": 0}, "block"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput, match=rf"^precision\.quantise\.{field}: "):
        Quantised(**({"to": Cast.parse("int8")} | changes))


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
powers = st.integers(-300, 140).map(lambda power: 2.0**power)  # E8M0 ends at 2^-127 and 2^127; below, blocks vanish at last


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


@settings(max_examples=100)
@given(st.sampled_from([*MICROSCALED, BLOCK_ONLY]), st.integers(1, 70), st.integers(1, 3), st.data())
def test_is_the_rule_in_exact_rationals(name: str, width: int, height: int, data: st.DataObject) -> None:
    """Bit for bit but for NVFP4, whose two scales multiply to 28 bits and more: 2 roundings of FP64."""
    values = data.draw(st.sampled_from([numbers] if name == "nvfp4" else [numbers, powers]))
    rows = data.draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=height, max_size=height))
    fmt = Microscaled.parse(name)
    got = fmt(torch.tensor(rows, dtype=torch.float64))
    exact = max(abs(Fraction(x)) for row in rows for x in row) / (6 * 448)
    tensor = nearest(exact, FP32) if name == "nvfp4" and exact else Fraction(1)
    for row, rounded in zip(rows, got.tolist(), strict=True):
        for value, expected in zip(rounded, oracle(row, name, fmt.block, tensor), strict=True):
            assert abs(Fraction(value) - expected) <= (abs(expected) * Fraction(2) ** -51 if name == "nvfp4" else 0)


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


def test_queries_of_their_own_are_rounded_and_no_more() -> None:
    """As a kernel reads q in BF16 beside a cache of k and v in fewer bits."""
    q, k, v = draw((2, 4, 2, 5, 7, 16))
    beside = Quantised(FINE, Scale.HEAD, queries=Cast.parse("bf16"))
    got, alone = beside(q, k, v), Quantised(FINE, Scale.HEAD)(q, k, v)
    assert torch.equal(got[0], q.double().to(torch.bfloat16).double())
    assert torch.equal(got[1], alone[1])
    assert torch.equal(got[2], alone[2])
    for turned in ({"hadamard": True}, {"smoothing": Smoothing.Q}):
        with pytest.raises(BadInput, match=r"precision\.quantise\.queries: .*turned or smoothed"):
            replace(beside, **turned)
