"""The models that are trained: their start, what they depend on, and their losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from numdev.training.models import (
    Attention,
    DiffusionTransformer,
    LanguageModel,
    between,
    euler,
    flow_loss,
    guided,
    next_token_loss,
    velocity_of,
)


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


@pytest.fixture
def language() -> LanguageModel:
    made = LanguageModel(11, 12, 32, 2, 2)
    nn.init.normal_(made.out.weight)
    return made


def test_a_token_depends_on_none_behind_it(language: LanguageModel) -> None:
    tokens = torch.randint(0, 11, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 11
    before, after = language(tokens), language(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_loss_starts_at_that_of_guessing() -> None:
    loss = next_token_loss(LanguageModel(11, 12, 32, 1, 2), torch.randint(0, 11, (4, 13)))
    assert loss.item() == pytest.approx(math.log(11), rel=1e-6)


def test_the_loss_is_the_mean_of_minus_log_p(language: LanguageModel) -> None:
    tokens = torch.randint(0, 11, (2, 9))
    p = language(tokens[:, :-1]).softmax(dim=-1)
    wanted = [-math.log(p[row, place, tokens[row, place + 1]].item()) for row in range(2) for place in range(8)]
    assert next_token_loss(language, tokens).item() == pytest.approx(sum(wanted) / 16, rel=1e-5)


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, 4, 4), torch.rand(5, 3, 4, 4)


def test_the_true_picture_has_no_loss_and_its_velocity_is_that_of_the_straight_way(pair: tuple[Tensor, Tensor]) -> None:
    noise, picture = pair
    time = torch.tensor([0.0, 0.1, 0.5, 0.75, 0.9])
    assert flow_loss(lambda x, at: picture, noise, picture, time) == 0
    velocity = velocity_of(lambda x, at: picture)(between(noise, picture, time), time)
    torch.testing.assert_close(velocity, picture - noise, rtol=0, atol=10 * 8 * 2**-24 * 4)  # / 0.1, of |x| < 8, a few roundings


def test_the_loss_is_that_of_the_velocity_with_its_weight(pair: tuple[Tensor, Tensor]) -> None:
    noise, picture = (each.double() for each in pair)
    time = torch.rand(5, dtype=torch.float64)

    def predicted(x: Tensor, at: Tensor) -> Tensor:
        return (0.3 * x).float()

    difference = velocity_of(predicted)(between(noise, picture, time), time) - (picture - noise)
    wanted = ((1 - time)[:, None, None, None] * difference).square().mean()
    loss = flow_loss(predicted, noise.float(), picture.float(), time.float())
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)  # FP32, and the prediction of both is in FP32


@pytest.mark.parametrize("steps", [1, 4, 32])
def test_euler_follows_a_straight_flow_exactly(steps: int) -> None:
    # Multiples of 1/8 below 16 times a power of two: no operation rounds.
    noise = torch.randint(-64, 64, (3, 2, 2)) / 8
    picture = torch.randint(-64, 64, (3, 2, 2)) / 8
    assert torch.equal(euler(lambda x, time: picture - noise, noise, steps), picture)


def test_euler_is_of_first_order() -> None:
    """dx/dt = x has x(1) = e x(0), and n steps give (1 + 1/n)^n."""
    start = torch.ones(1, 1, dtype=torch.float64)
    for steps in (10, 100):
        assert euler(lambda x, time: x, start, steps).item() == pytest.approx((1 + 1 / steps) ** steps, rel=1e-12)


@pytest.mark.parametrize(("weight", "wanted"), [(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
def test_guidance_goes_on_from_without_a_caption_to_with_it(weight: float, wanted: float) -> None:
    predicted = guided(lambda x, time: 3 * x, lambda x, time: x, weight)
    assert predicted(torch.ones(1, 1), torch.zeros(1)).item() == wanted
