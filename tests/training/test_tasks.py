"""The tasks that ship: what each promises to a run, its schedule, checks and random numbers; models, their start and losses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from numdev.errors import BadInput
from numdev.training.data import NULL
from numdev.training.tasks import DiffusionTransformer, Language, LanguageModel, Task, TextToImage, flow_loss, flowed, seeded

PICTURES = TextToImage(steps=60, warmup=5, batch=8, width=64, depth=1, heads=1, learning_rate=4e-3, sampled=8, euler_steps=2)
WORDS = Language(steps=30, warmup=5, batch=8, length=32, width=32, depth=1, heads=2)
TASKS = [pytest.param(PICTURES, 0.6, id="text to image"), pytest.param(WORDS, 0.75, id="language")]


@pytest.mark.parametrize(("task", "share"), TASKS)
def test_batches_are_the_same_bits_in_any_order_of_calls(task: Task, share: float) -> None:
    first = [task.batch_of(step, 1) for step in (0, 1)]
    again = [task.batch_of(step, 1) for step in (1, 0)][::-1]
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for name, tensor in first[0].items():
        assert len(tensor) == task.batch
        assert tensor.dtype in (torch.float32, torch.int64)
        assert not torch.equal(tensor, first[1][name])
        assert not torch.equal(tensor, task.batch_of(0, 2)[name])


@pytest.mark.parametrize(("task", "share"), TASKS)
def test_a_task_is_learned_from_the_loss_of_guessing_and_a_loss_is_the_mean_over_equal_slices(
    task: TextToImage | Language, share: float
) -> None:
    """Guesses are grey pictures, and each byte as likely as any other."""

    def held_out() -> float:
        with torch.no_grad():
            return task.loss(model, task.held_out()).item()

    model = task.model(0)
    guessing = PICTURES.held_out()["pictures"].square().mean().item() if task is PICTURES else math.log(256)
    assert held_out() == pytest.approx(guessing, rel=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.rate_at(step)
        optimizer.zero_grad()
        task.loss(model, task.batch_of(step, 0)).backward()
        optimizer.step()
    assert held_out() < share * guessing
    batch, half = task.batch_of(0, 0), task.batch // 2
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(half), slice(half, None))]
    whole = task.loss(model, batch).item()
    assert sum(task.loss(model, part).item() for part in parts) / 2 == pytest.approx(whole, rel=1e-5)
    assert 0 < task.samples(model, 0).score <= 1 or task is PICTURES


def test_a_tenth_of_the_captions_is_dropped() -> None:
    batch = replace(PICTURES, batch=2000).batch_of(0, 0)
    empty = (batch["tokens"] == NULL).all(dim=1).double().mean().item()
    assert empty == pytest.approx(0.1, abs=4 * math.sqrt(0.1 * 0.9 / 2000))
    assert not (PICTURES.held_out()["tokens"] == NULL).all(dim=1).any()


def test_samples_of_an_untrained_model_do_not_score() -> None:
    samples, again = (PICTURES.samples(PICTURES.model(0), 0) for _ in range(2))
    assert samples.score < 0.2
    assert samples.pictures is not None
    assert again.pictures is not None
    assert samples.pictures.shape == (8, 3, 32, 32)
    assert torch.equal(samples.pictures, again.pictures)


def test_guidance_goes_on_from_without_a_caption_to_with_it() -> None:
    """In one step from noise the picture is the prediction: f_free + w (f_caption - f_free), before it is cut off at 1."""

    class Captioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(0.25))

        def forward(self, x: torch.Tensor, time: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x, 0.125) + self.factor * (tokens != NULL).any(1).float()[:, None, None, None]

    for weight in (0.0, 1.0, 2.0):
        made = replace(PICTURES, guidance=weight, euler_steps=1).samples(Captioned(), 0).pictures
        assert made is not None
        torch.testing.assert_close(made, torch.full_like(made, 0.125 + 0.25 * weight), rtol=0, atol=2**-20)


def test_the_rate_rises_and_falls_to_a_tenth() -> None:
    task = replace(WORDS, steps=110, warmup=10, learning_rate=2.0)
    rates = [task.rate_at(step) for step in range(111)]
    assert [rates[step] for step in (0, 9, 10, 60, 110)] == pytest.approx([0.2, 2.0, 2.0, 2 * (0.1 + 0.45), 0.2])
    assert all(one > other for one, other in itertools.pairwise(rates[10:]))


def test_initial_weights_are_of_the_seed_alone_and_leave_random_numbers_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = next(seeded(lambda: nn.Linear(4, 4), 1).parameters())
    assert torch.equal(torch.rand(3), expected)
    again, other = (next(seeded(lambda: nn.Linear(4, 4), seed).parameters()) for seed in (1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("steps", 0), ("euler_steps", 0), ("learning_rate", math.nan), ("warmup", 351), ("weight_decay", -1.0), ("clip", -1.0)],
        *[("patch", 5), ("width", 97), ("dropped", 1.0), ("guidance", math.inf)],
    ],
)
def test_a_field_that_cannot_be_is_named(field: str, value: float) -> None:
    with pytest.raises(BadInput, match=f"task.{field}"):
        TextToImage(**{field: value})  # type: ignore[arg-type]


def transformer(*, zero: bool = False, qk_norm: bool = True) -> DiffusionTransformer:
    made = DiffusionTransformer(TextToImage(picture=8, patch=2, width=32, depth=2, heads=2, qk_norm=qk_norm))
    if not zero:  # as after some training: nothing is 0
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.1)
    return made


def inputs(count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(count, 3, 8, 8), torch.rand(count), torch.randint(0, 10, (count, 16))


def test_the_picture_starts_at_zero_each_block_as_the_identity_and_every_weight_gets_a_gradient_later() -> None:
    start = transformer(zero=True)
    assert not start(*inputs()).any()
    x = torch.randn(3, 16, 32)
    for block in start.blocks:
        assert torch.equal(block(x, torch.randn(3, 16, 64), torch.randn(3, 32)), x)
    made = transformer()
    made(*inputs()).square().sum().backward()
    assert not [name for name, parameter in made.named_parameters() if parameter.grad is None or not parameter.grad.any()]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_the_picture_depends_on_picture_time_and_caption_of_its_own_row_alone(changed: int) -> None:
    made, before = transformer(), inputs()
    after = [each.clone() for each in before]
    after[changed][0] = (after[changed][0] + 1) % 10
    one, other = made(*before), made(*after)
    assert not torch.allclose(one[0], other[0])
    torch.testing.assert_close(one[1:], other[1:])


@pytest.mark.parametrize("qk_norm", [True, False])
def test_under_bf16_the_picture_is_fp32_and_close(qk_norm: bool) -> None:
    made, given = transformer(qk_norm=qk_norm), inputs()
    exact = made(*given)
    with torch.autocast("cpu", torch.bfloat16):
        cast = made(*given)
    for picture in (cast, made.to(torch.bfloat16)(*given)):
        assert picture.dtype == torch.float32
        # A few dozen roundings of 2^-9 one behind the other, relative to the largest pixel.
        assert (picture - exact).abs().max() < 32 * 2**-9 * exact.abs().max()


def test_a_token_depends_on_none_behind_it_and_the_loss_is_the_mean_of_minus_log_p() -> None:
    language = LanguageModel(Language(length=12, width=32, depth=2, heads=2))
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
