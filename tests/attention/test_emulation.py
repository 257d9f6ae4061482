"""The emulation of a kernel: what it takes from the kernel, what must be said, and that it predicts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from numdev.arithmetic.formats import BF16, E4M3FN, FP16
from numdev.attention.base import ForwardPass
from numdev.attention.emulation import emulation_of
from numdev.attention.exact import Exact, rounded_once
from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import Exponential, OnlineSoftmax
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Kernel, Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.errors import BadInput
from tests.cases import draw

FORWARD, REVERSE = Order.FORWARD, Order.REVERSE
OURS = "numdev.attention.exact:rounded_once"


def of(head_dim: int, heads: int = 64) -> Shape:
    """A shape that fills any GPU."""
    return Shape(heads=heads, kv_heads=heads, queries=2048, keys=2048, head_dim=head_dim)


@pytest.mark.parametrize(
    ("variant", "dim", "stated", "expected"),
    [
        (Triton(kernel=Kernel.HOPPER), 64, {}, (128, REVERSE)),
        (Triton(bc=32, kernel=Kernel.PORTABLE), 64, {}, (32, FORWARD)),
        (Triton(bc=32, order=REVERSE, kernel=Kernel.PORTABLE), 64, {}, (32, REVERSE)),
        (Sdpa(Backend.FLASH), 64, {}, (128, REVERSE)),
        (Sdpa(Backend.FLASH), 128, {}, (64, REVERSE)),
        (Sdpa(Backend.FLASH), 96, {"bc": 64}, (64, REVERSE)),
        (Sdpa(Backend.EFFICIENT), 64, {}, (64, FORWARD)),
        (Sdpa(Backend.EFFICIENT), 128, {}, (128, FORWARD)),
        (Sdpa(Backend.EFFICIENT), 128, {"bc": 32, "order": REVERSE}, (32, REVERSE)),
        (Sdpa(Backend.CUDNN), 128, {"bc": 128, "order": FORWARD}, (128, FORWARD)),
        (Flex(bc=32), 64, {}, (32, FORWARD)),
        (Custom(OURS), 64, {"bc": 16, "order": FORWARD}, (16, FORWARD)),
    ],
)
def test_order_and_tile(variant: ForwardPass, dim: int, stated: dict[str, Any], expected: tuple[int, Order]) -> None:
    found = emulation_of(variant, of(dim), **stated)
    assert (found.tiling.bc, found.tiling.order) == expected


@pytest.mark.parametrize(
    ("variant", "dim", "field"),
    [
        (Triton(bc=64), 64, "attention.kernel"),
        (Triton(kernel=Kernel.PORTABLE), 64, "tiling.bc"),
        (Sdpa(Backend.FLASH), 96, "tiling.bc"),
        (Sdpa(Backend.CUDNN), 64, "tiling.bc"),
        (Sdpa(Backend.MATH), 64, "tiling.bc"),
        (Flex(), 64, "tiling.bc"),
        (Custom(OURS), 64, "tiling.bc"),
        (Exact(), 64, "tiling.bc"),
        (Naive(Precision.golden()), 64, "tiling.bc"),
        (Vanilla(), 64, "tiling.bc"),
    ],
)
def test_what_is_not_known_must_be_said(variant: ForwardPass, dim: int, field: str) -> None:
    with pytest.raises(BadInput, match=f"^{field}: .*(state what|give)"):
        emulation_of(variant, of(dim))


def test_what_has_no_tiles_says_so() -> None:
    for variant in (Exact(), Naive(Precision.golden()), Vanilla()):
        with pytest.raises(BadInput, match=f"it has no tiles, for {type(variant).__name__.lower()}"):
            emulation_of(variant, of(64))


def test_an_order_that_is_not_known() -> None:
    with pytest.raises(BadInput, match=r"^tiling.order"):
        emulation_of(Sdpa(Backend.CUDNN), of(64), bc=128)


def test_flex_under_a_mask_has_an_order_of_its_own() -> None:
    causal = Mask(causal=True)
    with pytest.raises(BadInput, match=r"^tiling.order: .*cuts come first"):
        emulation_of(Flex(bc=64), of(64), causal)
    assert emulation_of(Flex(bc=64), of(64), causal, order=FORWARD).tiling == Tiling(bc=64)


class TestFlashOnAGpu:
    """Of 132 multiprocessors: with fewer than 212 blocks of 64 rows FlashAttention-2 splits the keys."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))

    def test_the_last_shape_that_it_splits(self) -> None:
        few = Shape(heads=1, kv_heads=1, queries=211 * 64, keys=1000)
        with pytest.raises(BadInput, match=r"^tiling.bc: .*211 blocks of 64 rows .* splits the keys: give more heads"):
            emulation_of(Sdpa(Backend.FLASH), few)
        assert emulation_of(Sdpa(Backend.FLASH), few, bc=256, order=REVERSE, splits=2).tiling == Tiling(
            bc=256, order=REVERSE, splits=2
        )

    def test_heads_that_share_keys_are_rows_of_one_where_there_is_one_query(self) -> None:
        with pytest.raises(BadInput, match=r"^tiling.bc: .*128 blocks of 64 rows"):
            emulation_of(Sdpa(Backend.FLASH), Shape(batch=16, heads=32, kv_heads=8, queries=1, keys=1000))

    def test_the_first_that_it_does_not(self) -> None:
        many = Shape(heads=1, kv_heads=1, queries=211 * 64 + 1, keys=1000)
        assert emulation_of(Sdpa(Backend.FLASH), many).tiling == Tiling(bc=128, order=REVERSE)


def test_formats_and_recurrence_are_the_kernels() -> None:
    lazy = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0)
    found = emulation_of(Triton(E4M3FN, bc=64, softmax=lazy, splits=3, kernel=Kernel.PORTABLE), of(64))
    assert found == Tiled(Triton(E4M3FN).precision, Tiling(64, 64, splits=3), lazy, count=False)
    assert emulation_of(Sdpa(Backend.EFFICIENT, FP16), of(64)).precision == Precision.kernel(FP16)
    policy, tiling = Precision.parse("bf16"), Tiling(16, 32, REVERSE)
    assert emulation_of(Instrumented(policy, tiling), of(64)).tiling == tiling


@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_rounded_once(causal: bool) -> None:
    q, k, v = (t.bfloat16() for t in draw((1, 2, 1, 16, 24, 8)))
    found = rounded_once(q, k, v, mask=Mask(causal=causal))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, Exact()(q, k, v, Mask(causal=causal)).out.bfloat16())
    assert Custom(OURS, BF16)(q, k, v, Mask(causal=causal)).out.equal(found)
