"""Facts of every implementation, and attention as a differentiable function: formats, shapes, gradcheck, and what is refused."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from numdev import BadInput, Custom, Flex, Instrumented, Mask, Sdpa, Tiling, Triton, Unsupported, Vanilla
from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, FP64, Format
from numdev.attention.base import Attention, Backward, saved_by
from numdev.attention.differentiable import differentiable
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.naive import Naive, NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import OutputForDelta, Recompute
from numdev.attention.tiled import Tiled, TiledBackward
from tests.cases import draw_all

GOLDEN = Tiled(Precision.golden(), Tiling(2, 3))


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.clone().requires_grad_() for x in tensors)


@pytest.mark.parametrize(
    ("output", "dtype"),
    [(OutputForDelta.ROUNDED, torch.bfloat16), (OutputForDelta.UNROUNDED, torch.float32)],
)
def test_it_is_its_two_passes(output: OutputForDelta, dtype: torch.dtype) -> None:
    """O is the forward pass's and the gradients are the backward pass's, in the dtype of the model."""
    forward = Tiled(Precision.kernel(BF16), Tiling(16, 16))
    backward = TiledBackward(Exact(), BackwardPrecision.kernel(BF16), Tiling(16, 16), Recompute(output=output))
    inputs = tuple(x.to(dtype) for x in draw_all((2, 4, 2, 20, 24, 8)))
    q, k, v = leaves(*inputs[:3])
    out = differentiable(q, k, v, forward, backward, Mask(causal=True), None)
    out.backward(inputs[3])  # type: ignore[no-untyped-call]
    rounded = backward.round_inputs(*inputs)
    saved = saved_by(forward, output, rounded[:3], Mask(causal=True), None)
    want = backward.backward(*rounded, saved, Mask(causal=True))
    assert out.dtype == dtype
    assert torch.equal(out, forward(*rounded[:3], Mask(causal=True)).out.to(dtype))
    for leaf, gradient in ((q, want.dq), (k, want.dk), (v, want.dv)):
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        assert torch.equal(leaf.grad, gradient.to(dtype))


def test_a_narrow_model_gets_results_that_are_rounded_once() -> None:
    """1 + 2^-8 + 2^-40 is nearer to 1 + 2^-7 than to 1; through FP32 it would be a tie, and become 1."""
    v = torch.full((1, 1, 1, 1), 1.0, dtype=torch.bfloat16)

    class Above(Exact):
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None):  # type: ignore[no-untyped-def]
            found = super().__call__(q, k, v, mask, scale)
            found.out.add_(2.0**-8 + 2.0**-40)
            return found

    assert differentiable(v, v, v, Above(), ExactBackward(), Mask(), 1.0).item() == 1 + 2.0**-7


def test_gradients_are_once_differentiable() -> None:
    q, k, v = leaves(*draw_all((1, 1, 1, 3, 3, 2))[:3])
    out = differentiable(q, k, v, Exact(), ExactBackward(), Mask(), None)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()  # type: ignore[no-untyped-call]


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, _ = draw_all((1, 1, 1, 3, 3, 2))
    backward = TiledBackward(GOLDEN, BackwardPrecision.kernel(BF16), recompute=Recompute(output=OutputForDelta.UNROUNDED))
    with pytest.raises(BadInput, match="^k: "):
        differentiable(q, k.float(), v, Exact(), ExactBackward(), Mask(), None)
    with pytest.raises(BadInput, match="^q: "):
        differentiable(q.long(), k.long(), v.long(), Exact(), ExactBackward(), Mask(), None)
    with pytest.raises(Unsupported, match=r"^forward: Vanilla returns no LSE"):
        differentiable(q, k, v, Vanilla(FP32), TiledBackward(GOLDEN, BackwardPrecision.kernel(BF16)), Mask(), None)
    with pytest.raises(Unsupported, match=r"^recompute\.output: Vanilla can only return its output rounded"):
        differentiable(q, k, v, Vanilla(FP32), backward, Mask(), None)


EXACT = "numdev.attention.exact:rounded_once"
VARIANTS: list[tuple[Attention, Format, Format]] = [
    (Exact(), FP64, FP64),
    (Naive(Precision.eager(FP16)), FP16, FP32),
    (Tiled(Precision.fp8()), FP16, FP32),
    (Tiled(Precision.kernel(BF16).with_step(output="fp32")), FP32, FP32),
    (Instrumented(Precision.uniform(FP16)), FP16, FP16),
    (Triton(BF16), BF16, FP32),
    (Triton(E4M3FN), FP16, FP32),
    (Vanilla(BF16), BF16, FP32),
    (Sdpa(fmt=FP64), FP64, FP64),
    (Flex(fmt=FP32), FP32, FP32),
    (Custom(EXACT, FP16), FP16, FP32),
]


@pytest.mark.parametrize(("variant", "out", "lse"), VARIANTS, ids=lambda value: str(value)[:60])
def test_each_output_has_a_format_of_its_own(variant: Attention, out: Format, lse: Format) -> None:
    """`out` that of the last step, `lse` that of the row sum; kernels keep the latter in FP32."""
    assert list(variant.formats.items()) == [("out", out), ("lse", lse)]
    assert variant.format == out


BOTH_PASSES: list[Attention | Backward] = [
    *(Exact(), ExactBackward(), Naive(Precision.golden()), NaiveBackward(BackwardPrecision.golden(), Precision.golden())),
    *(GOLDEN, TiledBackward(GOLDEN, BackwardPrecision.golden())),
]


FITTING = {"q": (1, 2, 5, 4), "k": (1, 2, 7, 4), "v": (1, 2, 7, 4), "do": (1, 2, 5, 4)}
MISFITS: list[tuple[str, dict[str, tuple[int, ...]]]] = [
    ("k", {"k": (1, 2, 7, 3), "v": (1, 2, 7, 3)}),
    ("k", {"q": (2, 2, 5, 4)}),
    ("v", {"v": (1, 2, 8, 4)}),
    ("v", {"v": (1, 1, 7, 4)}),
    ("problem.kv_heads", {"q": (1, 3, 5, 4)}),
    ("q", {"q": (1, 2, 0, 4)}),
    ("q", {"q": (2, 5, 4)}),
    ("problem.key_lengths", {"lengths": (7, 7)}),
    ("problem.key_lengths", {"lengths": (8,)}),
    ("do", {"v": (1, 2, 7, 6)}),
]


@pytest.mark.parametrize("variant", BOTH_PASSES, ids=lambda variant: type(variant).__name__)
@pytest.mark.parametrize(("field", "shapes"), MISFITS)
def test_shapes_that_do_not_fit_are_refused(
    variant: Attention | Backward, field: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    q, k, v, do = (torch.ones(shapes.get(name, shape)) for name, shape in FITTING.items())
    call, mask = cast("Any", variant), Mask(key_lengths=shapes.get("lengths"))
    if isinstance(variant, Backward) or field != "do":
        with pytest.raises(BadInput, match=f"^{field}: "):
            call(*(q, k, v, do)[: 4 if isinstance(variant, Backward) else 3], mask)
