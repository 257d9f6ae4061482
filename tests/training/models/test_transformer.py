"""The diffusion transformer: its start, its shapes, and what it depends on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from numdev.training.models.attention import Attention
from numdev.training.models.transformer import DiffusionTransformer


def model(*, zero: bool = False, qk_norm: bool = True) -> DiffusionTransformer:
    made = DiffusionTransformer(8, 2, 32, 2, 2, 10, 4, qk_norm=qk_norm)
    if not zero:  # as after some training: nothing is 0
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.1)
    return made


def inputs(count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(count, 3, 8, 8), torch.rand(count), torch.randint(0, 10, (count, 4))


def test_the_picture_starts_at_zero_and_each_block_as_the_identity() -> None:
    start = model(zero=True)
    assert not start(*inputs()).any()
    x = torch.randn(3, 16, 32)
    for block in start.blocks:
        assert torch.equal(block(x, torch.randn(3, 4, 64), torch.randn(3, 32)), x)


def test_patches_come_back_to_their_places() -> None:
    made, (picture, _, _) = model(), inputs()
    patches = made._patches(picture)
    assert patches.shape == (3, 16, 12)
    assert torch.equal(made._picture(patches), picture)
    assert torch.equal(patches[0, 5].sort().values, picture[0, :, 2:4, 2:4].flatten().sort().values)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_the_picture_depends_on_picture_time_and_caption_of_its_own_row_alone(changed: int) -> None:
    made, before = model(), inputs()
    after = [each.clone() for each in before]
    after[changed][0] = (after[changed][0] + 1) % 10
    one, other = made(*before), made(*after)
    assert not torch.allclose(one[0], other[0])
    torch.testing.assert_close(one[1:], other[1:])


def test_the_order_of_words_matters() -> None:
    made, (noisy, time, _) = model(), inputs(1)
    assert not torch.allclose(made(noisy, time, torch.tensor([[1, 2, 3, 0]])), made(noisy, time, torch.tensor([[3, 2, 1, 0]])))


def test_every_weight_gets_a_gradient_once_it_has_left_its_start() -> None:
    made = model()
    made(*inputs()).square().sum().backward()
    missing = [name for name, parameter in made.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    # With every token of the vocabulary not in the batch, rows of the embedding alone may be 0.
    assert not missing


@pytest.mark.parametrize("qk_norm", [True, False])
def test_under_bf16_the_picture_is_fp32_and_close(qk_norm: bool) -> None:
    made, given = model(qk_norm=qk_norm), inputs()
    wanted = made(*given)
    with torch.autocast("cpu", torch.bfloat16):
        cast = made(*given)
    narrow = made.to(torch.bfloat16)(*given)
    for found in (cast, narrow):
        assert found.dtype == torch.float32
        # A few dozen roundings of 2^-9 one behind the other, relative to the largest pixel.
        assert (found - wanted).abs().max() < 32 * 2**-9 * wanted.abs().max()


def test_attention_is_looked_up_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Size, torch.Size, torch.dtype]] = []
    original = nn.functional.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        assert q.dtype == k.dtype == v.dtype
        seen.append((q.shape, k.shape, q.dtype))
        return original(q, k, v, is_causal=is_causal)

    made = model()
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    with torch.autocast("cpu", torch.bfloat16):
        made(*inputs())
    across, words = torch.Size((3, 2, 16, 16)), torch.Size((3, 2, 4, 16))
    assert seen == [(across, across, torch.bfloat16), (across, words, torch.bfloat16)] * 2


def test_qk_norm_bounds_the_logits() -> None:
    attention = Attention(32, 2)
    nn.init.normal_(attention.q.weight, std=100)
    q = attention.q(torch.randn(1, 5, 32)).unflatten(-1, (2, -1))
    torch.testing.assert_close(attention.q_norm(q).square().mean(dim=-1), torch.ones(1, 5, 2))
