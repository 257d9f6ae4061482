"""Watched attention: the same bits, and figures that agree with golden; random errors of the size of another attention's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP32
from numdev.attention.base import Backward
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Tiling
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.training.run import Run
from numdev.training.rung import Numerics, Rung
from numdev.training.watch import FIGURES, Noise, Watch, Watched
from tests.cases import Inputs, draw_all, on
from tests.training.toy import CPU, VANILLA, Toy, toy, trained

TILES = Tiling(br=8, bc=2)
INSIDE = TiledBackward(Tiled(Precision.uniform(BF16), TILES), BackwardPrecision.uniform(BF16), TILES)
KERNEL = TiledBackward(Tiled(Precision.kernel(BF16), TILES), BackwardPrecision.kernel(BF16), TILES)
EVERY: dict[str, Backward] = {
    "inside": INSIDE,
    "kernel": KERNEL,
    "naive": NaiveBackward.eager(BF16),
    "vanilla": VanillaBackward(BF16),
}


ALL = Mask()


def figures(variant: Any, inputs: Inputs, mask: Mask = ALL, scale: float | None = None) -> Any:
    """Those of one call, with O and the gradients."""
    watch, do = Watch(CPU), inputs[3]
    q, k, v, _ = leaves = [x.clone().requires_grad_() for x in inputs]
    watch.begin()
    out = Watched(variant, watch).attend(q, k, v, mask, scale)
    out.backward(do)
    return dict(zip(FIGURES, watch.row.tolist(), strict=True)), out.detach(), [x.grad for x in leaves[:3]]


def drawn(kv_heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return on("cpu", draw_all((2, 4, kv_heads, 6, 6, 8), 1), dtype)


class TestBits:
    @pytest.mark.parametrize("variant", EVERY.values(), ids=EVERY)
    def test_o_and_gradients_are_those_of_what_is_watched(self, variant: Any) -> None:
        q, k, v, do = drawn()
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = variant.attend(*leaves, Mask(), None)
        out.backward(do)
        _, ours, gradients = figures(variant, (q, k, v, do))
        assert torch.equal(ours, out)
        assert all(b.grad is not None and torch.equal(a, b.grad) for a, b in zip(gradients, leaves, strict=True))

    @pytest.mark.parametrize("variant", [EVERY["inside"], EVERY["vanilla"]], ids=["inside", "vanilla"])
    def test_a_watched_run_has_the_weights_of_an_unwatched_one(self, tmp_path: Path, variant: Any) -> None:
        plain, watched = (
            trained(Run(Toy(2, batch=2), Rung(variant, Numerics.BF16, watch=watch)), tmp_path / str(watch))
            for watch in (False, True)
        )
        assert plain.checksum == watched.checksum
        assert plain.losses == watched.losses
        assert plain.key != watched.key
        assert plain.watched == ()
        assert len(watched.watched) == 2
        for row in watched.watched:
            bias = dict(zip(FIGURES, row, strict=True))["delta_bias"]
            assert math.isnan(bias) == (variant is EVERY["vanilla"])
            assert all(map(math.isfinite, (x for x in row if x is not bias)))


class TestFigures:
    @pytest.mark.parametrize("mask", [Mask(), Mask(causal=True)], ids=["all", "causal"])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_they_are_distances_from_golden(self, mask: Mask, kv_heads: int) -> None:
        q, k, v, do = drawn(kv_heads=kv_heads)
        found, out, (dq, *_) = figures(INSIDE, (q, k, v, do), mask, 0.4)
        expected, golden = Exact()(q, k, v, mask, 0.4).out, ExactBackward()(q, k, v, do, mask, 0.4)
        ours = INSIDE(*INSIDE.round_inputs(q, k, v, do), mask, 0.4)
        assert ours.delta is not None
        assert golden.delta is not None
        # Both goldens are within 1e-13 of the exact figure; a difference of 1e-3 then has 1e-10 of relative error
        assert found["deviation"] == pytest.approx(float((out - expected).abs().max()), rel=1e-9)
        assert found["relative_deviation"] == pytest.approx(float((out - expected).norm() / expected.norm()), rel=1e-9)
        assert found["dq_error"] == pytest.approx(float((dq - golden.dq).norm() / golden.dq.norm()), rel=1e-9)
        bias = (ours.delta - golden.delta).sum() / golden.delta.abs().sum()
        assert found["delta_bias"] == pytest.approx(float(bias), rel=1e-9)

    def test_the_largest_logit_is_scaled_and_seen(self) -> None:
        q, k, v, do = drawn(kv_heads=2)
        s = 0.3 * (q.double().unflatten(1, (2, 2)) @ k.double()[:, :, None].mT)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        for mask, most in ((Mask(), s.abs().max()), (Mask(causal=True), s.masked_fill(hidden, 0).abs().max())):
            found, *_ = figures(KERNEL, (q, k, v, do), mask, 0.3)
            assert found["largest_logit"] == pytest.approx(float(most), rel=1e-5)  # S in FP32: d u = 8 * 2^-24

    def test_ties_are_counted_in_the_format_of_s(self) -> None:
        q = torch.tensor([[1.0], [-1.0]])[None, None].expand(1, 1, 2, 1).contiguous()
        k = torch.tensor([1.0, 1 + 2**-9, 0.5])[None, None, :, None]  # the first two are one number of BF16
        do = torch.ones(1, 1, 2, 1)
        exact = NaiveBackward(BackwardPrecision.uniform(FP32), Precision.kernel(FP32))
        inside = NaiveBackward(BackwardPrecision.uniform(FP32), Precision.kernel(FP32).with_step(scores=BF16))
        assert figures(exact, (q, k, k, do), scale=1.0)[0]["tie_rate"] == 0
        assert figures(inside, (q, k, k, do), scale=1.0)[0]["tie_rate"] == 0.5  # of the row whose largest score they are
        assert figures(VanillaBackward(FP32), (q, k, k, do), scale=1.0)[0]["tie_rate"] == 0
        halves = q.bfloat16(), k.bfloat16(), k.bfloat16(), do.bfloat16()
        assert figures(VanillaBackward(BF16), halves, scale=1.0)[0]["tie_rate"] == 0.5

    def test_a_step_sums_its_calls_and_forgets_the_last(self) -> None:
        q, k, v, do = drawn()
        watch, one = Watch(CPU), figures(INSIDE, (q, k, v, do))[0]
        for _ in range(2):
            watch.begin()
            for factor in (1.0, 2.0):
                x = q.clone().requires_grad_()
                Watched(INSIDE, watch).attend(x, factor * k, v, Mask()).backward(do)
                both = dict(zip(FIGURES, watch.row.tolist(), strict=True))
        assert both["largest_logit"] == 2 * one["largest_logit"]
        assert both["deviation"] >= one["deviation"]
        assert 0 < both["relative_deviation"] < 1

    def test_nan_is_told(self) -> None:
        q, k, v, do = drawn(dtype=torch.float32)
        q[0, 0, 0, 0] = math.nan
        found, *_ = figures(VanillaBackward(FP32), (q, k, v, do))
        assert math.isnan(found["largest_logit"])
        assert math.isnan(found["deviation"])


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
