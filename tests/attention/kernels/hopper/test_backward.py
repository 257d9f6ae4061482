"""The Hopper backward kernel on a GPU: against golden gradients, and the same bits at every launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, Format
from numdev.attention.base import Gradients, Saved
from numdev.attention.exact import ExactBackward
from numdev.attention.kernels.launch import Kernel
from numdev.attention.mask import Mask
from numdev.attention.triton import Triton, TritonBackward
from tests.attention.gradients import Inputs, check, draw_all, poison, rounded, same_bits, saved_of, stored
from tests.cases import Sizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
    ),
    pytest.mark.parametrize("dim", [64, 128]),
]
LENGTHS = (643, 0, 300)  # of 643 keys: none cut, none there, cut within a tile
NAME = "numdev hopper backward, one kernel "
HOPPER = TritonBackward(Triton(), kernel=Kernel.HOPPER)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def on_gpu(sizes: Sizes, seed: int = 0, spread: float = 1.0) -> Inputs:
    """Drawn inputs in BF16."""
    return stored(rounded(HOPPER, draw_all(sizes, seed, spread), "cuda"), torch.bfloat16)


def forward(inputs: Inputs, mask: Mask) -> Saved:
    output = Triton()(*inputs[:3], mask)
    assert output.lse is not None
    return Saved(output.out, output.lse)


def near(gradients: Gradients, inputs: Inputs, mask: Mask, fmt: Format = BF16) -> None:
    """In the norm, which the elementwise budget leaves a wide margin: as near to golden as three roundings allow.

    A gradient of random inputs is a sum of terms of random signs, so that its norm is that of its terms; rounding each of them
    to F adds at most u of it. Three such roundings lie on the way: O in delta, P or dS, and the output.
    """
    golden = ExactBackward()(*inputs, mask).tensors()
    for each, mine in gradients.tensors().items():
        error = (mine.double() - golden[each]).norm() / golden[each].norm()
        assert float(error) <= 3 * fmt.u, each


def same(a: Gradients, b: Gradients) -> None:
    mine, other = a.tensors(), b.tensors()
    for each in mine:
        assert torch.equal(mine[each], other[each]), each


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(False, None, LENGTHS), Mask(True, None, LENGTHS)], ids=str)
def test_masks_and_grouped_heads(mask: Mask, fmt: Format, dim: int) -> None:
    """515 queries and 643 keys fill no last tile; under a causal limit and lengths some rows see nothing."""
    inputs, backward = draw_all((3, 4, 2, 515, 643, dim)), replace(HOPPER, forward=Triton(fmt), fmt=fmt)
    got = check(backward, inputs, mask, "cuda")
    near(got, rounded(backward, inputs, "cuda"), mask, fmt)
    assert got.kernel.startswith(NAME), got.kernel


SHAPES: list[Sizes] = [
    (2, 2, 1, 1, 700, 0),
    (2, 2, 1, 200, 1, 0),
    (2, 2, 1, 500, 200, 0),
    (2, 2, 1, 900, 130, 0),
    (2, 4, 2, 333, 465, 0),
    (1, 2, 1, 256, 4096, 0),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_shapes(sizes: Sizes, causal: bool, dim: int) -> None:
    """One query, one key, more queries than keys, of which the first see nothing, and few queries against many keys."""
    check(HOPPER, draw_all((*sizes[:5], dim)), Mask(causal=causal), "cuda")


def test_more_tiles_of_keys_than_may_wait_for_each_other(dim: int) -> None:
    """Two groups of tiles walk one after the other, of 128 and of 1. A tile left out, one of 129, is `129^(-1/2)` of the norm."""
    inputs, mask = on_gpu((1, 1, 1, 16512, 16512, dim)), Mask()
    near(HOPPER.backward(*inputs, forward(inputs, mask), mask), inputs, mask)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("causal", [False, True])
def test_what_padding_holds_touches_nothing(value: float, causal: bool, dim: int) -> None:
    mask = Mask(causal=causal, key_lengths=LENGTHS)
    q, k, v, do = on_gpu((3, 4, 2, 515, 643, dim))
    saved = forward((q, k, v, do), mask)
    results = []
    for filling in (0.0, value):
        k, v = k.clone(), v.clone()
        for entry, length in enumerate(LENGTHS):
            k[entry, :, length:], v[entry, :, length:] = filling, filling
        results.append(HOPPER.backward(q, k, v, do, saved, mask))
    same(results[0], results[1])


def test_rows_that_see_nothing_are_zero_whatever_others_see(dim: int) -> None:
    """300 of 500 queries stand before the first of 200 keys, one of which holds NaN."""
    q, k, v, do = on_gpu((1, 2, 1, 500, 200, dim))
    k[:, :, 5] = float("nan")
    gradients = HOPPER(q, k, v, do, Mask(causal=True))
    assert gradients.delta is not None
    assert bool((gradients.dq[:, :, :300] == 0).all())
    assert bool((gradients.delta[:, :, :300] == 0).all())
    assert bool(gradients.dq[:, :, 305:].isnan().all())


def test_large_logits(dim: int) -> None:
    """Scores of +-4e4: one key takes all, so that dV is the sum of dO there, dS is 0, and nothing overflows.

    LSE is 40,000, and LSE log2(e) is off by at most 57,708 u of FP32, 0.0035: P of that key is within half an ulp of BF16 of 1.
    200 and 298 are numbers of BF16.
    """
    q, k, v = (torch.zeros(1, 1, n, dim, dtype=torch.bfloat16, device="cuda") for n in (200, 300, 300))
    q[..., 0], k[..., 0] = 100.0, torch.linspace(-400, 400, 300)
    v[..., 0] = torch.arange(300).clamp(max=298)
    inputs = (q, k, v, torch.ones_like(q))
    gradients = HOPPER.backward(*inputs, saved_of(HOPPER, inputs, Mask(), 1.0), Mask(), 1.0)
    assert bool((gradients.dv[..., -1, :] == 200).all())
    assert bool((gradients.dv[..., :-1, :] == 0).all())
    assert bool((gradients.dq == 0).all())
    assert bool((gradients.dk == 0).all())


def test_strided_inputs(dim: int) -> None:
    """Tokens before heads, in rows of twice the length: the bits are those of contiguous ones."""

    def strided(x: Tensor) -> Tensor:
        batch, heads, tokens, inner = x.shape
        made = torch.zeros(batch, tokens, heads, 2 * inner, dtype=x.dtype, device=x.device)[..., :inner].transpose(1, 2)
        return made.copy_(x)

    inputs, mask = on_gpu((2, 4, 2, 300, 300, dim)), Mask(causal=True)
    q, k, v, do = map(strided, inputs)
    assert not q.is_contiguous()
    saved = forward(inputs, mask)
    same(HOPPER.backward(q, k, v, do, saved, mask), HOPPER.backward(*inputs, saved, mask))


def test_of_itself_the_hopper_kernel_runs_and_the_portable_ones_where_it_cannot(dim: int) -> None:
    inputs, auto = on_gpu((1, 2, 2, 200, 200, dim)), replace(HOPPER, kernel=Kernel.AUTO)
    assert auto(*inputs, Mask()).kernel.startswith(NAME)
    assert auto(*inputs, Mask(window=9)).kernel.startswith("numdev portable backward ")
    unread = inputs[3][:, :, :1].expand_as(inputs[3])  # rows that the copy engine does not read
    assert auto(*inputs[:3], unread, Mask()).kernel.startswith("numdev portable backward ")


RUNS: list[tuple[Sizes, Mask]] = [
    ((3, 4, 2, 515, 643, 0), Mask(causal=True, key_lengths=LENGTHS)),
    ((8, 16, 16, 1024, 1024, 0), Mask()),
    ((4, 8, 8, 1024, 1024, 0), Mask(causal=True)),
]


@pytest.mark.parametrize(("sizes", "mask"), RUNS, ids=["causal lengths", "none", "causal"])
def test_the_same_bits_at_every_launch(sizes: Sizes, mask: Mask, dim: int) -> None:
    inputs = on_gpu((*sizes[:5], dim))
    saved = forward(inputs, mask)
    same_bits(lambda: HOPPER.backward(*inputs, saved, mask).tensors(), often=2, products=6)
