"""Quantised inputs: errors in units of the scale, who shares a scale, and what rotation and smoothing leave unchanged."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import FP16, Format
from numdev.arithmetic.quantise import MICROSCALED, Quantised, Scale, Smoothing, random_hadamard
from numdev.arithmetic.rounding import Cast
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.errors import BadInput
from tests.cases import U64, draw, lse_of, reach, weight_error

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
