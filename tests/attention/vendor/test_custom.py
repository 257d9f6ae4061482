"""A user's own function: found or refused by name, given what it was promised, and checked in what it returns."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import numdev as nd
from numdev import (
    Attention,
    Bench,
    Cast,
    Custom,
    CustomBackward,
    Distribution,
    Exact,
    Kind,
    Mask,
    Naive,
    Precision,
    Problem,
    Shape,
    Status,
)
from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, FP64, TF32, Format
from numdev.errors import BadInput, BadOutput
from tests.cases import draw

HERE = __name__
U32 = 2.0**-24


def exact(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    output = Exact()(q, k, v, mask, scale)
    assert output.lse is not None
    return output.out, output.lse


def careless(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> Tensor:
    """Scales q where it stands."""
    return exact(q.mul_(scale), k, v, mask=mask, scale=1.0)[0]


SEEN: list[torch.dtype] = []


def watched(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> Tensor:
    SEEN.extend(t.dtype for t in (q, k, v))
    return q.clone()


def unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.clone()


def confused(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> Tensor:
    return unmasked(q, k, v, scale=scale)  # type: ignore[call-arg]


RETURNED: list[object] = []


def returning(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> object:
    return RETURNED[0]


not_a_function = 3


def custom(function: Callable[..., object], fmt: Format = BF16) -> Custom:
    return Custom(f"{HERE}:{function.__name__}", fmt)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, "package.module:function") for name in ("", HERE, ":exact", ".test_custom:exact", f"{HERE}:")),
        (f"{HERE}:absent", "no function absent"),
        (f"{HERE}:not_a_function", "no function not_a_function"),
        ("no_such_package_at_all:f", "cannot be imported"),
        (f"{HERE}:exact:more", "has no function"),
    ],
)
def test_names_that_lead_nowhere(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match="^attention.function: ") as caught:
        Custom(name)
    assert hint in caught.value.hint


@pytest.mark.parametrize("fmt", [BF16, FP16, FP64, E4M3FN], ids=str)
def test_inputs_are_rounded_once_to_its_dtype(fmt: Format) -> None:
    """From FP64 to the format at once: through FP32 some would be rounded twice."""
    variant, (q, k, v) = custom(exact, fmt), draw((1, 2, 1, 5, 7, 4))
    q[0, 0, 0, 0] = 1 + 2.0**-8 + 2.0**-40  # above a tie of BF16 by less than FP32 can tell
    for rounded, tensor in zip(variant.round_inputs(q, k, v), (q, k, v), strict=True):
        assert rounded.dtype == fmt.dtype
        assert torch.equal(rounded.double(), Cast(fmt)(tensor))
    assert variant.format == fmt
    assert isinstance(variant, Attention)


@pytest.mark.parametrize("first", [True, False])
def test_it_receives_its_dtype_whoever_was_measured_before(first: bool) -> None:
    """Naive in BF16 shares its rounded inputs with it, and carries them in FP32."""
    bench, problem = Bench(Exact(), "cpu"), Problem(Distribution(Kind.NORMAL), Shape(queries=4, keys=4, head_dim=4))
    variant, naive = custom(watched), Naive(Precision.uniform(BF16))
    assert variant.input_key == naive.input_key
    alone = Bench(Exact(), "cpu").measure(problem, naive, seeds=1)
    SEEN.clear()
    records = [bench.measure(problem, one, seeds=1) for one in ((variant, naive) if first else (naive, variant))]
    assert set(SEEN) == {torch.bfloat16}
    assert [record.status for record in records] == [Status.OK] * 2
    assert records[first].rows == alone.rows


OUT, LSE = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5)
OUT_IS, LSE_IS = "(1, 2, 5, 4) in float32 on cpu", "(1, 2, 5) in float32 on cpu"


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (OUT.mT, "(1, 2, 4, 5) in float32 on cpu"),
        (None, "NoneType"),
        ((OUT, LSE, LSE), "tuple"),
        ((LSE, OUT), f"{LSE_IS} and {OUT_IS}"),
        ((OUT, LSE.mT), f"{OUT_IS} and (1, 5, 2) in float32 on cpu"),
        ((OUT, 3.0), f"{OUT_IS} and float"),
        (OUT.bfloat16(), "(1, 2, 5, 4) in bfloat16 on cpu"),
        ((OUT, LSE.double()), f"{OUT_IS} and (1, 2, 5) in float64 on cpu"),
        (OUT.to("meta"), "(1, 2, 5, 4) in float32 on meta"),
    ],
)
def test_other_things_than_attention_are_refused(returned: object, found: str) -> None:
    """With what came, and what was expected."""
    q, k, v = draw((1, 2, 2, 5, 7, 4))
    RETURNED[:] = [returned]
    with pytest.raises(BadOutput, match="^attention.function: ") as caught:
        custom(returning, FP32)(q, k, v, Mask())
    assert caught.value.hint == f"it returned {found}; it must return out {OUT_IS}, or that and lse {LSE_IS}"


def test_a_function_that_takes_other_arguments_is_refused_and_a_type_error_within_one_is_its_own() -> None:
    q, k, v = draw((1, 2, 2, 5, 7, 4))
    with pytest.raises(BadInput, match=r"called as function\(q, k, v, mask=mask, scale=scale\), .* argument 'mask'"):
        custom(unmasked)(q, k, v, Mask())
    with pytest.raises(TypeError, match="'scale'"):
        custom(confused)(q, k, v, Mask())


def test_shapes_are_checked_before_it_is_called_and_its_lse_may_be_missing() -> None:
    q, k, v = draw((1, 2, 2, 5, 7, 4))
    with pytest.raises(BadInput, match="^v: "):
        custom(returning)(q, k, v[:, :, :3], Mask())
    with pytest.raises(BadInput, match="^precision: "):
        custom(exact, TF32)
    RETURNED[:] = [(OUT, None)]
    assert list(custom(returning, FP32)(q, k, v, Mask(causal=True), 0.3).tensors()) == ["out"]


def test_a_function_may_write_to_its_inputs() -> None:
    """It gets copies: golden and the next measurement see the inputs as they were drawn."""
    problem, bench = Problem(Distribution(Kind.NORMAL), Shape(queries=4, keys=9, head_dim=4)), Bench(Exact(), "cpu")
    first = bench.measure(problem, custom(careless, FP64), seeds=1)
    second = bench.measure(problem, custom(careless, FP64), seeds=1)
    assert first.rows == second.rows
    assert max(row["max_difference"] for row in first.rows) < 1e-12, "q / 2 in FP64 is exact"


def plain(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None) -> Tensor:
    """Operations of torch, whose gradients autograd knows."""
    seen = mask.visible(q.shape[-2], k.shape[-2], (0, q.shape[-2]), (0, k.shape[-2]), q.device)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores if seen is None else scores.masked_fill(~seen, float("-inf"))).softmax(-1) @ v


class Layer(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None) -> Tensor:
        return plain(q, k, v, mask=mask, scale=scale)


class Written(torch.autograd.Function):
    """Whose gradients are written by hand: the exact ones, that of v doubled."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how = mask, scale
        return Exact()(q, k, v, mask, scale).out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        exact = nd.ExactBackward()(q, k, v, do, *ctx.how)
        return exact.dq, exact.dk, 2 * exact.dv, None, None


layer = Layer()


@pytest.mark.parametrize(("name", "dv"), [("plain", 1), ("layer", 1), ("Written", 2)])
def test_gradients_are_those_of_the_function_however_it_is_asked(name: str, dv: int) -> None:
    """Against exact ones: some hundred FP64 operations of u = 1e-16 each stay below 1e-12."""
    variant, mask = CustomBackward(f"{HERE}:{name}", FP64), Mask(causal=True)
    q, k, v = draw((1, 2, 2, 5, 7, 4))
    do = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = nd.ExactBackward()(q, k, v, do, mask, 0.3)
    own = variant(q, k, v, do, mask, 0.3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    limit = torch.ones(5, 7).tril(2).bool()
    with nd.attend(variant) as seen:
        out = nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], limit, scale=0.3)
    assert seen.calls == 1
    for one, other, expected in zip(
        (own.dq, own.dk, own.dv), torch.autograd.grad(out, leaves, do), (exact.dq, exact.dk, dv * exact.dv), strict=True
    ):
        assert torch.equal(one, other)
        assert torch.allclose(one, expected, rtol=0, atol=1e-12)
    assert pickle.loads(pickle.dumps(variant)) == variant


def test_what_has_no_gradient_is_refused() -> None:
    q, k, v = draw((1, 2, 2, 5, 7, 4))
    RETURNED[:] = [torch.zeros(1, 2, 5, 4)]
    with pytest.raises(BadOutput, match="^backward.function: .*autograd recorded nothing"):
        CustomBackward(f"{HERE}:returning", FP32)(q, k, v, q, Mask())
    with pytest.raises(BadInput, match="^backward.function: .*no function absent"):
        CustomBackward(f"{HERE}:absent")
