"""Captions against their pictures, the renderer, and what is held out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from numdev.training.data import UNKNOWN
from numdev.training.scenes import (
    Colour,
    Relation,
    Scene,
    Scenes,
    Shape,
    Size,
    Thing,
    draw,
    picture_of,
    render,
    scenes,
    tokens,
    vocabulary,
)

RED = Thing(Size.SMALL, Colour.RED, Shape.CIRCLE)
BLUE = Thing(Size.LARGE, Colour.BLUE, Shape.SQUARE)


def middle(picture: torch.Tensor, colour: Colour) -> tuple[float, float]:
    """Mean (right, down) of the pixels that are of exactly this colour."""
    inside = (picture == torch.tensor(colour.value)[:, None, None]).all(dim=0)
    assert inside.any()
    down, right = inside.nonzero().double().mean(dim=0).tolist()
    return right, down


def test_every_scene_has_its_own_caption_of_known_words() -> None:
    assert len({scene.caption for scene in scenes()}) == len(scenes()) == 36 + 36 * 4 * 36
    assert UNKNOWN not in tokens()
    assert tokens().max() == vocabulary().size - 1


@pytest.mark.parametrize("relation", list(Relation))
def test_things_stand_as_the_relation_says(relation: Relation) -> None:
    number = [scene.caption for scene in scenes()].index(Scene(RED, relation, BLUE).caption)
    jitter = np.random.default_rng(0).random((64, 6), dtype=np.float32)
    for picture in picture_of(np.full(64, number), jitter, 32):
        red, blue = middle(picture, Colour.RED), middle(picture, Colour.BLUE)
        right, down = relation.value
        along = right * (red[0] - blue[0]) + down * (red[1] - blue[1])
        across = abs(down * (red[0] - blue[0]) + right * (red[1] - blue[1]))
        assert along > 2 * across
        assert along > 13


def test_things_never_touch() -> None:
    drawn = draw(1, 0, 512, 32)
    for scene, picture in zip(drawn.scenes, drawn.pictures, strict=True):
        pair = [torch.tensor(thing.colour.value)[:, None, None] for thing in scene.things]
        share = picture.abs().amax(dim=0)
        assert share.max() == 1
        # Where two colours mix, a pixel is a multiple of neither.
        assert torch.stack([(picture - colour * share).abs().amax(dim=0) for colour in pair]).amin(dim=0).max() == 0


def test_the_same_bits_in_any_order_of_calls_and_for_a_smaller_batch() -> None:
    first = [draw(7, step, 16, 32).pictures for step in (0, 1, 2)]
    again = [draw(7, step, 8, 32).pictures for step in (2, 1, 0)]
    assert all(torch.equal(one[:8], other) for one, other in zip(first, reversed(again), strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], draw(8, 0, 16, 32).pictures)


def test_what_is_held_out_is_never_trained_on_in_either_wording() -> None:
    scene = next(scene for scene in scenes() if scene.second and scene.is_held_out)
    assert scene.relation
    assert scene.second
    assert Scene(scene.second, scene.relation.converse, scene.first).is_held_out
    assert not any(scene.is_held_out for step in range(8) for scene in draw(0, step, 64, 32).scenes)
    assert all(scene.is_held_out for scene in draw(0, 0, 64, 32, held_out=True).scenes)
    assert 0.1 < np.mean([scene.is_held_out for scene in scenes()]) < 0.15


def test_other_sizes_of_picture_show_the_same_scene() -> None:
    small, large = draw(0, 0, 8, 32), draw(0, 0, 8, 64)
    reduced = torch.nn.functional.avg_pool2d(large.pictures, 2)
    assert (reduced - small.pictures).abs().mean() < 0.02
    assert Scenes().held_out(4, 48).pictures.shape == (4, 3, 48, 48)


SHAPES = list(Shape)


def single(values: object) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def one(shape: Shape, right: float, down: float, radius: float, picture: int = 32) -> np.ndarray:
    places = np.array([[SHAPES.index(shape)]])
    return render(places, single([[[right, down]]]), single([[radius]]), picture)[0, 0]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_pixel_is_the_share_of_points_that_lie_inside(shape: Shape) -> None:
    fine, radius, right, down = 16, 5.3, 15.7, 16.4
    at = (np.arange(32 * fine) + 0.5) / fine
    x, y = at[None, :] - right, at[:, None] - down
    if shape is Shape.CIRCLE:
        inside = x**2 + y**2 <= radius**2
    elif shape is Shape.SQUARE:
        inside = (abs(x) <= 0.88 * radius) & (abs(y) <= 0.88 * radius)
    else:  # top at 0.9 radii above the middle, base 0.9 below it; sides fall by sqrt(3)
        inside = (y <= 0.9 * radius) & (y >= -0.9 * radius + math.sqrt(3) * abs(x))
    share = inside.reshape(32, fine, 32, fine).mean(axis=(1, 3))
    wrong = abs(one(shape, right, down, radius) - share)
    # Along a slanted side: 1/8 at most, for one at 45 degrees. A corner of 60 degrees covers as little as 0.3 of its pixel.
    assert wrong.max() < 0.45
    assert np.quantile(wrong, 0.99) < 0.13
