"""The kernels of others, both passes: which one ran, what is refused, and that results are attention within derived budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numdev import BadInput, Mask, Precision, Unsupported
from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, Format
from numdev.attention.base import Gradients
from numdev.attention.exact import Exact
from numdev.attention.naive import NaiveBackward
from numdev.attention.vendor import dispatch
from numdev.attention.vendor.dispatch import ByAutograd
from numdev.attention.vendor.flex import Flex, FlexBackward
from numdev.attention.vendor.sdpa import Backend, Sdpa, SdpaBackward
from numdev.attention.vendor.vanilla import Vanilla, VanillaBackward
from tests.attention.bounds import near_golden, output_near_golden
from tests.cases import Inputs, Sizes, draw_all, lse_of, on, same

SIZES: Sizes = (2, 4, 4, 64, 64, 32)
GROUPED: Sizes = (2, 4, 2, 37, 53, 24)
CUDA = torch.cuda.is_available()
FLASH = FP16 if CUDA else FP32
MASKS = {"none": Mask(), "causal": Mask(causal=True), "window": Mask(window=9), "lengths": Mask(key_lengths=(40, 53))}
HIDING = {"hidden": Mask(key_lengths=(31, 0)), "all": Mask(causal=True, window=17, key_lengths=(50, 20))}
VECTORISED = 2.0**-13  # exponentials of a CPU are off by some 2^-15
on_cpu = pytest.mark.skipif(CUDA, reason="the kernels of a CPU")


def near(attend: Sdpa | Flex | Vanilla, inputs: Inputs, mask: Mask, scores: float = 0.0) -> str:
    """The kernel that ran, after the comparison of `out` and LSE with golden; `scores` is how far S may be rounded before P."""
    got = attend(*inputs[:3], mask)
    more = 2 * scores * attend.fmt.u * float(inputs[2].abs().max())
    output_near_golden(got, inputs, mask, Precision.kernel(attend.fmt), more=more)
    return got.kernel


CPU_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
ON_A_CPU: list[tuple[Backend, Format, str, Sizes]] = [
    *((Backend.FLASH, fmt, mask, SIZES) for fmt, mask in ((FP32, "none"), (BF16, "causal"), (FP16, "none"))),
    *((Backend.MATH, fmt, mask, (2, 4, 2, 53, 53, 24)) for fmt, mask in ((FP32, "none"), (BF16, "window"), (FP32, "lengths"))),
]


@on_cpu
@pytest.mark.parametrize(("backend", "fmt", "mask", "sizes"), ON_A_CPU)
def test_sdpa_on_a_cpu(backend: Backend, fmt: Format, mask: str, sizes: Sizes) -> None:
    """Flash in two tiles of queries, whose sums are kept in the format of the outputs; math in FP32 inside.

    Of heads in groups gradients of each head are rounded before they are summed.
    """
    variant = SdpaBackward(backend, fmt)
    inputs = variant.round_inputs(*draw_all(sizes))
    ran, got = near(Sdpa(backend, fmt), inputs, MASKS[mask]), variant(*inputs, MASKS[mask])
    near_golden(got, inputs, MASKS[mask], 8 * fmt.u + VECTORISED)
    assert ran.startswith(CPU_FLASH) if backend is Backend.FLASH else ran
    assert got.kernel == (f"{CPU_FLASH}_backward" if backend is Backend.FLASH else "aten::_softmax_backward_data")
    assert got.delta is None
    assert {tensor.dtype for tensor in got.tensors().values()} == {fmt.dtype}
    assert tuple(got.tensors()) == tuple(variant.formats)


@pytest.mark.parametrize("mask", ["none", "window", *HIDING])
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_vanilla(fmt: Format, mask: str, device: str) -> None:
    """Also where rows see no key, for which softmax has no answer and no gradient. |S| is 6 at most here."""
    seen, variant = (MASKS | HIDING)[mask], VanillaBackward(fmt)
    inputs = on(device, variant.round_inputs(*draw_all(GROUPED)))
    near(Vanilla(fmt), inputs, seen, scores=6)
    near_golden(variant(*inputs, seen), inputs, seen, 8 * fmt.u + VECTORISED)


@pytest.mark.parametrize(("fmt", "zero"), [(BF16, "q"), (FP16, "k"), (BF16, "k")])
def test_naive_is_autograd_bit_for_bit_where_sums_are_exact(fmt: Format, zero: str) -> None:
    """With scores of 0, `P = 1 / 32`. With v and dO in -2 ... 2, dP, delta and dS are multiples of 2^-10 below 2^6, and q or k in
    -2 ... 2 leave every sum of 32 products a multiple of 2^-10 below 2^12: 22 bits, so that FP32 adds in any order. A scale of
    1/4 is exact wherever it is multiplied.
    """
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randint(-2, 3, (1, 4, n, 16), generator=generator).double() for n in (24, 32, 32, 24))
    variant = VanillaBackward(fmt)
    inputs = variant.round_inputs(0 * q if zero == "q" else q, 0 * k if zero == "k" else k, v, do)
    gradients = NaiveBackward.eager(fmt)(*inputs, Mask(), 0.25)
    expected = {name: tensor.to(gradients.dq.dtype) for name, tensor in variant(*inputs, Mask(), 0.25).tensors().items()}
    same(Gradients(gradients.dq, gradients.dk, gradients.dv, None), expected)
    assert bool(((gradients.dq if zero == "q" else gradients.dk) != 0).any())


@on_cpu
@pytest.mark.parametrize("variant", [SdpaBackward(Backend.CUDNN), SdpaBackward(Backend.EFFICIENT), FlexBackward()], ids=str)
def test_what_needs_a_gpu_says_so(variant: SdpaBackward | FlexBackward) -> None:
    inputs = variant.round_inputs(*draw_all(SIZES))
    with pytest.raises(Unsupported, match="CUDA devices"):
        variant.forward(*inputs[:3], Mask())
    with pytest.raises(Unsupported, match=r"^backward.*CUDA devices"):
        variant(*inputs, Mask())


def test_what_is_refused(device: str) -> None:
    flash, math = SdpaBackward(Backend.FLASH, FLASH), SdpaBackward(Backend.MATH, FP32)
    inputs, empty = on(device, draw_all(SIZES)), Mask(key_lengths=(0, 64))
    for run in (lambda mask: flash.forward(*inputs[:3], mask), lambda mask: flash(*inputs, mask)):
        with pytest.raises(Unsupported, match=r"^problem\.window: flash takes no mask"):
            run(Mask(window=9))
        with pytest.raises(Unsupported, match=r"problem\.key_lengths"):
            run(Mask(key_lengths=(40, 53)))
    for run in (lambda mask: math.forward(*inputs[:3], mask), lambda mask: math(*inputs, mask)):
        with pytest.raises(Unsupported, match="some rows see no key"):
            run(empty)
    with pytest.raises(Unsupported, match=r"^precision: .*e4m3fn"):
        VanillaBackward(E4M3FN)(*draw_all(SIZES), Mask())
    with pytest.raises(BadInput, match=r"^do: .*shape of the output"):
        math(*inputs[:3], inputs[3][..., :5], Mask())
    with pytest.raises(BadInput, match=r"precision"):
        Sdpa(fmt=Format(5, 3)).round_inputs(*draw_all(SIZES)[:3])
    for flex in (Flex, FlexBackward):
        with pytest.raises(BadInput, match=r"tiling\.br: 48 .*powers of two"):
            flex(48)


def test_another_kernel_is_no_answer(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Whatever torch does, a kernel of another family is refused, by the names that the profiler saw; each pass by itself."""
    ran = [("some_gemm", "softmax_warp_forward"), ("aten::_scaled_dot_product_flash_attention_for_cpu",)]
    names = iter([*ran, ("some_gemm", "softmax_warp_backward")])
    monkeypatch.setattr(dispatch, "kernels_of", lambda run, device: (run(), next(names)))
    monkeypatch.setattr(dispatch, "_RAN", {})
    variant = SdpaBackward(Backend.FLASH, FLASH)
    inputs = on(device, variant.round_inputs(*draw_all(SIZES)))
    with pytest.raises(Unsupported, match=r"attention\.backend: asked for flash, but math ran \(some_gemm\)"):
        Sdpa(Backend.FLASH, FLASH)(*inputs[:3], Mask())
    with pytest.raises(Unsupported, match=r"backward\.backend: asked for flash, but math ran \(some_gemm\)"):
        variant(*inputs, Mask())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>",), "flash"),
        (("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64",), "cudnn"),
        (("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)",), "efficient"),
        (("triton_tem_fused_flex_attention_0",), "flex"),
        (("nvjet_tst_128x64", "softmax_warp_forward"), "math"),
        (("aten::_scaled_dot_product_attention_math",), "math"),
        (("vectorized_elementwise_kernel",), ""),
        ((), ""),
        (("pytorch_flash::flash_bwd_dot_do_o_kernel<true>", "pytorch_flash::flash_bwd_dq_dk_dv_loop<1>"), "flash"),
        (("cudnn::fusion::compute_dot_do_o_specialized", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma"), "cudnn"),
    ],
)
def test_families(names: tuple[str, ...], expected: str) -> None:
    """The kernel that is named is the one that makes the gradients, not one that prepares delta."""
    family, kernel = dispatch.kernel_family(names)
    assert family == expected
    assert not family or kernel == names[-1]


BACKENDS = [pytest.param(Backend.FLASH, marks=on_cpu, id="cpu")]
BACKENDS += [
    pytest.param(backend, marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")], id=backend.value)
    for backend in (Backend.FLASH, Backend.CUDNN, Backend.EFFICIENT)
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_saved_is_what_the_backward_pass_reads(backend: Backend, causal: bool, device: str) -> None:
    """O is that of the forward pass, and LSE a natural logarithm for each query and none beyond: off by far less than a lost row.

    The vectorised exponential of a CPU is off by some 2^-15.
    """
    variant, mask = SdpaBackward(backend), Mask(causal=causal)
    q, k, v, _ = on(device, variant.round_inputs(*draw_all((2, 4, 4, 200, 200, 64))))
    saved, exact = variant.forward_pass(q, k, v, mask), lse_of(Exact()(q, k, v, mask))
    assert torch.equal(saved.out, variant.forward(q, k, v, mask).out)
    assert lse_of(saved).shape == exact.shape
    assert not lse_of(saved).requires_grad
    assert float((lse_of(saved) - exact).abs().max()) < 2.0**-13
    assert SdpaBackward(Backend.MATH).forward_pass(q, k, v, mask).lse is None


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnAGpu:
    SIZES: Sizes = (2, 4, 4, 512, 512, 64)

    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        ("attend", "backward", "fragments"),
        [
            (Sdpa(Backend.FLASH), SdpaBackward(Backend.FLASH), ("flash", "flash_bwd_dq_dk_dv")),
            (Sdpa(Backend.CUDNN), SdpaBackward(Backend.CUDNN), ("cudnn", "cudnn_generated")),
            (Sdpa(Backend.EFFICIENT), SdpaBackward(Backend.EFFICIENT), ("fmha", "fmha_cutlassB")),
            (Flex(), FlexBackward(), ("flex", "flex_attention_backward")),
            (Flex(64, 64), None, ("flex", "")),
        ],
    )
    def test_the_kernel_asked_for_ran(
        self, attend: Any, backward: Any, fragments: tuple[str, str], causal: bool, fmt: Format
    ) -> None:
        """Of heads of their own; a group is in the next test."""
        attend, mask = type(attend)(**{**vars(attend), "fmt": fmt}), Mask(causal=causal)
        assert fragments[0] in near(attend, on("cuda", draw_all(self.SIZES), fmt.dtype), mask)
        if backward is not None:
            backward = type(backward)(**{**vars(backward), "fmt": fmt})
            self.check(backward, self.SIZES, mask, fragments[1])

    @pytest.mark.parametrize("variant", [SdpaBackward(Backend.FLASH), SdpaBackward(Backend.CUDNN), FlexBackward()], ids=str)
    def test_heads_that_share_keys(self, variant: ByAutograd) -> None:
        """Each head's dK and dV may be rounded before they are summed."""
        self.check(variant, (2, 4, 2, 512, 512, 64), Mask(), "")

    @pytest.mark.parametrize("mask", [Mask(window=100), Mask(key_lengths=(300, 512)), Mask(causal=True, key_lengths=(0, 512))])
    def test_flex_under_masks(self, mask: Mask) -> None:
        """Also where rows see no key."""
        self.check(FlexBackward(), self.SIZES, mask, "flex")

    def test_passes_of_flex_can_be_made_again(self) -> None:
        """FlexAttention's compiler would give away what a forward pass saved after the first backward pass."""
        variant = FlexBackward()
        forward, backward = variant.passes(*on("cuda", variant.round_inputs(*draw_all(self.SIZES))), Mask())
        output = forward()
        first = backward(output)
        for again in (backward(output), backward(forward())):
            assert torch.equal(again.dv, first.dv)

    def test_flex_in_more_shapes_than_the_compiler_likes(self) -> None:
        """Past its limit of recompilations the compiler would go on in eager form."""
        for n in range(100, 112):
            q, k, v = (torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            assert "flex" in Flex()(q, k, v, Mask()).kernel

    def test_fp32_has_no_flash(self) -> None:
        with pytest.raises(Unsupported, match=r"attention\.backend: flash: .*"):
            Sdpa(Backend.FLASH, FP32)(*on("cuda", draw_all(self.SIZES))[:3], Mask())

    @staticmethod
    def check(variant: ByAutograd, sizes: Sizes, mask: Mask, fragment: str) -> None:
        inputs = on("cuda", variant.round_inputs(*draw_all(sizes)))
        got = variant(*inputs, mask)
        near_golden(got, inputs, mask, 8 * variant.fmt.u + VECTORISED)
        assert fragment in got.kernel
