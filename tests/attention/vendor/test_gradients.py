"""Gradients of torch's own attention: within derived budgets, with the kernel that ran; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, Format
from numdev.attention.base import Gradients
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.tiling import Order
from numdev.attention.vendor import dispatch
from numdev.attention.vendor.dispatch import ByAutograd
from numdev.attention.vendor.flex import FlexBackward
from numdev.attention.vendor.sdpa import Backend, SdpaBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.errors import BadInput, Unsupported
from tests.attention.bounds import Bounds, Left, backward_budget, kernel_budget, of_output, stored_budget
from tests.cases import Inputs, Sizes, draw_all, same

SIZES: Sizes = (2, 4, 4, 64, 64, 32)
GROUPED: Sizes = (2, 4, 2, 37, 53, 24)
CUDA = torch.cuda.is_available()
MASKS = {"none": Mask(), "causal": Mask(causal=True), "window": Mask(window=9), "lengths": Mask(key_lengths=(40, 53))}
HIDING = {"lengths": Mask(key_lengths=(31, 0)), "all": Mask(causal=True, window=17, key_lengths=(50, 20))}
FORWARD, REVERSE = Order.FORWARD, Order.REVERSE


def rounded(variant: ByAutograd, inputs: Inputs, device: str) -> Inputs:
    q, k, v, do = (x.to(device) for x in variant.round_inputs(*inputs))
    return q, k, v, do


def of_kernel(fmt: Format, inputs: Inputs, mask: Mask, walk: Left, precision: BackwardPrecision | None = None) -> Bounds:
    """Of a kernel whose forward pass is within `kernel_budget`, by which its O and LSE are off."""
    scale, tiles = inputs[0].shape[-1] ** -0.5, 8
    out, lse = kernel_budget(Precision.kernel(fmt), OnlineSoftmax(), *inputs[:3], scale, tiles)
    left = Left(out, lse, walk.query_tiles, walk.key_tiles)
    return backward_budget(precision or BackwardPrecision.kernel(fmt), inputs, mask, scale, left=left)


def within(got: Gradients, inputs: Inputs, mask: Mask, bounds: Bounds, precision: BackwardPrecision) -> None:
    """Every element of every gradient is written, and off golden by no more than its own bound."""
    golden = ExactBackward()(*inputs, mask)
    for name in ("dq", "dk", "dv"):
        mine, exact = getattr(got, name), getattr(golden, name).cpu()
        assert not int(mine.isnan().sum()), name
        assert mine.shape == exact.shape
        bound = of_output(getattr(bounds, name), exact, precision)
        assert bool(((mine.double().cpu() - exact).abs() <= bound).all()), name
    hidden = ~mask.seeing_rows(inputs[0].shape[0], inputs[0].shape[2], inputs[1].shape[2])
    assert bool((got.dq.cpu().transpose(1, 2)[hidden] == 0).all()), "rows that see nothing"


def math_policy(fmt: Format) -> BackwardPrecision:
    """FP32 inside on a CPU; gradients of each head are rounded before those of a group are summed."""
    return BackwardPrecision.uniform(FP32).with_step(inputs=fmt, output=fmt)


@pytest.mark.skipif(CUDA, reason="the kernels of a CPU")
@pytest.mark.parametrize(("fmt", "mask"), [(FP32, "none"), (BF16, "causal"), (FP16, "none")])
def test_flash_on_a_cpu(fmt: Format, mask: str) -> None:
    """Two tiles of queries and one of keys, whose sums are kept in the format of the outputs."""
    variant = SdpaBackward(Backend.FLASH, fmt)
    inputs = rounded(variant, draw_all(SIZES), "cpu")
    got = variant(*inputs, MASKS[mask])
    policy = BackwardPrecision.kernel(fmt).with_step(dq_sum=fmt, dk_sum=fmt, dv_sum=fmt)
    within(got, inputs, MASKS[mask], of_kernel(fmt, inputs, MASKS[mask], Left(query_tiles=2), policy), policy)
    assert got.kernel == "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert got.delta is None
    assert {tensor.dtype for tensor in got.tensors().values()} == {fmt.dtype}
    assert tuple(got.tensors()) == tuple(variant.formats)


@pytest.mark.skipif(CUDA, reason="the operations of a CPU, which computes in FP32")
@pytest.mark.parametrize(("fmt", "mask"), [(FP32, "none"), (BF16, "window"), (FP32, "lengths")])
def test_math_on_a_cpu(fmt: Format, mask: str) -> None:
    variant = SdpaBackward(Backend.MATH, fmt)
    inputs = rounded(variant, draw_all((2, 4, 2, 53, 53, 24)), "cpu")
    got = variant(*inputs, MASKS[mask])
    policy = math_policy(fmt)
    sums = policy.with_step(dk_sum=fmt, dv_sum=fmt)  # what a group adds
    within(got, inputs, MASKS[mask], stored_budget(sums, inputs, MASKS[mask], 24**-0.5), policy)
    assert got.kernel == "aten::_softmax_backward_data"
    assert got.dk.dtype == fmt.dtype


@pytest.mark.parametrize("mask", ["none", "window", *(f"hiding {name}" for name in HIDING)])
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_vanilla(fmt: Format, mask: str, device: str) -> None:
    """Also where rows see no key, for which softmax has no answer and no gradient."""
    seen = HIDING[mask.removeprefix("hiding ")] if mask.startswith("hiding") else MASKS[mask]
    variant = VanillaBackward(fmt)
    inputs = rounded(variant, draw_all(GROUPED), device)
    got = variant(*inputs, seen)
    policy = BackwardPrecision.uniform(fmt)
    within(got, inputs, seen, stored_budget(policy, inputs, seen, 24**-0.5), policy)


@pytest.mark.parametrize(("fmt", "zero"), [(BF16, "q"), (FP16, "k"), (BF16, "k")])
def test_naive_is_autograd_bit_for_bit_where_sums_are_exact(fmt: Format, zero: str) -> None:
    """With scores of 0, `P = 1 / 32`. With v and dO in -2 ... 2, dP, delta and dS are multiples of 2^-10 below 2^6, and q or k in
    -2 ... 2 leave every sum of 32 products a multiple of 2^-10 below 2^12: 22 bits, so that FP32 adds in any order. A scale of
    1/4 is exact wherever it is multiplied.
    """
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randint(-2, 3, (1, 4, n, 16), generator=generator).double() for n in (24, 32, 32, 24))
    variant = VanillaBackward(fmt)
    q, k, v, do = rounded(variant, tuple(drawn), "cpu")  # type: ignore[arg-type]
    q, k = (torch.zeros_like(q), k) if zero == "q" else (q, torch.zeros_like(k))
    found = NaiveBackward.eager(fmt)(q, k, v, do, Mask(), 0.25)
    want = {name: tensor.to(found.dq.dtype) for name, tensor in variant(q, k, v, do, Mask(), 0.25).tensors().items()}
    same(Gradients(found.dq, found.dk, found.dv, None), want)
    assert bool(((found.dq if zero == "q" else found.dk) != 0).any())


def test_another_kernel_is_no_answer(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Forward and backward are proven apart: here the forward pass is the one asked for, and its gradients are not."""
    names = iter([("aten::_scaled_dot_product_flash_attention_for_cpu",), ("some_gemm", "softmax_warp_backward")])
    monkeypatch.setattr(dispatch, "kernels_of", lambda run, device: (run(), next(names)))
    monkeypatch.setattr(dispatch, "_RAN", {})
    variant = SdpaBackward(Backend.FLASH, FP16 if CUDA else FP32)
    with pytest.raises(Unsupported, match=r"backward\.backend: asked for flash, but math ran \(some_gemm\)"):
        variant(*rounded(variant, draw_all(SIZES), device), Mask())


@pytest.mark.skipif(CUDA, reason="of machines without a GPU")
@pytest.mark.parametrize("variant", [SdpaBackward(Backend.CUDNN), SdpaBackward(Backend.EFFICIENT), FlexBackward()], ids=str)
def test_what_needs_a_gpu_says_so(variant: ByAutograd) -> None:
    with pytest.raises(Unsupported, match=r"^backward.*CUDA devices"):
        variant(*variant.round_inputs(*draw_all(SIZES)), Mask())


def test_what_the_forward_pass_refuses(device: str) -> None:
    flash = SdpaBackward(Backend.FLASH, FP16 if CUDA else FP32)
    with pytest.raises(Unsupported, match=r"^problem\.window: flash takes no mask"):
        flash(*rounded(flash, draw_all(SIZES), device), Mask(window=9))
    math = SdpaBackward(Backend.MATH, FP32)
    with pytest.raises(Unsupported, match="some rows see no key"):
        math(*rounded(math, draw_all(SIZES), device), Mask(key_lengths=(0, 64)))
    with pytest.raises(Unsupported, match=r"^precision: .*e4m3fn"):
        VanillaBackward(E4M3FN)(*draw_all(SIZES), Mask())
    q, k, v, do = draw_all(SIZES)
    with pytest.raises(BadInput, match=r"^do: .*shape of the output"):
        math(q, k, v, do[..., :5], Mask())
    with pytest.raises(BadInput, match=r"tiling\.br: 48 .*powers of two"):
        FlexBackward(48)


@pytest.mark.skipif(CUDA, reason="the kernel of a CPU")
@pytest.mark.parametrize("causal", [False, True])
def test_what_flash_saves_on_a_cpu_is_what_its_backward_pass_reads(causal: bool) -> None:
    """O is that of the forward pass, and LSE a natural logarithm; the kernel's vectorised exponential is off by some 2^-15."""
    variant, mask = SdpaBackward(Backend.FLASH), Mask(causal=causal)
    q, k, v, _ = rounded(variant, draw_all((1, 2, 2, 65, 65, 16)), "cpu")
    saved = variant.forward_pass(q, k, v, mask)
    assert torch.equal(saved.out, variant.forward(q, k, v, mask).out)
    exact = Exact()(q, k, v, mask).lse
    assert saved.lse is not None
    assert exact is not None
    assert saved.lse.shape == exact.shape
    assert not saved.lse.requires_grad
    assert float((saved.lse - exact).abs().max()) < 2.0**-13
    assert SdpaBackward(Backend.MATH).forward_pass(q, k, v, mask).lse is None


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", [Backend.FLASH, Backend.CUDNN, Backend.EFFICIENT], ids=lambda one: one.value)
def test_what_is_saved_on_a_gpu_is_o_and_its_lse(backend: Backend, causal: bool) -> None:
    """LSE in natural logarithms, for each query and none beyond: off by far less than a factor of log2(e) or a lost row."""
    variant, mask = SdpaBackward(backend), Mask(causal=causal)
    q, k, v, _ = rounded(variant, draw_all((2, 4, 4, 200, 200, 64)), "cuda")
    saved, exact = variant.forward_pass(q, k, v, mask), Exact()(q, k, v, mask).lse
    assert torch.equal(saved.out, variant.forward(q, k, v, mask).out)
    assert saved.lse is not None
    assert exact is not None
    assert saved.lse.shape == exact.shape
    assert float((saved.lse - exact).abs().max()) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnAGpu:
    SIZES: Sizes = (2, 4, 4, 512, 512, 64)

    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        ("variant", "fragment"),
        [
            (SdpaBackward(Backend.FLASH), "flash_bwd_dq_dk_dv"),
            (SdpaBackward(Backend.CUDNN), "cudnn_generated"),
            (SdpaBackward(Backend.EFFICIENT), "fmha_cutlassB"),
            (FlexBackward(), "flex_attention_backward"),
        ],
    )
    def test_the_kernel_asked_for_ran(self, variant: Any, fragment: str, causal: bool, fmt: Format) -> None:
        """Of heads of their own; a group is in the next test."""
        variant = type(variant)(**{**vars(variant), "fmt": fmt})
        self.check(variant, self.SIZES, Mask(causal=causal), BackwardPrecision.kernel(fmt), fragment)

    @pytest.mark.parametrize("variant", [SdpaBackward(Backend.FLASH), SdpaBackward(Backend.CUDNN), FlexBackward()], ids=str)
    def test_heads_that_share_keys(self, variant: ByAutograd) -> None:
        """Each head's dK and dV may be rounded before they are summed."""
        policy = BackwardPrecision.kernel(BF16).with_step(dk_sum=BF16, dv_sum=BF16)
        self.check(variant, (2, 4, 2, 512, 512, 64), Mask(), policy, "")

    @pytest.mark.parametrize("mask", [Mask(window=100), Mask(key_lengths=(300, 512)), Mask(causal=True, key_lengths=(0, 512))])
    def test_flex_under_masks(self, mask: Mask) -> None:
        """Also where rows see no key."""
        self.check(FlexBackward(), self.SIZES, mask, BackwardPrecision.kernel(BF16), "flex")

    def test_passes_can_be_made_again(self) -> None:
        """FlexAttention's compiler would give away what a forward pass saved after the first backward pass."""
        variant = FlexBackward()
        forward, backward = variant.passes(*rounded(variant, draw_all(self.SIZES), "cuda"), Mask())
        output = forward()
        first = backward(output)
        for again in (backward(output), backward(forward())):
            assert torch.equal(again.dv, first.dv)

    @staticmethod
    def check(variant: ByAutograd, sizes: Sizes, mask: Mask, policy: BackwardPrecision, fragment: str) -> None:
        inputs = rounded(variant, draw_all(sizes), "cuda")
        got = variant(*inputs, mask)
        within(got, inputs, mask, of_kernel(variant.fmt, inputs, mask, Left(), policy), policy)
        assert fragment in got.kernel
