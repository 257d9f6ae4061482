"""The emulation of a kernel: what it takes from the kernel, what must be said, and that it predicts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev import BadInput, Exponential, Instrumented, Mask, Naive, OnlineSoftmax, Order, Shape, Tiling
from numdev.arithmetic.formats import BF16, E4M3FN, FP16
from numdev.attention.base import Attention, Backward, Saved
from numdev.attention.emulation import emulation_of, gradients_emulation_of
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.triton import Kernel, Triton, TritonBackward
from numdev.attention.vendor.flex import Flex, FlexBackward
from numdev.attention.vendor.sdpa import Backend, Sdpa, SdpaBackward
from numdev.attention.vendor.vanilla import Vanilla, VanillaBackward
from tests.cases import draw_all

FORWARD, REVERSE = Order.FORWARD, Order.REVERSE


def of(head_dim: int, heads: int = 64) -> Shape:
    """A shape that fills any GPU."""
    return Shape(heads=heads, kv_heads=heads, queries=2048, keys=2048, head_dim=head_dim)


@pytest.mark.parametrize(
    ("variant", "dim", "stated", "expected"),
    [
        (Triton(kernel=Kernel.HOPPER), 64, {}, (128, REVERSE)),
        (Triton(bc=32, order=REVERSE, kernel=Kernel.PORTABLE), 64, {}, (32, REVERSE)),
        (Sdpa(Backend.FLASH), 64, {}, (128, REVERSE)),
        (Sdpa(Backend.FLASH), 128, {}, (64, REVERSE)),
        (Sdpa(Backend.CUDNN), 128, {"bc": 128, "order": FORWARD}, (128, FORWARD)),
        (Flex(bc=32), 64, {}, (32, FORWARD)),
    ],
)
def test_order_and_tile(variant: Attention, dim: int, stated: dict[str, Any], expected: tuple[int, Order]) -> None:
    found = emulation_of(variant, of(dim), **stated)
    assert (found.tiling.bc, found.tiling.order) == expected


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 132 multiprocessors: with fewer than 212 blocks of 64 rows FlashAttention-2 splits the keys."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))


@pytest.mark.usefixtures("gpu")
def test_flash_on_a_gpu_splits_the_keys_of_few_rows() -> None:
    """Heads that share keys are rows of one where there is one query."""
    flash, few = Sdpa(Backend.FLASH), Shape(heads=1, kv_heads=1, queries=211 * 64, keys=1000)
    with pytest.raises(BadInput, match=r"^tiling.bc: .*211 blocks of 64 rows .* splits the keys: give more heads"):
        emulation_of(flash, few)
    assert emulation_of(flash, few, bc=256, order=REVERSE, splits=2).tiling == Tiling(bc=256, order=REVERSE, splits=2)
    with pytest.raises(BadInput, match=r"^tiling.bc: .*128 blocks of 64 rows"):
        emulation_of(flash, Shape(batch=16, heads=32, kv_heads=8, queries=1, keys=1000))
    assert emulation_of(flash, replace(few, queries=211 * 64 + 1)).tiling == Tiling(bc=128, order=REVERSE)


def test_formats_and_recurrence_are_the_kernels() -> None:
    lazy = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0)
    found = emulation_of(Triton(E4M3FN, bc=64, softmax=lazy, splits=3, kernel=Kernel.PORTABLE), of(64))
    assert found == Tiled(Triton(E4M3FN).precision, Tiling(64, 64, splits=3), lazy, count=False)
    assert emulation_of(Sdpa(Backend.EFFICIENT, FP16), of(64)).precision == Precision.kernel(FP16)
    policy, tiling = Precision.parse("bf16"), Tiling(16, 32, REVERSE)
    assert emulation_of(Instrumented(policy, tiling), of(64)).tiling == tiling


CUDA = torch.cuda.is_available()


POLICY = BackwardPrecision.kernel(BF16)
HOPPER = TritonBackward(Triton(kernel=Kernel.HOPPER), kernel=Kernel.HOPPER)
SETTINGS: dict[str, Any] = {"br": 64, "bc": 32, "order": FORWARD, "query_order": REVERSE}
ATTEND = Tiled(Precision.kernel(BF16))


@pytest.mark.parametrize(
    ("variant", "stated", "expected"),
    [
        (SdpaBackward(Backend.CUDNN), SETTINGS, (64, 32, FORWARD, REVERSE)),
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


@pytest.mark.usefixtures("gpu")
def test_flash_on_a_gpu_adds_to_dq_in_any_order() -> None:
    for dim, br in ((64, 128), (128, 64)):
        found = gradients_emulation_of(SdpaBackward(), of(dim), Mask(), forward=ATTEND)
        assert (found.tiling, found.query_order) == (Tiling(br, 128, Order.RANDOM), REVERSE)
        assert found.recompute.exponential is Exponential.EXP2
    with pytest.raises(BadInput, match=r"^tiling\.br: .*only at .*96 and 128, for sdpabackward; state what"):
        gradients_emulation_of(SdpaBackward(), of(80), Mask(), forward=ATTEND)


# A variant, what is unlike a shape of head_dim 64 and no mask, what is said beside, and the words of the refusal.
REFUSED: list[tuple[Attention | Backward, Shape, Mask, dict[str, Any], str]] = [
    (Triton(bc=64), of(64), Mask(), {}, r"^attention\.kernel: .*give"),
    (Triton(kernel=Kernel.PORTABLE), of(64), Mask(), {}, r"^tiling\.bc: .*depends on the launch.*state what"),
    (Sdpa(Backend.FLASH), of(96), Mask(), {}, r"^tiling\.bc: .*state what"),
    (Sdpa(Backend.CUDNN), of(64), Mask(), {}, r"^tiling\.bc: .*not published.*state what"),
    (Sdpa(Backend.CUDNN), of(64), Mask(), {"bc": 128}, r"^tiling\.order"),
    *((each, of(64), Mask(), {}, r"^tiling\.bc: .*it has no tiles") for each in (Exact(), Naive(Precision.golden()), Vanilla())),
    (SdpaBackward(Backend.CUDNN), of(64), Mask(), {}, r"^tiling\.br: .*not published.*state what"),
    *((each, of(64), Mask(), {}, r"^tiling\.br: .*has no tiles") for each in (SdpaBackward(Backend.MATH), VanillaBackward())),
    (FlexBackward(), of(64), Mask(), {}, r"^tiling\.br: .*depends on the launch"),
    (TritonBackward(ATTEND, kernel=Kernel.PORTABLE), of(64), Mask(), {}, r"^tiling\.br: .*depends on the launch"),
    (FlexBackward(), of(64), Mask(causal=True), {"br": 64, "bc": 64}, r"^tiling\.order: .*cuts come first"),
    (SdpaBackward(), Shape(heads=4, kv_heads=2), Mask(), {}, r"^problem\.kv_heads: 2 .*each head before it sums"),
    (TritonBackward(ATTEND), of(64), Mask(), {}, r"^backward\.kernel: 'auto' .*portable or hopper"),
    (HOPPER, of(96), Mask(causal=True), {}, r"^problem\.head_dim: 96 .*64, 128 and 256"),
]


@pytest.mark.parametrize(("variant", "shape", "mask", "sides", "words"), REFUSED)
def test_what_is_not_known_must_be_said(
    variant: Attention | Backward, shape: Shape, mask: Mask, sides: dict[str, Any], words: str
) -> None:
    predict: Any = partial(gradients_emulation_of, forward=ATTEND) if isinstance(variant, Backward) else emulation_of
    with pytest.raises(BadInput, match=words):
        predict(variant, shape, mask, **sides)


def test_the_forward_pass_is_the_emulation_of_its_own_unless_given() -> None:
    ours = TritonBackward(Triton(bc=32, order=REVERSE, kernel=Kernel.PORTABLE), br=16, bc=16, kernel=Kernel.PORTABLE)
    found = gradients_emulation_of(ours, of(64), Mask())
    assert isinstance(found.forward, Tiled)
    assert found.forward.tiling == Tiling(bc=32, order=REVERSE)
    unknown = TritonBackward(Triton(kernel=Kernel.PORTABLE), br=16, bc=16, kernel=Kernel.PORTABLE)
    with pytest.raises(BadInput, match=r"^forward: 'triton' .*tiling\.bc: .*depends on the launch.*or give the forward pass"):
        gradients_emulation_of(unknown, of(64), Mask())
    assert gradients_emulation_of(unknown, of(64), Mask(), forward=unknown.forward_pass).forward == unknown.forward


@pytest.mark.parametrize(("dim", "queries", "keys", "causal"), [(64, 1000, 1000, False), (128, 700, 300, True)])
def test_the_hopper_kernel_has_an_order(dim: int, queries: int, keys: int, causal: bool) -> None:
    """Its tiles by hand: 128 keys and 128 or 64 queries."""
    shape, mask = Shape(heads=4, kv_heads=4, queries=queries, keys=keys, head_dim=dim), Mask(causal=causal)
    emulation = gradients_emulation_of(HOPPER, shape, mask, forward=ATTEND)
    assert emulation.turns == Turns(128)
    assert emulation.tiling == Tiling(128 if dim == 64 else 64, 128)
    assert emulation.recompute.exponential is Exponential.EXP2


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.skipif(CUDA and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_emulation_predicts_the_hopper_kernel(dim: int, causal: bool) -> None:
    """From the kernel's own O and LSE: mostly equal, and apart by much less than either is from golden."""
    variant, mask, shape = HOPPER, Mask(causal=causal), (1, 4, 2, 1000, 1000, dim)
    q, k, v, do = (x.cuda() for x in variant.round_inputs(*draw_all(shape)))
    theirs, exact = variant(q, k, v, do, mask).tensors(), ExactBackward()(q, k, v, do, mask).tensors()
    sizes = Shape(1, 4, 2, 1000, 1000, dim)
    ours = gradients_emulation_of(variant, sizes, mask, forward=variant.forward_pass)(q, k, v, do, mask).tensors()
    for name in ("dq", "dk", "dv"):
        a, b, golden = theirs[name].double(), ours[name].double(), exact[name]
        assert float((a == b).double().mean()) > 0.9, name
        assert rms(a - b) < 0.5 * rms(b - golden), name


@pytest.mark.skipif(CUDA, reason="the kernel of a CPU")
@pytest.mark.parametrize(("queries", "heads", "causal"), [(64, 2, False), (800, 1, False), (200, 2, True)])
def test_the_emulation_predicts_flash_on_a_cpu(queries: int, heads: int, causal: bool) -> None:
    """Tiles of 32, 64 or 256 rows, of whose sums each is rounded; from the O of the kernel itself, of which it makes delta.

    Both sides add in FP32 in their own order, so that a result differs only where two sums fall on either side of a rounding:
    mostly equal, and apart by much less than either is from golden. Other tiles of queries are another prediction of dK and dV.
    """
    variant, mask = SdpaBackward(Backend.FLASH), Mask(causal=causal)
    shape = (1, heads, heads, queries, queries, 16)
    inputs = variant.round_inputs(*draw_all(shape))
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
