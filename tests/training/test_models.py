"""The models that are trained: their start, what they depend on, and their losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from numdev.training.models import DiffusionTransformer, LanguageModel, flow_loss, flowed
from numdev.training.tasks import Language


def model(*, zero: bool = False, qk_norm: bool = True) -> DiffusionTransformer:
    made = DiffusionTransformer(8, 2, 32, 2, 2, 10, 4, qk_norm=qk_norm)
    if not zero:  # as after some training: nothing is 0
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.1)
    return made


def inputs(count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(count, 3, 8, 8), torch.rand(count), torch.randint(0, 10, (count, 4))


def test_the_picture_starts_at_zero_each_block_as_the_identity_and_every_weight_gets_a_gradient_later() -> None:
    start = model(zero=True)
    assert not start(*inputs()).any()
    x = torch.randn(3, 16, 32)
    for block in start.blocks:
        assert torch.equal(block(x, torch.randn(3, 4, 64), torch.randn(3, 32)), x)
    made = model()
    made(*inputs()).square().sum().backward()
    assert not [name for name, parameter in made.named_parameters() if parameter.grad is None or not parameter.grad.any()]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_the_picture_depends_on_picture_time_and_caption_of_its_own_row_alone(changed: int) -> None:
    made, before = model(), inputs()
    after = [each.clone() for each in before]
    after[changed][0] = (after[changed][0] + 1) % 10
    one, other = made(*before), made(*after)
    assert not torch.allclose(one[0], other[0])
    torch.testing.assert_close(one[1:], other[1:])


@pytest.mark.parametrize("qk_norm", [True, False])
def test_under_bf16_the_picture_is_fp32_and_close(qk_norm: bool) -> None:
    made, given = model(qk_norm=qk_norm), inputs()
    exact = made(*given)
    with torch.autocast("cpu", torch.bfloat16):
        cast = made(*given)
    for picture in (cast, made.to(torch.bfloat16)(*given)):
        assert picture.dtype == torch.float32
        # A few dozen roundings of 2^-9 one behind the other, relative to the largest pixel.
        assert (picture - exact).abs().max() < 32 * 2**-9 * exact.abs().max()


def test_a_token_depends_on_none_behind_it_and_the_loss_is_the_mean_of_minus_log_p() -> None:
    language = LanguageModel(11, 12, 32, 2, 2)
    nn.init.normal_(language.out.weight)
    tokens = torch.randint(0, 11, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 11
    before, after = language(tokens), language(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
    p = before.softmax(dim=-1)
    losses = [-math.log(p[row, place, tokens[row, place + 1]].item()) for row in range(2) for place in range(11)]
    assert Language().loss(language, {"tokens": tokens}).item() == pytest.approx(sum(losses) / 22, rel=1e-5)


def test_the_loss_is_that_of_the_velocity_with_its_weight() -> None:
    """(1 - t)^2 || (X_1 - X_0) - v ||^2 of v = (f - X_t) / (1 - t); none where the prediction is the picture."""
    noise, picture = torch.randn(5, 3, 4, 4).double(), torch.rand(5, 3, 4, 4).double()
    time = torch.rand(5, dtype=torch.float64)
    t = time[:, None, None, None]
    x = (1 - t) * noise + t * picture
    difference = (0.3 * x - x) / (1 - t) - (picture - noise)
    loss = flow_loss(lambda x, at: 0.3 * x, noise.float(), picture.float(), time.float())
    assert loss.item() == pytest.approx(((1 - t) * difference).square().mean().item(), rel=1e-5)  # in FP32
    assert flow_loss(lambda x, at: picture.float(), noise.float(), picture.float(), time.float()) == 0


def test_eulers_method_goes_straight_to_a_picture_and_is_of_first_order() -> None:
    """A prediction f = x + (1 - t) x follows dx/dt = x, which has x(1) = e x(0), and n steps give (1 + 1/n)^n."""
    noise, picture = torch.randn(3, 2, 2).double(), torch.randn(3, 2, 2).double()
    start = torch.ones(1, 1, dtype=torch.float64)
    for steps in (1, 10, 100):
        torch.testing.assert_close(flowed(lambda x, time: picture, noise, steps), picture, rtol=0, atol=steps * 1e-13)
        x = flowed(lambda x, time: x + (1 - time)[:, None] * x, start, steps).item()
        assert x == pytest.approx((1 + 1 / steps) ** steps, rel=1e-12)
