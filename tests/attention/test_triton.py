"""Our fast kernels: against golden within a derived budget over a grid of features; refusals; repeatability."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from numdev.attention.base import Attention
from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented
from numdev.attention.kernels import forward, portable, runtime
from numdev.attention.kernels.hopper.launch import pinned_br
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.softmax import Exponential, Normalise, OnlineSoftmax, ScaleOn, SumOver
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Kernel, Products, Triton
from numdev.errors import BadInput, Unsupported
from tests.budget import kernel_budget
from tests.cases import MASKS, Sizes, draw, fitted, lse_of, on

RAGGED: Sizes = (2, 4, 2, 37, 53, 24)
SMALL = Triton(br=16, bc=16)
TF32_PRODUCT = 2 * 2.0**-11


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` returns holds NaN, so that an element that no kernel writes shows."""
    empty = torch.empty

    def poisoned(*args: object, **keywords: object) -> Tensor:
        made: Tensor = empty(*args, **keywords)  # type: ignore[call-overload]
        return made.fill_(float("nan")) if made.is_floating_point() and made.dtype.itemsize > 1 else made

    monkeypatch.setattr(torch, "empty", poisoned)


def check(attend: Triton, q: Tensor, k: Tensor, v: Tensor, mask: Mask, device: str, *, product: float = 0.0) -> Tensor:
    """`out` of a run on rounded inputs, after its comparison with golden on the same."""
    rounded = on(device, attend.round_inputs(q, k, v))
    scale = q.shape[-1] ** -0.5
    got = attend(*rounded, mask, scale)
    golden = Exact()(*rounded, mask, scale)
    tiles = -(-k.shape[-2] // (attend.bc or 16)) + (attend.splits or 1)
    out, lse = kernel_budget(attend.precision, attend.softmax, *rounded[:3], scale, tiles, product)
    assert got.out.dtype == attend.format.dtype
    assert not bool(got.out.isnan().any()), "an element was not written"
    assert float((got.out.double() - golden.out).abs().max()) <= out
    empty = lse_of(golden) == float("-inf")
    assert torch.equal(lse_of(got) == float("-inf"), empty)
    assert bool((got.out[empty] == 0).all())
    if not bool(empty.all()):
        assert float((lse_of(got).double() - lse_of(golden))[~empty].abs().max()) <= lse
    assert got.kernel.startswith("numdev "), got.kernel
    return got.out


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("fmt", [FP16, FP32, BF16], ids=str)
def test_masks(fmt: Format, name: str, device: str) -> None:
    check(replace(SMALL, fmt=fmt), *draw(RAGGED), fitted(MASKS[name], 53), device)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("splits", [1, 3])
def test_one_query_of_heads_that_share_keys(name: str, splits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a group are rows of one tile, unless a window sets them apart."""
    seen, run = [], portable.run

    def spied(request: portable.Request, q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        seen.append(tuple(q.shape))
        return run(request, q, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(portable, "run", spied)
    mask = fitted(MASKS[name], 53)
    out = check(replace(SMALL, splits=splits, kernel=Kernel.PORTABLE), *draw((2, 6, 2, 1, 53, 24)), mask, device)
    assert out.shape == (2, 6, 1, 24)
    assert seen == [(2, 6, 1, 24) if mask.window is not None else (2, 2, 3, 24)]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_fp8_inputs_give_fp16(fmt: Format, device: str) -> None:
    out = check(
        replace(SMALL, fmt=fmt, softmax=OnlineSoftmax(exp=Exponential.EXP2, p_scale=256.0)), *draw(RAGGED), Mask(), device
    )
    assert out.dtype == torch.float16


SHAPES: list[Sizes] = [
    (1, 1, 1, 1, 1, 16),
    (1, 2, 1, 1, 70, 32),
    (1, 1, 1, 70, 1, 16),
    (1, 1, 1, 33, 64, 80),
    (1, 1, 1, 20, 20, 256),
    (1, 6, 2, 17, 40, 96),
]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(sizes: Sizes, causal: bool, device: str) -> None:
    """One query, one key, more queries than keys, head dims that are no power of two, grouped heads."""
    check(replace(SMALL, fmt=FP16), *draw(sizes), Mask(causal=causal), device)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=9)], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("order", [Order.FORWARD, Order.REVERSE])
@pytest.mark.parametrize("bc", [16, 20, 64])
def test_order_splits_and_tiles(bc: int, order: Order, splits: int, mask: Mask, device: str) -> None:
    attend = Triton(FP16, br=32, bc=bc, order=order, splits=splits, kernel=Kernel.PORTABLE)
    check(attend, *draw((1, 2, 1, 50, 90, 32)), mask, device)


@pytest.mark.parametrize("exp", [Exponential.EXP, Exponential.EXP2])
@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_recurrences(exp: Exponential, threshold: float, device: str) -> None:
    softmax = OnlineSoftmax(exp=exp, rescale_threshold=threshold)
    check(replace(SMALL, fmt=FP16, softmax=softmax), *draw(RAGGED, spread=3.0), Mask(causal=True), device)


def test_tf32_products_are_chosen_explicitly(device: str) -> None:
    attend = Triton(FP32, br=16, bc=16, products=Products.TF32)
    check(attend, *draw(RAGGED), Mask(), device, product=TF32_PRODUCT)


def test_strided_and_transposed_inputs(device: str) -> None:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in draw(RAGGED))
    k = torch.stack([k, k], -1)[..., 0]  # a last dimension with stride 2
    base = check(SMALL, *draw(RAGGED), Mask(), device)
    assert torch.equal(check(SMALL, q, k, v, Mask(), device), base)


def test_large_logits(device: str) -> None:
    """Scores of +-1e4: one key takes all, and nothing overflows."""
    q, k, v = (torch.zeros(1, 1, n, 16, dtype=torch.float64) for n in (20, 40, 40))
    q[..., 0], k[..., 0] = 100.0, torch.linspace(-400, 400, 40)
    v[..., 0] = torch.arange(40)
    out = SMALL(*on(device, SMALL.round_inputs(q, k, v)), Mask(), 1.0)
    assert out.out[..., 0].eq(39).all()
    assert torch.allclose(lse_of(out).cpu(), torch.tensor(40000.0), rtol=2.0**-8)


def test_the_same_bits_every_time(device: str) -> None:
    inputs = on(device, SMALL.round_inputs(*draw(RAGGED)))
    first = SMALL(*inputs, Mask(causal=True))
    for _ in range(3):
        again = SMALL(*inputs, Mask(causal=True))
        assert torch.equal(first.out, again.out)
        assert torch.equal(lse_of(first), lse_of(again))


@pytest.mark.parametrize("scale", [0.0, -0.1, float("inf"), float("nan")])
@pytest.mark.parametrize("attend", [SMALL, Instrumented(Precision.parse("bf16"))], ids=["triton", "instrumented"])
def test_a_scale_that_is_not_positive_and_finite_is_refused(attend: Attention, scale: float, device: str) -> None:
    """The kernels take the maximum of S before they scale it, which is that of the scaled S for a positive factor alone."""
    with pytest.raises(BadInput) as error:
        attend(*on(device, draw(RAGGED)), Mask(), scale)
    assert error.value.field == "problem.scale"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), pytest.param(float("-inf"), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("splits", "causal"),
    [(1, True), (3, False), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((1, False), (3, True)))],
)
def test_what_padding_holds_touches_nothing(value: float, splits: int, causal: bool, device: str) -> None:
    padded(replace(SMALL, splits=splits, kernel=Kernel.PORTABLE), RAGGED, (31, 0), value, device, causal=causal)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_padding_holds_touches_nothing_of_the_instrumented_kernel(value: float, device: str) -> None:
    padded(Instrumented(Precision.parse("kernel_bf16"), Tiling(16, 16)), RAGGED, (31, 0), value, device, causal=True)


def padded(
    attend: Triton | Instrumented, sizes: Sizes, lengths: tuple[int, ...], value: float, device: str, *, causal: bool
) -> None:
    """Hold keys beyond the last of each batch entry to `value`, and the result to its bits with zeros there."""
    mask = Mask(causal=causal, key_lengths=lengths)
    q, k, v = on(device, (t.to(attend.storage) for t in attend.round_inputs(*draw(sizes))))
    results = []
    for filling in (0.0, value):
        k, v = k.clone(), v.clone()
        for entry, length in enumerate(lengths):
            k[entry, :, length:], v[entry, :, length:] = filling, filling
        results.append(attend(q, k, v, mask))
    clean, dirty = results
    assert torch.equal(clean.out, dirty.out)
    assert torch.equal(lse_of(clean), lse_of(dirty))
    empty = lse_of(dirty) == float("-inf")
    assert torch.equal(empty.any(-1).any(-1).cpu(), torch.tensor(lengths) == 0) or causal
    assert bool((dirty.out[empty] == 0).all())


def test_a_gpu_of_amd_is_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells compute capability (9, 0) of a gfx90a."""

    class Properties:
        gcnArchName = "gfx90a:sramecc+:xnack-"  # noqa: N815

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert runtime.generation(torch.device("cuda")) == "gfx90a:sramecc+:xnack-"


def test_a_tile_that_does_not_fit_says_what_it_needs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            raise OutOfResources(139520, 101376, "shared memory")

    monkeypatch.setattr(forward, "attention", Full())
    with pytest.raises(Unsupported, match=r"tiling: .*16 x 16 .*139520 bytes of shared memory.*has 101376"):
        SMALL(*on(device, draw(RAGGED)), Mask())


@pytest.mark.parametrize(
    ("attend", "field"),
    [
        (Triton(order=Order.RANDOM), "tiling.order"),
        (Triton(bc=512), "tiling.bc"),
        (Triton(br=512), "tiling.br"),
        (Triton(softmax=OnlineSoftmax(exp=Exponential.parse("exp2_poly3"))), "softmax.exp"),
        (Triton(softmax=OnlineSoftmax(tie_shift=2.0)), "softmax.tie_shift"),
        (Triton(softmax=OnlineSoftmax(exp=Exponential.EXP2, sum_over=SumOver.PROBABILITIES)), "softmax.sum_over"),
        (Triton(softmax=OnlineSoftmax(scale_on=ScaleOn.QUERIES)), "softmax.scale_on"),
        (Triton(products=Products.TF32), "attention.products"),
        (Triton(FP32, kernel=Kernel.HOPPER), "attention.kernel"),
    ],
    ids=str,
)
def test_what_it_cannot_honour_is_refused_by_name(attend: Triton, field: str, device: str) -> None:
    with pytest.raises(Unsupported) as error:
        attend(*on(device, draw(RAGGED)), Mask())
    assert error.value.field == field


def test_a_head_dim_beyond_registers_is_refused(device: str) -> None:
    with pytest.raises(Unsupported, match=r"problem\.head_dim"):
        SMALL(*on(device, draw((1, 1, 1, 4, 4, 300))), Mask())


def test_a_format_without_a_kernel_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"precision.*use one of bf16, fp16, fp32, e4m3fn, e5m2"):
        Triton(Format(5, 3))
    with pytest.raises(BadInput, match=r"tiling\.br"):
        Triton(br=0)


def test_division_at_each_step(device: str) -> None:
    check(replace(SMALL, fmt=FP16, softmax=OnlineSoftmax(Normalise.EACH, Exponential.EXP2)), *draw(RAGGED), Mask(), device)


def test_without_a_gpu_or_the_interpreter_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unsupported, match="need a CUDA device; use device=cuda, or TRITON_INTERPRET=1"):
        SMALL(*draw(RAGGED), Mask())
    monkeypatch.setattr(runtime, "triton_version", lambda: "none")
    with pytest.raises(Unsupported, match="triton is not installed"):
        SMALL(*draw(RAGGED), Mask())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    """Full-size tiles, and the Hopper kernel where it runs."""

    KERNELS = (Kernel.PORTABLE, Kernel.AUTO)
    LARGE: Sizes = (2, 8, 2, 1000, 1000, 64)

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, key_lengths=(0, 700))], ids=str)
    @pytest.mark.parametrize("dim", [64, 128, 256])
    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
    def test_large(self, fmt: Format, dim: int, mask: Mask, kernel: Kernel) -> None:
        check(Triton(fmt, kernel=kernel), *draw((*self.LARGE[:5], dim)), mask, "cuda")

    @pytest.mark.parametrize(("queries", "keys"), [(4096, 4096), (5056, 5056), (4224, 8256)], ids=str)
    @pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
    def test_three_groups_under_an_aligned_causal_limit(self, fmt: Format, queries: int, keys: int) -> None:
        """The pinned path of d = 64 from 4,096 keys on, in groups of one and of two heads, and with padding."""
        _needs_hopper()
        for mask in (Mask(causal=True), Mask(causal=True, key_lengths=(keys - 77, 64))):
            for kv_heads in (2, 1):
                attend, inputs = Triton(fmt, kernel=Kernel.HOPPER), draw((2, 2, kv_heads, queries, keys, 64))
                assert pinned_br(64, mask, queries, keys) == 192
                check(attend, *inputs, mask, "cuda")

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("sizes", [(3, 4, 2, 300, 700, 64), (3, 2, 1, 700, 300, 128), (3, 2, 2, 300, 4300, 256)], ids=str)
    def test_what_padding_holds_touches_nothing(self, sizes: Sizes, value: float) -> None:
        _needs_hopper()
        for br in (128, 192) if sizes[-1] == 64 else (128,):
            for causal in (False, True):
                for lengths in ((260, 0, 1), (256, 128, 127)):
                    padded(Triton(kernel=Kernel.HOPPER, br=br), sizes, lengths, value, "cuda", causal=causal)

    def test_a_row_that_sees_nothing_is_zero_whatever_others_see(self) -> None:
        """200 of 300 queries stand before the first of 100 keys, one of which holds NaN."""
        for kernel in self.KERNELS:
            q, k, v = on("cuda", (t.bfloat16() for t in draw((1, 2, 2, 300, 100, 64))))
            v[:, :, 50] = float("nan")
            found = Triton(kernel=kernel)(q, k, v, Mask(causal=True))
            assert bool((found.out[:, :, :200] == 0).all())
            assert bool((lse_of(found)[:, :, :200] == float("-inf")).all())
            assert bool(found.out[:, :, 250:].isnan().all())

    @pytest.mark.parametrize("sizes", [(1, 32, 8, 1, 5000, 128), (2, 8, 8, 3, 3001, 64), (1, 4, 1, 1, 70000, 256)], ids=str)
    def test_few_queries_occupy_the_gpu(self, sizes: Sizes) -> None:
        out = check(Triton(), *draw(sizes), Mask(causal=True), "cuda")
        again = Triton()(*on("cuda", Triton().round_inputs(*draw(sizes))), Mask(causal=True))
        assert "portable" in again.kernel
        assert " splits=" in again.kernel
        assert torch.equal(out, again.out)

    def test_a_captured_graph_outlives_other_shapes(self) -> None:
        """Its tables stay, however many others come after them."""
        inputs = on("cuda", (t.bfloat16() for t in draw((1, 2, 2, 257, 391, 64))))
        for kernel in self.KERNELS:
            attend, mask = Triton(kernel=kernel), Mask(causal=True, key_lengths=(383,))
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                expected = attend(*inputs, mask).out.clone()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    captured = attend(*inputs, mask).out
            small = on("cuda", (t.bfloat16() for t in draw((1, 1, 1, 64, 200, 64))))
            for length in range(1, 150):
                attend(*small, Mask(key_lengths=(length,)))
            junk = [torch.full((4096,), -1, dtype=torch.int32, device="cuda") for _ in range(200)]
            captured.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, expected), len(junk)

    @pytest.mark.parametrize("kernel", [Kernel.PORTABLE, Kernel.HOPPER], ids=str)
    def test_heads_that_share_keys_have_the_bits_of_heads_that_do_not(self, kernel: Kernel) -> None:
        q, k, v = on("cuda", (t.bfloat16() for t in draw((2, 8, 2, 1, 1000, 128))))
        mask = Mask(key_lengths=(1000, 517))
        shared = Triton(kernel=kernel, splits=1)(q, k, v, mask)
        apart = Triton(kernel=kernel, splits=1)(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), mask)
        assert torch.equal(shared.out, apart.out)
        assert torch.equal(lse_of(shared), lse_of(apart))

    @pytest.mark.parametrize(
        "sizes", [(1, 1, 1, 1, 4097, 128), (1, 2, 2, 300, 100, 64), (3, 4, 1, 77, 500, 64), (2, 2, 1, 200, 333, 256)], ids=str
    )
    @pytest.mark.parametrize("causal", [False, True])
    def test_hopper_on_odd_shapes(self, sizes: Sizes, causal: bool) -> None:
        _needs_hopper()
        for br in (128, 192) if sizes[-1] == 64 else (128,):
            check(Triton(kernel=Kernel.HOPPER, br=br), *draw(sizes), Mask(causal=causal), "cuda")

    @pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a busy stream"])
    @pytest.mark.parametrize(
        ("kernel", "sizes"),
        [
            (Kernel.PORTABLE, (2, 4, 2, 1000, 1000, 128)),
            (Kernel.HOPPER, (2, 4, 2, 1000, 1000, 128)),
            (Kernel.HOPPER, (1, 4, 2, 4096, 4096, 64)),
            (Kernel.HOPPER, (2, 4, 2, 1000, 1000, 256)),
            (Kernel.PORTABLE, (1, 32, 8, 1, 4000, 128)),
        ],
        ids=str,
    )
    def test_a_thousand_launches_give_the_same_bits(self, kernel: Kernel, sizes: Sizes, beside: bool) -> None:
        if kernel is Kernel.HOPPER:
            _needs_hopper()
        attend = Triton(kernel=kernel)
        inputs = on("cuda", (t.bfloat16() for t in draw(sizes)))
        mask = Mask(causal=True, key_lengths=(sizes[4] - 100,) * sizes[0])
        first = attend(*inputs, mask)
        other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for launch in range(1000):
            if beside and launch % 10 == 0:
                with torch.cuda.stream(other):
                    busy @ busy
            again = attend(*inputs, mask)
            different += (first.out != again.out).sum() + (lse_of(first) != lse_of(again)).sum()
        assert int(different) == 0

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_more_than_two_to_the_31_elements(self, kernel: Kernel) -> None:
        """The last head lies beyond 32-bit offsets, and gives what it gives alone."""
        heads = 2**31 // (4096 * 64) + 2
        q, k, v = (torch.zeros(1, heads, 4096, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        last = on("cuda", (torch.randn(1, 1, 4096, 64, dtype=torch.bfloat16) for _ in range(3)))
        for whole, part in zip((q, k, v), last, strict=True):
            whole[:, -1:] = part
        got = Triton(kernel=kernel)(q, k, v, Mask()).out[:, -1:]
        assert torch.equal(got, Triton(kernel=kernel)(*last, Mask()).out)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_large_logits(self, kernel: Kernel) -> None:
        q, k, v = (torch.zeros(1, 1, 300, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        q[..., 0], k[..., 0] = 128.0, torch.linspace(-64, 64, 300).bfloat16()
        v[..., 0] = torch.arange(300) % 100
        out = Triton(kernel=kernel)(q, k, v, Mask(), 1.0).out
        best = k[0, 0, :, 0] == 64
        assert torch.allclose(out[..., 0].float(), v[0, 0, best, 0].float().mean())

    def test_the_rule_names_the_kernel(self) -> None:
        _needs_hopper()
        inputs = on("cuda", (t.bfloat16() for t in draw((1, 1, 1, 256, 256, 64))))
        wide = on("cuda", (t.bfloat16() for t in draw((1, 1, 1, 256, 256, 256))))
        assert "hopper br=128 bc=64" in Triton()(*wide, Mask()).kernel
        assert "hopper br=192 bc=128" in Triton()(*inputs, Mask()).kernel
        assert "hopper br=128 bc=128" in Triton()(*inputs, Mask(causal=True)).kernel
        assert "portable" in Triton()(*inputs, Mask(window=9)).kernel
        assert "portable" in Triton(order=Order.FORWARD)(*inputs, Mask()).kernel
        with pytest.raises(Unsupported, match=r"attention\.kernel: .*problem\.window: 9 is not implemented"):
            Triton(kernel=Kernel.HOPPER)(*inputs, Mask(window=9))


def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
