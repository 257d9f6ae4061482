"""Captions against their pictures, the renderer, what is held out, and the classifier that ships."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from numdev.training.scenes import COLOURS, RELATIONS, Scene, Scenes, Thing, picture_of, scenes

DATA = Scenes(1.0)
RED = Thing("small", "red", "circle")
BLUE = Thing("large", "blue", "square")


def pictures(scene: Scene, count: int) -> torch.Tensor:
    number = list(scenes()).index(scene.caption)
    return picture_of(np.full(count, number), np.random.default_rng(0).random((count, 6), dtype=np.float32), 32)


def middle(picture: torch.Tensor, colour: str) -> tuple[float, float]:
    """Mean (right, down) of the pixels that are of exactly this colour."""
    inside = (picture == torch.tensor(COLOURS[colour])[:, None, None]).all(dim=0)
    assert inside.any()
    down, right = inside.nonzero().double().mean(dim=0).tolist()
    return right, down


def test_every_scene_has_its_own_caption_and_tokens() -> None:
    assert len(scenes()) == 36 + 36 * 4 * 36
    drawn = DATA.drawn(0, 0, 4096, 4)
    assert len({*map(tuple, drawn.tokens.tolist())}) == len(set(drawn.captions))
    assert set(drawn.tokens.unique().tolist()) == {0, *range(2, Scenes.tokens)}


@pytest.mark.parametrize("relation", RELATIONS)
def test_things_stand_as_the_relation_says(relation: str) -> None:
    for picture in pictures(Scene(RED, relation, BLUE), 64):
        red, blue = middle(picture, "red"), middle(picture, "blue")
        right, down = RELATIONS[relation]
        along = right * (red[0] - blue[0]) + down * (red[1] - blue[1])
        assert along > max(13, 2 * abs(down * (red[0] - blue[0]) + right * (red[1] - blue[1])))


def test_things_never_touch() -> None:
    drawn = DATA.drawn(0, 1, 512, 32)
    for caption, picture in zip(drawn.captions, drawn.pictures, strict=True):
        things = (scenes()[caption].first, scenes()[caption].second)
        pair = [torch.tensor(COLOURS[thing.colour])[:, None, None] for thing in things if thing]
        share = picture.abs().amax(dim=0)
        assert share.max() == 1
        # Where two colours mix, a pixel is a multiple of neither.
        assert torch.stack([(picture - colour * share).abs().amax(dim=0) for colour in pair]).amin(dim=0).max() == 0


def test_a_scene_that_is_held_out_is_never_trained_on_in_either_wording() -> None:
    assert all(scene.is_held_out == scene.canonical.is_held_out for scene in scenes().values() if scene.second)
    assert not any(scenes()[caption].is_held_out for step in range(8) for caption in DATA.drawn(step, 0, 64, 32).captions)
    assert all(scenes()[caption].is_held_out for caption in DATA.held_out(64, 32).captions)
    assert 0.1 < np.mean([scene.is_held_out for scene in scenes().values()]) < 0.15


def test_other_sizes_of_picture_show_the_same_scene() -> None:
    small, large = DATA.drawn(0, 0, 8, 32), DATA.drawn(0, 0, 8, 64)
    assert (torch.nn.functional.avg_pool2d(large.pictures, 2) - small.pictures).abs().mean() < 0.02


@pytest.mark.parametrize(
    ("caption", "score"),
    [
        (Scene(RED, "left of", BLUE), 1),
        (Scene(RED, "above", BLUE), 1),
        (Scene(RED._replace(size="large"), "right of", BLUE), 1),
        (Scene(RED._replace(shape="triangle"), "left of", BLUE), 0),
        (Scene(RED._replace(colour="blue"), "left of", BLUE._replace(colour="red")), 0),
        (Scene(RED), 0),
    ],
    ids=lambda each: each.caption if isinstance(each, Scene) else "",
)
def test_the_score_is_of_all_shapes_and_colours_wherever_they_stand(caption: Scene, score: float) -> None:
    assert Scenes().score(pictures(Scene(RED, "left of", BLUE), 16), (caption.caption,) * 16) == score


def test_rendered_held_out_scenes_are_read_right_and_noise_is_not() -> None:
    held_out = Scenes().held_out(256, 32)
    assert Scenes().score(held_out.pictures, held_out.captions) == 1
    assert Scenes().score(torch.randn(256, 3, 32, 32), held_out.captions) < 0.1
