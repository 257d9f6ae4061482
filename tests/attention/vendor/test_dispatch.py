"""The kernels of others: which one ran, what is refused, and that results are attention."""

from __future__ import annotations

import pytest
import torch

from numdev.arithmetic.formats import BF16, FP16, FP32, Format
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.vendor import dispatch as vendor
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.errors import BadInput, Unsupported
from tests.attention.bounds import kernel_budget
from tests.cases import MASKS as ALL_MASKS
from tests.cases import Sizes, draw, fitted, on

SIZES: Sizes = (2, 4, 4, 64, 64, 32)
CUDA = torch.cuda.is_available()
MASKS = {"none": Mask(), "causal": Mask(causal=True), "window": Mask(window=9), "lengths": Mask(key_lengths=(40, 64))}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", [Backend.MATH, Backend.FLASH])
def test_sdpa_is_attention_and_names_its_kernel(backend: Backend, mask: str, device: str) -> None:
    attend = Sdpa(backend, FP16 if CUDA else FP32)
    q, k, v = (t.to(device) for t in attend.round_inputs(*draw(SIZES)))
    if backend is Backend.FLASH and mask in ("window", "lengths"):
        with pytest.raises(Unsupported, match=f"problem.{'window' if mask == 'window' else 'key_lengths'}"):
            attend(q, k, v, MASKS[mask])
        return
    got = attend(q, k, v, MASKS[mask])
    golden = Exact()(q, k, v, MASKS[mask])
    policy = Precision.eager(attend.fmt) if backend is Backend.MATH else Precision.kernel(attend.fmt)
    bound, _ = kernel_budget(policy, OnlineSoftmax(), q, k, v, SIZES[-1] ** -0.5, 4)
    rounded_scores = 8 * attend.fmt.u * float(v.abs().max())  # math rounds the scores too, |S| at most 4 here
    assert float((got.out.double() - golden.out).abs().max()) <= bound + rounded_scores * (backend is Backend.MATH)
    assert got.kernel
    assert got.lse is None
    assert got.out.dtype == attend.fmt.dtype


@pytest.mark.skipif(CUDA, reason="of machines without a GPU")
@pytest.mark.parametrize("attend", [Sdpa(Backend.CUDNN), Sdpa(Backend.EFFICIENT), Flex()])
def test_what_needs_a_gpu_says_so(attend: Sdpa | Flex) -> None:
    with pytest.raises(Unsupported, match="CUDA devices"):
        attend(*attend.round_inputs(*draw(SIZES)), Mask())


@pytest.mark.parametrize("mask", ["none", "window", "all"])
@pytest.mark.parametrize("fmt", [BF16, FP32], ids=str)
def test_vanilla_is_close_to_exact(fmt: Format, mask: str, device: str) -> None:
    """Within the budget of a kernel, and what the rounding of S adds: `u |S|` in the exponent, |S| being 6 at most here.

    A row that sees nothing is zero.
    """
    attend, seen = Vanilla(fmt), fitted(ALL_MASKS[mask], 53)
    inputs = on(device, attend.round_inputs(*draw((2, 4, 2, 37, 53, 24))))
    got, golden = attend(*inputs, seen), Exact()(*inputs, seen)
    bound, _ = kernel_budget(Precision.kernel(fmt), OnlineSoftmax(), *inputs, 24**-0.5, 1)
    scores = 2 * 6 * fmt.u * float(inputs[2].abs().max())
    assert float((got.out.double() - golden.out).abs().max()) <= bound + scores
    assert bool((got.out[golden.lse == float("-inf")] == 0).all())
    assert got.out.dtype == fmt.dtype


def test_rows_without_keys_are_refused(device: str) -> None:
    with pytest.raises(Unsupported, match="some rows see no key"):
        Sdpa(Backend.MATH, FP32)(*on(device, draw(SIZES)), Mask(key_lengths=(0, 64)))


def test_another_kernel_is_no_answer(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Whatever torch does, a kernel of another family is refused, by the names that the profiler saw."""
    monkeypatch.setattr(vendor, "kernels_of", lambda run, device: (run(), ("some_gemm", "softmax_warp_forward")))
    monkeypatch.setattr(vendor, "_RAN", {})
    with pytest.raises(Unsupported, match=r"attention\.backend: asked for flash, but math ran \(some_gemm\)"):
        Sdpa(Backend.FLASH, FP16 if CUDA else FP32)(*on(device, draw(SIZES)), Mask())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>",), "flash"),
        (("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64",), "cudnn"),
        (("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)",), "efficient"),
        (("triton_tem_fused_flex_attention_0",), "flex"),
        (("nvjet_tst_128x64", "softmax_warp_forward"), "math"),
        (("aten::_scaled_dot_product_flash_attention_for_cpu",), "flash"),
        (("aten::_scaled_dot_product_attention_math",), "math"),
        (("vectorized_elementwise_kernel",), ""),
        ((), ""),
        (("pytorch_flash::flash_bwd_dot_do_o_kernel<true>", "pytorch_flash::flash_bwd_dq_dk_dv_loop<1>"), "flash"),
        (("cudnn::fusion::compute_dot_do_o_specialized", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma"), "cudnn"),
        (("aten::_softmax_backward_data",), "math"),
    ],
)
def test_families(names: tuple[str, ...], expected: str) -> None:
    """The kernel that is named is the one that makes the gradients, not one that prepares delta."""
    family, kernel = vendor.kernel_family(names)
    assert family == expected
    assert not family or kernel == names[-1]


def test_bad_input() -> None:
    with pytest.raises(BadInput, match=r"tiling\.br: 48 .*powers of two"):
        Flex(48)
    with pytest.raises(BadInput, match=r"precision"):
        Sdpa(fmt=Format(5, 3)).round_inputs(*draw(SIZES))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnAGpu:
    SIZES: Sizes = (2, 4, 2, 512, 512, 64)

    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        ("attend", "fragment"),
        [
            (Sdpa(Backend.FLASH), "flash"),
            (Sdpa(Backend.CUDNN), "cudnn"),
            (Sdpa(Backend.EFFICIENT), "fmha"),
            (Flex(), "flex"),
            (Flex(64, 64), "flex"),
        ],
    )
    def test_the_kernel_asked_for_ran(self, attend: Sdpa | Flex, fragment: str, causal: bool, fmt: Format) -> None:
        attend = type(attend)(**{**vars(attend), "fmt": fmt})
        sizes = self.SIZES if isinstance(attend, Flex) else (2, 4, 4, 512, 512, 64)
        q, k, v = (t.cuda() for t in attend.round_inputs(*draw(sizes)))
        got = attend(q, k, v, Mask(causal=causal))
        golden = Exact()(q, k, v, Mask(causal=causal))
        bound, lse = kernel_budget(Precision.kernel(fmt), OnlineSoftmax(), q, k, v, 64**-0.5, 8)
        assert float((got.out.double() - golden.out).abs().max()) <= bound
        assert fragment in got.kernel
        if got.lse is not None:
            assert golden.lse is not None
            assert float((got.lse.double() - golden.lse).abs().max()) <= lse

    def test_flex_in_more_shapes_than_the_compiler_likes(self) -> None:
        """Past its limit of recompilations the compiler would go on in eager form."""
        for n in range(100, 112):
            q, k, v = (torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            assert "flex" in Flex()(q, k, v, Mask()).kernel

    def test_fp32_has_no_flash(self) -> None:
        with pytest.raises(Unsupported, match=r"attention\.backend: flash: .*"):
            Sdpa(Backend.FLASH, FP32)(*on("cuda", draw(self.SIZES)), Mask())
