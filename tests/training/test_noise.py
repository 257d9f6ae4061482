"""Random errors: their size is that of another attention's difference, element by element, and nothing else is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP32
from numdev.attention.base import Backward
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Tiling
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.training.watch import Noise
from numdev.training.run import Run
from numdev.training.rung import Numerics, Rung
from tests.training.toy import VANILLA, Toy, toy, trained

TILING = Tiling(br=8, bc=8)
NAMES = "out", "dq", "dk", "dv"


def tiled(fmt: object = BF16) -> TiledBackward:
    """FlashAttention with BF16 inside; its results are rounded to BF16, or kept in FP32."""
    forward, backward = Precision.parse("bf16"), BackwardPrecision.parse("bf16")
    if fmt is FP32:
        forward, backward = forward.with_step(inputs=FP32, output=FP32), backward.with_step(inputs=FP32, output=FP32)
    return TiledBackward(Tiled(forward, TILING), backward, TILING)


def results(attention: Backward | Noise, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """O and the gradients of random inputs, in FP64."""
    random = torch.Generator().manual_seed(seed)
    *leaves, do = (torch.randn(2, 2, 32, 16, generator=random).to(dtype) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in leaves)
    out = attention.attend(q, k, v, Mask(causal=True))
    each = (out.detach(), *torch.autograd.grad(out, (q, k, v), do))
    return {name: x.double() for name, x in zip(NAMES, each, strict=True)}


@pytest.mark.parametrize(("fmt", "dtype"), [(BF16, torch.bfloat16), (FP32, torch.float32)])
def test_of_dose_0_bits_are_those_of_plain_attention(fmt: object, dtype: torch.dtype) -> None:
    plain, zero = results(VanillaBackward(fmt), dtype), results(Noise(tiled(fmt), 0.0), dtype)  # type: ignore[arg-type]
    assert all(torch.equal(plain[name], zero[name]) for name in NAMES)


@pytest.mark.parametrize("dose", [0.25, 0.5, 1.0, 4.0])
def test_errors_have_the_size_of_the_dose_and_a_random_sign(dose: float) -> None:
    """In FP32, whose rounding, u of the result, is far below an error of BF16; of n signs sqrt(n) differ more one way."""
    plain, other, noisy = (results(each, torch.float32) for each in (VANILLA, tiled(FP32), Noise(tiled(FP32), dose)))
    for name in NAMES:
        error, own = other[name] - plain[name], noisy[name] - plain[name]
        rounding = 2 * FP32.u * (plain[name].abs() + dose * error.abs())
        hit = own.abs() > rounding
        assert bool(((own.abs() - max(dose, 1) * error.abs()).abs() <= rounding)[hit].all()), name
        seen = error.abs() > 4 * rounding
        share, n = min(dose, 1) ** 2, int(seen.sum())
        assert abs(int(hit[seen].sum()) - share * n) <= 5 * math.sqrt(n * share * (1 - share)), name
        signs = (own * error)[hit & seen].sign()
        assert n > 100, name
        assert abs(float(signs.sum())) <= 5 * math.sqrt(len(signs)), name


def test_errors_are_drawn_again_alike_and_for_other_inputs_anew() -> None:
    noise = Noise(tiled(), 1.0)
    first, again, other = (results(noise, torch.bfloat16, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in NAMES)
    signs = []
    for seed, own in ((0, first), (1, other)):
        plain, kernel = (results(each, torch.bfloat16, seed)["out"] for each in (VanillaBackward(BF16), tiled()))
        signs.append(((own["out"] - plain) * (kernel - plain)).sign())
    both = (signs[0] != 0) & (signs[1] != 0)
    n = int(both.sum())
    assert n > 100
    assert abs(int((signs[0] == signs[1])[both].sum()) - n / 2) <= 2.5 * math.sqrt(n)


def test_a_run_with_errors_of_dose_0_is_the_reference_and_with_others_is_not(tmp_path: Path) -> None:
    attentions = {None: VanillaBackward(BF16), 0.0: tiled(), 1.0: tiled()}
    runs = [Run(Toy(6), Rung(attention, Numerics.BF16, noise=noise)) for noise, attention in attentions.items()]
    plain, zero, one = (trained(run, tmp_path / str(place)) for place, run in enumerate(runs))
    assert zero.checksum == plain.checksum != one.checksum
    assert zero.losses == plain.losses
    assert trained(runs[2], tmp_path / "again").checksum == one.checksum


def test_a_rate_of_2_is_twice_the_learning_rate(tmp_path: Path) -> None:
    """To the bit: a power of two rounds nothing."""
    first, second = trained(toy(rate=2.0), tmp_path / "1"), trained(toy(task=Toy(learning_rate=2e-2)), tmp_path / "2")
    assert first.checksum == second.checksum
