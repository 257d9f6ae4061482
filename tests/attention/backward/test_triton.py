"""Our fast backward kernels: against golden gradients within a derived budget over a grid of features; refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, Format
from numdev.attention.base import Gradients, Saved
from numdev.attention.differentiable import differentiable
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.kernels import backward
from numdev.attention.mask import Mask
from numdev.attention.softmax import DeltaForm, Exponential, OutputForDelta, Recompute
from numdev.attention.tiling import Order
from numdev.attention.triton import Kernel, Triton, TritonBackward
from numdev.errors import BadInput, Unsupported
from tests.attention.backward import checked
from tests.attention.backward.cases import Inputs, draw_all
from tests.attention.backward.checked import poison, rounded, saved_of, stored
from tests.cases import MASKS, Sizes, fitted

RAGGED: Sizes = (2, 2, 1, 21, 37, 24)
SMALL = TritonBackward(Triton(br=16, bc=16), br=16, bc=16)
PORTABLE = TritonBackward(Triton(), kernel=Kernel.PORTABLE)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def check(backward: TritonBackward, inputs: Inputs, mask: Mask, device: str, *, product: float = 0.0) -> Gradients:
    """As `checked.check`, of the portable kernels."""
    got = checked.check(backward, inputs, mask, device, product=product)
    assert got.kernel.startswith("numdev portable backward "), got.kernel
    return got


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("fmt", [FP16, FP32, BF16], ids=str)
def test_masks(fmt: Format, name: str, device: str) -> None:
    check(replace(SMALL, fmt=fmt), draw_all(RAGGED), fitted(MASKS[name], 37), device)


SHAPES: list[Sizes] = [
    (1, 1, 1, 1, 1, 16),
    (1, 2, 1, 1, 40, 32),
    (1, 1, 1, 40, 1, 16),
    (1, 1, 1, 33, 48, 80),
    (1, 1, 1, 20, 20, 256),
    (1, 6, 2, 17, 40, 96),
    (1, 2, 2, 50, 20, 16),
]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(sizes: Sizes, causal: bool, device: str) -> None:
    """One query, one key, more queries than keys, head dims that are no power of two, grouped heads."""
    check(replace(SMALL, fmt=FP16), draw_all(sizes), Mask(causal=causal), device)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(window=9)], ids=str)
@pytest.mark.parametrize("order", [Order.FORWARD, Order.REVERSE])
@pytest.mark.parametrize(("br", "bc"), [(16, 20), (20, 32), (64, 16)])
def test_orders_and_tiles(br: int, bc: int, order: Order, mask: Mask, device: str) -> None:
    check(replace(SMALL, fmt=FP16, br=br, bc=bc, order=order), draw_all((1, 2, 1, 34, 50, 32)), mask, device)


@pytest.mark.parametrize("exp", [Exponential.EXP, Exponential.EXP2])
@pytest.mark.parametrize("form", DeltaForm)
def test_ways_to_recompute(form: DeltaForm, exp: Exponential, device: str) -> None:
    recompute = Recompute(form, exponential=exp)
    check(replace(SMALL, recompute=recompute), draw_all(RAGGED), Mask(causal=True, key_lengths=(30, 0)), device)


def test_delta_of_p_has_no_rounding_of_the_output(device: str) -> None:
    """`rowsum(dP * P)` is FP32 throughout; `rowsum(dO * O)` has the error of O in BF16."""
    given, mask, scale = rounded(SMALL, draw_all(RAGGED), device), Mask(), 24**-0.5
    golden = ExactBackward()(*given, mask, scale).delta
    assert golden is not None
    saved, errors = saved_of(SMALL, given, mask, scale), {}
    for form in DeltaForm:
        found = replace(SMALL, recompute=Recompute(form)).backward(*given, saved, mask, scale).delta
        assert found is not None
        errors[form] = float((found.double() - golden).abs().max())
    assert errors[DeltaForm.PROBABILITIES] < errors[DeltaForm.OUTPUT] / 50


def test_tf32(device: str) -> None:
    check(replace(SMALL, fmt=FP32, tf32=True), draw_all(RAGGED), Mask(causal=True), device, product=2 * 2.0**-11)


def test_strided_inputs(device: str) -> None:
    """Tokens before heads, and heads of a larger tensor: no copy is asked for, and the bits are those of contiguous ones."""
    given, mask, scale = rounded(SMALL, draw_all(RAGGED), device), Mask(causal=True), 24**-0.5
    q, k, v, do = given = stored(given, SMALL.storage)
    saved = saved_of(SMALL, given, mask, scale)
    expected = SMALL.backward(*given, saved, mask, scale)
    k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v, do))
    q = torch.cat([q, q], -1)[..., :24]
    got = SMALL.backward(q, k, v, do, Saved(saved.out.mT.contiguous().mT, saved.lse), mask, scale)
    assert all(torch.equal(a, b) for a, b in zip(got.tensors().values(), expected.tensors().values(), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("causal", [False, True])
def test_what_padding_holds_touches_nothing(value: float, causal: bool, device: str) -> None:
    """Keys beyond the last of a batch entry, and rows that see nothing."""
    mask, scale = Mask(causal=causal, key_lengths=(21, 0)), 24**-0.5
    q, k, v, do = rounded(SMALL, draw_all((2, 2, 1, 40, 37, 24)), device)
    results = []
    hidden = ~mask.seeing_rows(2, 40, 37)[:, None, :, None].to(device)
    for filling in (0.0, value):
        k, v, q, do = k.clone(), v.clone(), q.masked_fill(hidden, filling), do.masked_fill(hidden, filling)
        for entry, length in enumerate((21, 0)):
            k[entry, :, length:], v[entry, :, length:] = filling, filling
        golden = Exact()(q.nan_to_num(0, 0, 0), k, v, mask, scale)
        assert golden.lse is not None
        results.append(SMALL.backward(q, k, v, do, Saved(golden.out, golden.lse), mask, scale))
    clean, dirty = (each.tensors() for each in results)
    for name, expected in clean.items():
        assert bool(expected.isfinite().all()), name
        assert torch.equal(dirty[name], expected), name
    assert bool((dirty["dk"][1] == 0).all())
    assert bool((dirty["dv"][0, :, 21:] == 0).all())


def test_a_row_that_sees_nothing_is_zero_whatever_others_see(device: str) -> None:
    """20 of 40 queries stand before the first of 20 keys, one of which holds NaN."""
    q, k, v, do = rounded(SMALL, draw_all((1, 1, 1, 40, 20, 16)), device)
    k[:, :, 5] = float("nan")
    found = SMALL(q, k, v, do, Mask(causal=True))
    assert found.delta is not None
    assert bool((found.dq[:, :, :20] == 0).all())
    assert bool((found.delta[:, :, :20] == 0).all())
    assert bool(found.dq[:, :, 25:].isnan().all())


def test_a_nan_stays_with_what_sees_it(device: str) -> None:
    """v of key 5 holds NaN: rows 5 to 7 see it, and have no delta; so have the keys that these rows see, 3 to 7, no gradient."""
    q, k, v, do = rounded(SMALL, draw_all((1, 1, 1, 20, 20, 16)), device)
    v[:, :, 5] = float("nan")
    given, mask = (q, k, v, do), Mask(causal=True, window=3)
    found = SMALL.backward(*given, saved_of(SMALL, given, mask, 0.25), mask, 0.25)
    assert found.delta is not None
    for gradient, first, last in ((found.dq, 5, 7), (found.delta[..., None], 5, 7), (found.dk, 3, 7)):
        without = gradient.isnan().any(-1).flatten().nonzero().flatten().tolist()
        assert without == list(range(first, last + 1))
    assert bool(found.dv.isfinite().all())


def test_large_logits(device: str) -> None:
    """Scores of +-4e4: one key takes all, so that dV is dO there, dS is 0, and nothing overflows."""
    q, k, v = (torch.zeros(1, 1, n, 16, dtype=torch.float64, device=device) for n in (20, 40, 40))
    q[..., 0], k[..., 0] = 100.0, torch.linspace(-400, 400, 40)
    v[..., 0] = torch.arange(40)
    do = torch.ones_like(q)
    found = SMALL(*SMALL.round_inputs(q, k, v, do), Mask(), 1.0)
    assert bool((found.dv[..., -1, :] == 20).all())
    assert bool((found.dv[..., :-1, :] == 0).all())
    assert bool((found.dq == 0).all())
    assert bool((found.dk == 0).all())


def test_the_same_bits_every_time(device: str) -> None:
    inputs = rounded(SMALL, draw_all(RAGGED), device)
    first = SMALL(*inputs, Mask(causal=True)).tensors()
    again = SMALL(*inputs, Mask(causal=True)).tensors()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_forward_and_backward_are_one_differentiable_function(device: str) -> None:
    """The gradients of `sum(dO * O)` by autograd are those of the kernels."""
    q, k, v, do = (x.to(device).half() for x in draw_all((1, 2, 1, 20, 33, 16)))
    backward = TritonBackward(Triton(FP16, br=16, bc=16), FP16, 16, 16)
    leaves = of_q, of_k, of_v = tuple(x.clone().requires_grad_() for x in (q, k, v))
    differentiable(of_q, of_k, of_v, backward.forward, backward, Mask(causal=True)).backward(do)  # type: ignore[no-untyped-call]
    expected = backward(q, k, v, do, Mask(causal=True))
    for leaf, name in zip(leaves, ("dq", "dk", "dv"), strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, getattr(expected, name)), name


def test_a_tile_that_does_not_fit_says_what_it_needs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **settings: object) -> None:
        raise OutOfResources(139520, 101376, "shared memory")

    class Full:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return full

    monkeypatch.setattr(backward, "dk_dv", Full())
    with pytest.raises(Unsupported, match=r"tiling: .*16 x 16 .*139520 bytes of shared memory.*has 101376"):
        SMALL(*rounded(SMALL, draw_all((1, 1, 1, 4, 4, 16)), device), Mask())


@pytest.mark.parametrize(
    ("backward", "field"),
    [
        (replace(SMALL, order=Order.RANDOM), "tiling.order"),
        (replace(SMALL, bc=512), "tiling.bc"),
        (replace(SMALL, br=512), "tiling.br"),
        (replace(SMALL, recompute=Recompute(exponential=Exponential.parse("exp2_poly3"))), "recompute.exponential"),
        (replace(SMALL, recompute=Recompute(output=OutputForDelta.UNROUNDED)), "recompute.output"),
    ],
    ids=str,
)
def test_what_it_cannot_honour_is_refused_by_name(backward: TritonBackward, field: str, device: str) -> None:
    with pytest.raises(Unsupported) as error:
        backward(*rounded(SMALL, draw_all((1, 1, 1, 4, 4, 16)), device), Mask())
    assert error.value.field == field


def test_sizes_formats_and_scales_that_are_refused(device: str) -> None:
    with pytest.raises(BadInput, match=r"precision.*use one of bf16, fp16, fp32"):
        TritonBackward(Triton(), E4M3FN)
    with pytest.raises(BadInput, match=r"tiling\.br"):
        TritonBackward(Triton(), br=0)
    with pytest.raises(BadInput, match="products"):
        TritonBackward(Triton(), tf32=True)
    given = rounded(SMALL, draw_all((1, 1, 1, 4, 4, 300)), device)
    with pytest.raises(Unsupported, match=r"problem\.head_dim"):
        SMALL.backward(*given, saved_of(SMALL, given, Mask(), 0.1), Mask())
    given = rounded(SMALL, draw_all((1, 1, 1, 4, 4, 16)), device)
    with pytest.raises(BadInput, match=r"problem\.scale"):
        SMALL.backward(*given, saved_of(SMALL, given, Mask(), 0.1), Mask(), -0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    """Full-size tiles."""

    @pytest.mark.parametrize("mask", [*MASKS.values(), Mask(causal=True, key_lengths=(0, 700))], ids=str)
    @pytest.mark.parametrize("dim", [64, 128, 256])
    @pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=str)
    def test_large(self, fmt: Format, dim: int, mask: Mask) -> None:
        check(replace(PORTABLE, forward=Triton(fmt), fmt=fmt), draw_all((2, 8, 2, 1000, 1000, dim)), mask, "cuda")

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 4097, 128), (1, 2, 2, 300, 100, 64), (3, 4, 1, 77, 500, 96)], ids=str)
    def test_odd_shapes(self, sizes: Sizes, causal: bool) -> None:
        check(PORTABLE, draw_all(sizes), Mask(causal=causal), "cuda")

    @pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a busy stream"])
    @pytest.mark.parametrize("sizes", [(2, 4, 2, 1000, 1000, 128), (1, 4, 4, 2048, 2048, 64)], ids=str)
    def test_a_thousand_launches_give_the_same_bits(self, sizes: Sizes, beside: bool) -> None:
        backward, mask, scale = PORTABLE, Mask(causal=True), sizes[-1] ** -0.5
        given = stored(rounded(backward, draw_all(sizes), "cuda"), torch.bfloat16)
        output = backward.forward(*given[:3], mask, scale)
        assert output.lse is not None
        saved = Saved(output.out, output.lse)
        first = backward.backward(*given, saved, mask, scale).tensors()
        other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for launch in range(1000):
            if beside and launch % 10 == 0:
                with torch.cuda.stream(other):
                    busy @ busy
            again = backward.backward(*given, saved, mask, scale).tensors()
            different += sum((first[name] != again[name]).sum() for name in first)
        assert int(different) == 0

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_padding_holds_touches_nothing(self, value: float) -> None:
        backward = PORTABLE
        for causal in (False, True):
            lengths = (260, 0, 1)
            mask = Mask(causal=causal, key_lengths=lengths)
            q, k, v, do = rounded(backward, draw_all((3, 4, 2, 300, 700, 64)), "cuda")
            results = []
            for filling in (0.0, value):
                k, v = k.clone(), v.clone()
                for entry, length in enumerate(lengths):
                    k[entry, :, length:], v[entry, :, length:] = filling, filling
                results.append(backward(q, k, v, do, mask).tensors())
            assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])

    def test_more_than_two_to_the_31_elements(self) -> None:
        """The last head lies beyond 32-bit offsets, and gives what it gives alone."""
        heads = 2**31 // (4096 * 64) + 2
        drawn = torch.randn(4, 1, 1, 4096, 64, dtype=torch.bfloat16, device="cuda")
        whole = torch.zeros(4, 1, heads, 4096, 64, dtype=torch.bfloat16, device="cuda")
        whole[:, :, -1:] = drawn
        backward = PORTABLE
        got = backward(whole[0], whole[1], whole[2], whole[3], Mask()).tensors()
        alone = backward(drawn[0], drawn[1], drawn[2], drawn[3], Mask()).tensors()
        assert all(torch.equal(got[name][:, -1:], alone[name]) for name in alone)
