"""Gradients of torch's own attention: within derived budgets, with the kernel that ran; what is refused; and their emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, Format
from numdev.attention.backward.triton import TritonBackward
from numdev.attention.base import Gradients, Saved
from numdev.attention.differentiable import WithGradients
from numdev.attention.emulation import gradients_emulation_of
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.kernels import profiling
from numdev.attention.mask import Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Kernel, Triton
from numdev.attention.vendor import dispatch
from numdev.attention.vendor.dispatch import ByAutograd
from numdev.attention.vendor.flex import FlexBackward
from numdev.attention.vendor.sdpa import Backend, SdpaBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.errors import BadInput, Unsupported
from tests.attention.backward.cases import Inputs, draw_all, same
from tests.attention.backward.vendor_budget import stored_budget
from tests.attention.kernels.backward_budget import Bounds, Left, backward_budget, of_output
from tests.budget import kernel_budget
from tests.cases import Sizes

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
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=str)
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
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("fmt", [FP32, BF16], ids=str)
def test_math_on_a_cpu(fmt: Format, mask: str) -> None:
    variant = SdpaBackward(Backend.MATH, fmt)
    inputs = rounded(variant, draw_all((2, 4, 2, 53, 53, 24)), "cpu")
    got = variant(*inputs, MASKS[mask])
    policy = math_policy(fmt)
    sums = policy.with_step(dk_sum=fmt, dv_sum=fmt)  # what a group adds
    within(got, inputs, MASKS[mask], stored_budget(sums, inputs, MASKS[mask], 24**-0.5), policy)
    assert got.kernel == "aten::_softmax_backward_data"
    assert got.dk.dtype == fmt.dtype


@pytest.mark.parametrize("mask", [*MASKS, *(f"hiding {name}" for name in HIDING)])
@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=str)
def test_vanilla(fmt: Format, mask: str, device: str) -> None:
    """Also where rows see no key, for which softmax has no answer and no gradient."""
    seen = HIDING[mask.removeprefix("hiding ")] if mask.startswith("hiding") else MASKS[mask]
    variant = VanillaBackward(fmt)
    inputs = rounded(variant, draw_all(GROUPED), device)
    got = variant(*inputs, seen)
    policy = BackwardPrecision.uniform(fmt)
    within(got, inputs, seen, stored_budget(policy, inputs, seen, 24**-0.5), policy)


@pytest.mark.parametrize("zero", ["q", "k"])
@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=str)
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


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=str)
def test_inputs_are_rounded_as_by_a_policy(fmt: Format) -> None:
    """Once, to the same numbers, and with the same key, so that golden is computed once for both."""
    variant, policy = SdpaBackward(Backend.MATH, fmt), NaiveBackward.eager(fmt)
    drawn = draw_all(SIZES)
    for mine, other in zip(variant.round_inputs(*drawn), policy.round_inputs(*drawn), strict=True):
        assert mine.dtype == variant.storage == fmt.dtype
        assert torch.equal(mine.double(), other.double())
    assert variant.input_key == policy.input_key


def test_another_kernel_is_no_answer(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Forward and backward are proven apart: here the forward pass is the one asked for, and its gradients are not."""
    names = iter([("aten::_scaled_dot_product_flash_attention_for_cpu",), ("some_gemm", "softmax_warp_backward")])
    monkeypatch.setattr(profiling, "kernels", lambda run, device: (run(), next(names)))
    monkeypatch.setattr(dispatch, "_RAN", {})
    variant = SdpaBackward(Backend.FLASH, FP16 if CUDA else FP32)
    with pytest.raises(Unsupported, match=r"backward\.backend: asked for flash, but math ran \(some_gemm\)"):
        variant(*rounded(variant, draw_all(SIZES), device), Mask())


@pytest.mark.parametrize(
    ("names", "family", "kernel"),
    [
        (("void pytorch_flash::flash_bwd_dot_do_o_kernel<true>", "void pytorch_flash::flash_bwd_dq_dk_dv_loop<1>"), "flash", 1),
        (("cudnn::fusion::compute_dot_do_o_specialized", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma"), "cudnn", 1),
        (("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention)",), "efficient", 0),
        (("triton_tem_fused_flex_attention_backward_0",), "flex", 0),
        (("aten::_softmax_backward_data",), "math", 0),
    ],
)
def test_families(names: tuple[str, ...], family: str, kernel: int) -> None:
    """The kernel that is named is the one that makes the gradients, not one that prepares delta."""
    assert profiling.family(names) == (family, names[kernel])


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


def test_the_callers_tensors_are_left_alone() -> None:
    variant = SdpaBackward(Backend.MATH, FP32)
    q, k, v, do = rounded(variant, draw_all(SIZES), "cpu")
    with torch.no_grad():
        got = variant(q, k, v, do, Mask())
    assert not any(x.requires_grad or x.grad is not None for x in (q, k, v, do))
    assert not any(x.requires_grad for x in got.tensors().values())


def of(head_dim: int, queries: int = 2048) -> Shape:
    return Shape(heads=64, kv_heads=64, queries=queries, keys=2048, head_dim=head_dim)


POLICY = BackwardPrecision.kernel(BF16)
STATED: dict[str, Any] = {"br": 64, "bc": 32, "order": FORWARD, "query_order": REVERSE}
ATTEND = Tiled(Precision.kernel(BF16))


@pytest.mark.parametrize(
    ("variant", "stated", "expected"),
    [
        (SdpaBackward(Backend.CUDNN), STATED, (64, 32, FORWARD, REVERSE)),
        (SdpaBackward(Backend.EFFICIENT, FP16), STATED, (64, 32, FORWARD, REVERSE)),
        (FlexBackward(), {"br": 64, "bc": 32}, (64, 32, FORWARD, FORWARD)),
        (
            TritonBackward(Triton(kernel=Kernel.PORTABLE), br=16, bc=32, order=REVERSE, kernel=Kernel.PORTABLE),
            {},
            (16, 32, REVERSE, REVERSE),
        ),
        (TiledBackward(ATTEND, POLICY, Tiling(16, 48, REVERSE), query_order=FORWARD), {}, (16, 48, REVERSE, FORWARD)),
    ],
)
def test_tiles_and_orders(variant: Any, stated: dict[str, Any], expected: tuple[int, int, Order, Order]) -> None:
    found = gradients_emulation_of(variant, of(64), Mask(), forward=ATTEND, **stated)
    assert (found.tiling.br, found.tiling.bc, found.tiling.order, found.query_order) == expected
    assert found.precision == BackwardPrecision.kernel(variant.format)
    assert found.forward == ATTEND


def test_flash_on_a_gpu_adds_to_dq_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for dim, br in ((64, 128), (128, 64)):
        found = gradients_emulation_of(SdpaBackward(), of(dim), Mask(), forward=ATTEND)
        assert (found.tiling, found.query_order) == (Tiling(br, 128, Order.RANDOM), REVERSE)
        assert found.recompute.exponential is Exponential.EXP2
    with pytest.raises(BadInput, match=r"^tiling\.br: .*only at .*96 and 128, for sdpabackward; state what"):
        gradients_emulation_of(SdpaBackward(), of(80), Mask(), forward=ATTEND)


@pytest.mark.parametrize(
    ("variant", "field"),
    [
        (SdpaBackward(Backend.CUDNN), "tiling.br: .*not published"),
        (SdpaBackward(Backend.MATH), "tiling.br: .*has no tiles"),
        (VanillaBackward(), "tiling.br: .*has no tiles"),
        (NaiveBackward.eager(BF16), "tiling.br: .*has no tiles"),
        (FlexBackward(), "tiling.br: .*depends on the launch"),
        (TritonBackward(ATTEND, kernel=Kernel.PORTABLE), "tiling.br: .*depends on the launch"),
    ],
)
def test_what_is_not_known_must_be_said(variant: WithGradients, field: str) -> None:
    with pytest.raises(BadInput, match=f"^{field}.*state what"):
        gradients_emulation_of(variant, of(64), Mask(), forward=ATTEND)


def test_orders_that_no_tiling_has() -> None:
    with pytest.raises(BadInput, match=r"^tiling\.order: .*cuts come first"):
        gradients_emulation_of(FlexBackward(), of(64), Mask(causal=True), br=64, bc=64, forward=ATTEND)
    with pytest.raises(BadInput, match=r"^problem\.kv_heads: 2 .*each head before it sums"):
        gradients_emulation_of(SdpaBackward(), Shape(heads=4, kv_heads=2), Mask(), forward=ATTEND)


def test_the_forward_pass_is_the_emulation_of_its_own_unless_given() -> None:
    ours = TritonBackward(Triton(bc=32, order=REVERSE, kernel=Kernel.PORTABLE), br=16, bc=16, kernel=Kernel.PORTABLE)
    found = gradients_emulation_of(ours, of(64), Mask())
    assert isinstance(found.forward, Tiled)
    assert found.forward.tiling == Tiling(bc=32, order=REVERSE)
    unknown = TritonBackward(Triton(kernel=Kernel.PORTABLE), br=16, bc=16, kernel=Kernel.PORTABLE)
    with pytest.raises(BadInput, match=r"^forward: 'triton' .*tiling\.bc: .*depends on the launch.*or give the forward pass"):
        gradients_emulation_of(unknown, of(64), Mask())
    assert gradients_emulation_of(unknown, of(64), Mask(), forward=unknown.forward_pass).forward == unknown.forward
    with pytest.raises(BadInput, match=r"^forward: 'ExactBackward' .*give the forward pass"):
        gradients_emulation_of(TritonBackward(ExactBackward(), br=16, bc=16, kernel=Kernel.PORTABLE), of(64), Mask())  # type: ignore[arg-type]


HOPPER = TritonBackward(Triton(kernel=Kernel.HOPPER), kernel=Kernel.HOPPER)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(1000, 1000, False), (5000, 5000, True), (700, 300, True)])
def test_the_hopper_kernel_has_an_order(dim: int, queries: int, keys: int, causal: bool) -> None:
    """Its tiles by hand: 128 keys and 128 or 64 queries."""
    shape, mask = Shape(heads=4, kv_heads=4, queries=queries, keys=keys, head_dim=dim), Mask(causal=causal)
    emulation = gradients_emulation_of(HOPPER, shape, mask, forward=ATTEND)
    assert emulation.turns == Turns(None if causal else 8, shared=True)
    assert emulation.tiling == Tiling(128 if dim == 64 else 64, 128)
    assert emulation.recompute.exponential is Exponential.EXP2


def test_one_of_several_kernels_has_no_emulation() -> None:
    shape = of(64)
    with pytest.raises(BadInput, match=r"^backward\.kernel: 'auto' .*portable or hopper"):
        gradients_emulation_of(TritonBackward(ATTEND), shape, Mask(), forward=ATTEND)
    with pytest.raises(BadInput, match=r"^problem\.head_dim: 96 .*64 and 128"):
        gradients_emulation_of(HOPPER, of(96), Mask(causal=True), forward=ATTEND)


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
@pytest.mark.skipif(CUDA and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_emulation_predicts_the_hopper_kernel(dim: int, causal: bool) -> None:
    """From the kernel's own O and LSE: mostly equal, and apart by much less than either is from golden."""
    variant, mask, shape = HOPPER, Mask(causal=causal), (1, 2, 2, 1000, 1000, dim)
    q, k, v, do = (x.cuda() for x in variant.round_inputs(*draw_all(shape)))
    theirs, exact = variant(q, k, v, do, mask).tensors(), ExactBackward()(q, k, v, do, mask).tensors()
    sizes = Shape(1, 2, 2, 1000, 1000, dim)
    ours = gradients_emulation_of(variant, sizes, mask, forward=variant.forward_pass)(q, k, v, do, mask).tensors()
    for name in ("dq", "dk", "dv"):
        a, b, golden = theirs[name].double(), ours[name].double(), exact[name]
        assert float((a == b).double().mean()) > 0.9, name
        assert rms(a - b) < 0.5 * rms(b - golden), name


@pytest.mark.skipif(CUDA, reason="the kernel of a CPU")
@pytest.mark.parametrize(("queries", "heads", "causal"), [(64, 2, False), (200, 2, False), (800, 1, False), (200, 2, True)])
def test_the_emulation_predicts_flash_on_a_cpu(queries: int, heads: int, causal: bool) -> None:
    """Tiles of 32, 64 or 256 rows, of whose sums each is rounded; from the O of the kernel itself, of which it makes delta.

    Both sides add in FP32 in their own order, so that a result differs only where two sums fall on either side of a rounding:
    mostly equal, and apart by much less than either is from golden. Other tiles of queries are another prediction of dK and dV.
    """
    variant, mask = SdpaBackward(Backend.FLASH), Mask(causal=causal)
    shape = (1, heads, heads, queries, queries, 16)
    inputs = rounded(variant, draw_all(shape), "cpu")
    theirs, exact = variant(*inputs, mask).tensors(), ExactBackward()(*inputs, mask).tensors()
    lse = ATTEND(*ATTEND.round_inputs(*inputs[:3]), mask).lse
    assert lse is not None
    saved = Saved(variant.forward(*inputs[:3], mask).out.float(), lse)

    def equal(br: int | None) -> dict[str, tuple[float, float]]:
        emulation = gradients_emulation_of(variant, Shape(*shape), mask, br=br, forward=ATTEND)
        ours = emulation.backward(*emulation.round_inputs(*inputs), saved, mask).tensors()
        pairs = {name: (gradient.double(), ours[name].double(), exact[name]) for name, gradient in theirs.items()}
        return {name: (float((a == b).double().mean()), rms(a - b) / rms(a - golden)) for name, (a, b, golden) in pairs.items()}

    for name, (share, apart) in equal(None).items():
        assert share > 0.95, name
        assert apart < 0.3, name
    coarse = equal(7)
    assert max(coarse["dk"][0], coarse["dv"][0]) < 0.5


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


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
        passes = variant.passes(*rounded(variant, draw_all(self.SIZES), "cuda"), Mask())
        first = passes.backward()
        for again in (passes.backward(), passes.both()):
            assert torch.equal(again.dv, first.dv)

    @staticmethod
    def check(variant: ByAutograd, sizes: Sizes, mask: Mask, policy: BackwardPrecision, fragment: str) -> None:
        inputs = rounded(variant, draw_all(sizes), "cuda")
        got = variant(*inputs, mask)
        within(got, inputs, mask, of_kernel(variant.fmt, inputs, mask, Left(), policy), policy)
        assert fragment in got.kernel
