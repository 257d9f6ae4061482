"""The classifier that ships, on pictures whose contents are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from numdev.training import score
from numdev.training.scenes import Colour, Relation, Scene, Scenes, Shape, Size, Thing, picture_of, scenes

RED = Thing(Size.SMALL, Colour.RED, Shape.CIRCLE)
BLUE = Thing(Size.LARGE, Colour.BLUE, Shape.SQUARE)


def pictures(scene: Scene, count: int = 16) -> torch.Tensor:
    number = [each.caption for each in scenes()].index(scene.caption)
    return picture_of(np.full(count, number), np.random.default_rng(1).random((count, 6), dtype=np.float32), 32)


def shares(scene: Scene, caption: Scene) -> tuple[float, ...]:
    shown = pictures(scene)
    return tuple(score.shares(shown, (caption.caption,) * len(shown)).values())


def test_rendered_held_out_scenes_are_read_right() -> None:
    held_out = Scenes().held_out(256, 32)
    shown = score.shares(held_out.pictures, held_out.captions)
    assert shown == {"score": 1, "relation": 1, "size": 1, "colours": 1}


@pytest.mark.parametrize(
    ("caption", "wanted"),
    [
        (Scene(RED, Relation.LEFT_OF, BLUE), (1, 1, 1, 1)),
        (Scene(BLUE, Relation.RIGHT_OF, RED), (1, 1, 1, 1)),
        (Scene(RED, Relation.RIGHT_OF, BLUE), (1, 0, 0, 1)),
        (Scene(RED, Relation.ABOVE, BLUE), (1, 0, 0, 1)),
        (Scene(replace(RED, size=Size.LARGE), Relation.LEFT_OF, BLUE), (1, 1, 0, 1)),
        (Scene(replace(RED, shape=Shape.TRIANGLE), Relation.LEFT_OF, BLUE), (0, 0, 0, 1)),
        (Scene(replace(RED, colour=Colour.BLUE), Relation.LEFT_OF, replace(BLUE, colour=Colour.RED)), (0, 0, 0, 1)),
        (Scene(RED), (0, 0, 0, 0)),
    ],
    ids=lambda each: each.caption if isinstance(each, Scene) else "",
)
def test_each_share_asks_for_what_it_says(caption: Scene, wanted: tuple[float, ...]) -> None:
    assert shares(Scene(RED, Relation.LEFT_OF, BLUE), caption) == wanted


def test_noise_and_emptiness_show_nothing() -> None:
    captions = Scenes().held_out(128, 32).captions
    assert Scenes().score(torch.randn(128, 3, 32, 32), captions) < 0.1
    assert Scenes().score(torch.zeros(128, 3, 32, 32), captions) < 0.1


def test_training_a_classifier_is_repeatable() -> None:
    one, again = (score.trained(3, 2e-3, 1, 8).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], again[name]) for name in one)
