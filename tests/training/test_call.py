"""The mask tensor of a model as a Mask: what it says, read once for all layers, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from numdev.attention.mask import Mask
from numdev.errors import BadInput, Unsupported
from numdev.training.call import MaskReader

SHAPE = (2, 3, 5, 7)
MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(key_lengths=(7, 4)),
    Mask(causal=True, key_lengths=(7, 4)),
    Mask(causal=True, window=2),
    Mask(window=2),
    Mask(key_lengths=(5, 0)),
]


def dense(mask: Mask, shape: tuple[int, ...] = SHAPE) -> Tensor:
    queries, keys = shape[-2:]
    seen = mask.visible(queries, keys, (0, queries), (0, keys), torch.device("cpu"))
    return torch.ones(1, 1, queries, keys, dtype=torch.bool) if seen is None else seen


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("expanded", [False, True])
def test_a_tensor_is_read_as_the_mask_that_it_states(mask: Mask, additive: bool, expanded: bool) -> None:
    tensor = dense(mask)
    if expanded:
        tensor = tensor.expand(SHAPE).contiguous()
    if additive:
        tensor = torch.zeros(tensor.shape).masked_fill_(~tensor, float("-inf"))
    read = MaskReader().read(tensor, SHAPE)
    assert torch.equal(dense(read).expand(SHAPE), dense(mask).expand(SHAPE))
    read.check(2, 7)


def test_the_lowest_number_stands_for_minus_infinity() -> None:
    """As in models of transformers: what torch makes of the mask is what it makes of the `Mask` that is read."""
    q, lowest = torch.randn(2, 3, 5, 4), torch.finfo(torch.float32).min
    mask, k = Mask(key_lengths=(7, 3)), torch.randn(2, 3, 7, 4)
    tensor = torch.zeros(2, 1, 1, 7).masked_fill_(torch.arange(7) >= torch.tensor([7, 3])[:, None, None, None], lowest)
    read = MaskReader().read(tensor, SHAPE)
    assert read == mask
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(q, k, k, tensor), attend(q, k, k, dense(read)))
    with pytest.raises(Unsupported, match="^attn_mask: a row sees no key"):
        MaskReader().read(tensor.clone().fill_(lowest), SHAPE)


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 2, 3, 5, 7), (5, 7)])
def test_other_numbers_of_dimensions(shape: tuple[int, ...]) -> None:
    causal = dense(Mask(causal=True))[0, 0]
    assert MaskReader().read(causal.expand(shape), shape) == Mask(causal=True)
    assert MaskReader().read(causal, shape) == Mask(causal=True)
    padded = torch.arange(7) < torch.tensor([[7], [3]])  # of q [batch, tokens, dim]: the scores have one head each
    assert MaskReader().read(padded[:, None, :], (2, 5, 7)) == Mask(key_lengths=(7, 3))


def test_a_mask_is_read_again_when_it_changes() -> None:
    """Also through memory that NumPy shares, whose changes torch does not count."""
    reader, tensor = MaskReader(), dense(Mask(key_lengths=(7, 4))).expand(2, 1, 5, 7).clone()
    for last in (4, 3):
        assert reader.read(tensor, SHAPE) == Mask(key_lengths=(7, last))
        tensor.numpy()[1, ..., last - 1] = False


def test_biases_of_torch() -> None:
    assert MaskReader().read(causal_lower_right(5, 7), SHAPE) == Mask(causal=True)
    assert MaskReader().read(causal_upper_left(5, 5), (2, 3, 5, 5)) == Mask(causal=True)
    with pytest.raises(Unsupported, match="^attn_mask: it is aligned top left"):
        MaskReader().read(causal_upper_left(5, 7), SHAPE)


def test_any_other_tensor_is_read_as_what_it_adds() -> None:
    """Padding before the sequences, packed documents, heads that differ, relative positions with and without hidden keys."""
    random = torch.Generator().manual_seed(0)
    before, heads = (torch.arange(7) >= torch.tensor([[0], [3]]))[:, None, None, :], torch.ones(SHAPE, dtype=torch.bool)
    heads[0, 1, 0, 0] = False
    packed = torch.arange(5)[:, None] // 3 == torch.arange(7) // 3
    biases = [torch.randn(size, generator=random) for size in ((3, 5, 7), SHAPE, (1, 3, 1, 7))]
    for tensor in (before, heads, packed, *biases, biases[0].masked_fill(~packed, float("-inf")), biases[1].bfloat16()):
        mask = MaskReader().read(tensor, SHAPE)
        mask.check(*(SHAPE[axis] for axis in (0, 3, 1, 2)))
        assert mask.bias is not None
        expected = torch.zeros(tensor.shape).masked_fill_(~tensor, float("-inf")) if tensor.dtype is torch.bool else tensor
        assert torch.equal(mask.bias.values.expand(SHAPE), expected.double().expand(SHAPE))


def test_a_tensor_on_another_device_and_one_that_does_not_fit_are_refused() -> None:
    for shape in ((5, 6), (7,)):
        with pytest.raises(BadInput, match=r"^attn_mask: \("):
            MaskReader().read(torch.ones(shape, dtype=torch.bool), SHAPE)
    with pytest.raises(Unsupported, match="^attn_mask: it lies on meta.*read_masks=True"):
        MaskReader().read(torch.ones(5, 7, dtype=torch.bool, device="meta"), SHAPE)
