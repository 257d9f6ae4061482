"""Rectified flow: its loss and the way along it, where the velocity is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from numdev.training.models.flow import between, euler, flow_loss, guided, velocity_of


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, 4, 4), torch.rand(5, 3, 4, 4)


def test_the_way_starts_at_noise_and_ends_at_the_picture(pair: tuple[Tensor, Tensor]) -> None:
    noise, picture = pair
    assert torch.equal(between(noise, picture, torch.zeros(5)), noise)
    assert torch.equal(between(noise, picture, torch.ones(5)), picture)


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


def test_the_prediction_is_asked_at_the_points_of_the_batch(pair: tuple[Tensor, Tensor]) -> None:
    noise, picture = pair
    time = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    seen: list[tuple[Tensor, Tensor]] = []

    def predicted(x: Tensor, at: Tensor) -> Tensor:
        seen.append((x, at))
        return x

    flow_loss(predicted, noise, picture, time)
    torch.testing.assert_close(seen[0][0][2], (noise[2] + picture[2]) / 2)
    assert torch.equal(seen[0][1], time)


def test_euler_ends_at_a_picture_that_is_predicted_everywhere(pair: tuple[Tensor, Tensor]) -> None:
    noise, picture = pair
    torch.testing.assert_close(euler(velocity_of(lambda x, time: picture), noise, 8), picture, rtol=0, atol=8 * 8 * 2**-23)


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


def test_euler_asks_at_the_start_of_each_step() -> None:
    times: list[float] = []

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        times.append(time[0].item())
        return x

    euler(velocity, torch.ones(1, 1), 4)
    assert times == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("weight", "wanted"), [(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
def test_guidance_goes_on_from_without_a_caption_to_with_it(weight: float, wanted: float) -> None:
    predicted = guided(lambda x, time: 3 * x, lambda x, time: x, weight)
    assert predicted(torch.ones(1, 1), torch.zeros(1)).item() == wanted
