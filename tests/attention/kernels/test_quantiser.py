"""Codes, scales and layout of the quantiser, against torch's own cast from FP32 and against `Quantised`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from numdev import Cast
from numdev.arithmetic.quantise import Quantised, Scale
from numdev.attention.kernels import quantiser
from tests.attention.test_triton import poison
from tests.cases import draw, on

E4M3 = Cast.parse("e4m3fn:saturate")
SIZES = (2, 4, 2, 50, 77, 64)
LENGTHS = (77, 33)


def quantised(inputs: Quantised, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor]]:
    """By name codes `[batch, heads, tokens, dim]` in FP32 and the scale of each row; beyond the tokens of k and v codes are 0."""
    *codes, scales = quantiser.plan(q, k, v, inputs, lengths)(q, k, v)
    whole = -(-k.shape[2] // 16) * 16
    assert [tuple(x.shape) for x in codes[1:]] == [(*k.shape[:2], whole, k.shape[3]), (*v.shape[:2], v.shape[3], whole)]
    found, first = {}, 0
    for name, x, code in zip("qkv", (q, k, v), (codes[0], codes[1], codes[2].mT), strict=True):
        batch, heads, tokens, _ = x.shape
        rows = inputs.rows(name) if inputs.shared_by(of_v=name == "v") is Scale.BLOCK else tokens
        count = heads * -(-tokens // rows)
        each = scales[:, first : first + count].reshape(batch, heads, -1).repeat_interleave(rows, -1)[..., :tokens]
        found[name], first = (code[:, :, :tokens].float(), each[..., None]), first + count
        assert not code[:, :, tokens:].float().any()
    assert first == scales.shape[1]
    return found


def kept(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """0 beyond the lengths."""
    there = torch.arange(x.shape[2], device=x.device) < torch.tensor(lengths, device=x.device)[:, None]
    return x.masked_fill(~there[:, None, :, None], 0.0)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@pytest.mark.parametrize(("dtype", "scale"), [*itertools.product((torch.float32, torch.float16), quantiser.SHARED)])
def test_scales_and_codes_of_drawn_numbers(dtype: torch.dtype, scale: Scale, device: str) -> None:
    """Strided k, grouped heads, keys cut within a block; padding holds NaN."""
    q, k, v = (x.to(dtype) for x in on(device, draw(SIZES)))
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    inputs = Quantised(E4M3, scale, 64, 128)
    bad_k, bad_v = (torch.where(kept(torch.ones_like(x), LENGTHS) == 0, float("nan"), x) for x in (k, v))
    got = quantised(inputs, q, bad_k, bad_v, LENGTHS)
    for name, x in (("q", q), ("k", kept(k, LENGTHS)), ("v", kept(v, LENGTHS))):
        codes, scales = inputs.codes(x, name)
        rows = {Scale.TENSOR: x.float().abs().amax(), Scale.HEAD: x.float().abs().amax((2, 3), keepdim=True)}
        largest = rows[scale] if scale in rows else torch.cat(
            [part.float().abs().amax((2, 3), keepdim=True).expand_as(part[..., :1]) for part in x.split(inputs.rows(name), 2)], 2
        )  # fmt: skip
        expected = torch.where(largest > 0, (largest.double() / 448).float(), 1.0).expand_as(scales)
        assert torch.equal(got[name][1], expected), name
        assert torch.equal(scales, expected), name
        by_torch = (x.float() / expected).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(got[name][0], by_torch), name
        assert torch.equal(codes, by_torch), name


def test_every_number_of_fp16_is_rounded_as_torch_rounds_it(device: str) -> None:
    """Under a scale of 1 and of 2^-6, so that halves between any two codes are met, and subnormal ones."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for top in (448.0, 7.0):
        inside = patterns[patterns.abs() <= top]
        x = torch.cat([inside, inside.new_zeros(-len(inside) % 64)]).reshape(1, 1, -1, 64).to(device)
        got = quantised(Quantised(E4M3, Scale.HEAD), x, x, x, (x.shape[2],))
        expected = (x.float() * (448 / top)).to(torch.float8_e4m3fn).float()
        for name, (codes, scales) in got.items():
            assert bool((scales == top / 448).all())
            assert torch.equal(codes, expected), name
        exact = Quantised(E4M3, Scale.HEAD)(*[x.cpu()] * 3)[0]
        assert torch.equal(exact.float(), (expected * (top / 448)).cpu())


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_rotation_is_that_of_the_emulation(dim: int, dtype: torch.dtype, device: str) -> None:
    """Of small whole numbers, whose sums are exact; with d = 64 also its factor is."""
    q, k, v = (x.mul(8).round().to(dtype) for x in on(device, draw((1, 2, 1, 40, 70, dim))))
    inputs = Quantised(E4M3, Scale.BLOCK, 64, hadamard=True, seed=3)
    for name, (codes, scales) in quantised(inputs, q, k, v, (70,)).items():
        expected, of_rows = inputs.codes({"q": q, "k": k, "v": v}[name], name)
        torch.testing.assert_close(scales, of_rows, rtol=0.0 if dim == 64 else 2e-7, atol=0.0)
        assert float((codes == expected).float().mean()) >= (1.0 if dim == 64 else 0.999), name


@pytest.mark.parametrize("hadamard", [False, True])
def test_codes_of_dequantised_numbers_are_what_they_were(hadamard: bool, device: str) -> None:
    """So that a kernel on rounded inputs multiplies the codes that rounding found."""
    inputs = Quantised(E4M3, Scale.BLOCK, 64, hadamard=hadamard)
    drawn = draw((1, 2, 1, 130, 130, 64))
    q, k, v = on(device, inputs(*drawn), torch.float32)
    again = quantised(inputs, q, k, v, (130,))
    for name, x in zip("qkv", drawn, strict=True):
        codes, scales = inputs.codes(x, name)
        assert torch.equal(again[name][0].cpu(), codes), name
        torch.testing.assert_close(again[name][1].cpu(), scales, rtol=1e-6, atol=0.0)


def test_zeros_and_what_is_not_finite(device: str) -> None:
    """The scale of zeros is 1; NaN stays NaN, and where a largest number is infinite all others are 0."""
    q, k, v = (torch.zeros(1, 1, 64, 64, device=device) for _ in range(3))
    k[..., 3, 3], v[..., 5, 5], v[..., 6, 6] = float("nan"), float("inf"), 2.0
    got = quantised(Quantised(E4M3, Scale.BLOCK, 64), q, k, v, (64,))
    assert not got["q"][0].any()
    assert bool((got["q"][1] == 1).all())
    if device == "cuda":  # the interpreter's conversion to FP8 knows no NaN
        assert got["k"][0].isnan().nonzero().tolist() == [[0, 0, 3, 3]]
        assert got["v"][0].isnan().nonzero().tolist() == [[0, 0, 5, 5]]
    rest = got["v"][0].clone()
    rest[..., 5, 5] = 0.0
    assert not rest.any()
