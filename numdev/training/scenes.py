"""Captioned pictures without a download: one or two plain shapes, named by a caption in a small grammar; and who reads them.

    scene  = thing | thing relation thing
    thing  = "a" size colour shape
    relation = "left of" | "right of" | "above" | "below"

The 36 scenes of one thing and 5184 of two are numbered. One in eight is held out of training by a hash of what the picture shows,
so "a small red circle left of a large blue square" is held out together with "a large blue square right of a small red circle".
A classifier that was trained on the renderer says whether a picture shows what its caption says.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional

from numdev.errors import BadInput
from numdev.settings import setting
from numdev.training.data import NULL, Captioned, Purpose, stream

SHAPES = ("circle", "square", "triangle")  # each fits into 1.04 radii around its centre
SIZES = {"small": (3.0, 3.7), "large": (5.4, 6.2)}  # radius in pixels of a picture 32 wide: from, to
COLOURS = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "yellow": (1.0, 1.0, -1.0),
    "magenta": (1.0, -1.0, 1.0),
    "cyan": (-1.0, 1.0, 1.0),
}
"""Red, green and blue, from -1 to 1; the background is 0 (mid grey)."""
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Where the first thing stands, seen from the second: a step to the right and one down."""
_CONVERSE = {"right of": "left of", "below": "above"}
WORDS = ("a", *SIZES, *COLOURS, *SHAPES, *dict.fromkeys(" ".join(RELATIONS).split()))
"""All words of the grammar; the token of a word is its place, from 2 on."""


class Thing(NamedTuple):
    """One shape of a scene, in the words of the grammar."""

    size: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """The content of a caption: `first`, alone or in a relation to `second`."""

    first: Thing
    relation: str = ""
    second: Thing | None = None

    @property
    def caption(self) -> str:
        return " ".join(("a", *self.first, *((self.relation, "a", *self.second) if self.second else ())))

    @property
    def canonical(self) -> Scene:
        """Equal for both wordings of what is shown: the thing first that stands left or above."""
        if self.second is None or self.relation not in _CONVERSE:
            return self
        return Scene(self.second, _CONVERSE[self.relation], self.first)

    @cached_property
    def is_held_out(self) -> bool:
        """Whether training never sees what this scene shows, in either wording."""
        return hashlib.sha256(self.canonical.caption.encode()).digest()[0] % 8 == 0


THINGS = tuple(Thing(*choice) for choice in itertools.product(SIZES, COLOURS, SHAPES))


@lru_cache(maxsize=1)
def scenes() -> dict[str, Scene]:
    """Every scene of the grammar by its caption: those of one thing first."""
    every = (*map(Scene, THINGS), *(Scene(*pair) for pair in itertools.product(THINGS, RELATIONS, THINGS)))
    return {scene.caption: scene for scene in every}


@dataclass(frozen=True)
class Scenes:
    """Rendered scenes without end; a quarter shows one thing, the others two."""

    tokens: ClassVar[int] = len(WORDS) + 2  # 1 is of no word, and stays: the initial weights of a model depend on the number
    length: ClassVar[int] = 16  # tokens of a caption: the longest has 10 words; a multiple of what tensor cores take
    spread: float = setting(0.2, "how much places and sizes vary, from 0 to 1")

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= 1:
            raise BadInput("task.data.spread", self.spread, "use a share from 0 to 1")

    def drawn(self, step: int, seed: int, count: int, picture: int, *, held_out: bool = False) -> Captioned:
        """Scenes of a step, and their pictures of a width: functions of step, seed and row, and of whether they are held out."""
        random, table = stream(Purpose.SCENES, seed, step).random((count, 8), dtype=np.float32), _table()
        usable, choice = table.held_out == held_out, random[:, 1].astype(np.float64)
        known = (np.flatnonzero(usable & ((table.things[:, 1] >= 0) == two)) for two in (False, True))
        numbers = np.where(random[:, 0] < 0.25, *(own[(choice * len(own)).astype(np.int64)] for own in known))
        pictures = picture_of(numbers, 0.5 + self.spread * (random[:, 2:] - 0.5), picture)
        return Captioned(pictures, table.tokens[torch.from_numpy(numbers)], tuple(table.captions[number] for number in numbers))

    def held_out(self, count: int, picture: int) -> Captioned:
        """Scenes that no training step sees, the same in every call."""
        return self.drawn(0, 0, count, picture, held_out=True)

    def score(self, pictures: Float[Tensor, "count 3 height width"], captions: tuple[str, ...]) -> float:
        """Share of pictures with all shapes and colours that the caption names, and no others, wherever they stand."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            scaled = functional.interpolate(pictures.float(), (_PICTURE, _PICTURE), mode="bilinear", antialias=True)
            seen = torch.stack([choices.argmax(dim=1) for choices in _classifier()(scaled)], dim=1)
        seen[:, 4:] = torch.where(seen[:, :1] > 0, seen[:, 4:], -1)
        right, seen = torch.tensor([labels(scenes()[caption]) for caption in captions]), seen[:, [1, 2, 4, 5]]
        return ((seen == right[:, [1, 2, 4, 5]]).all(dim=1) | (seen == right[:, [4, 5, 1, 2]]).all(dim=1)).double().mean().item()


@lru_cache(maxsize=1)
def _table() -> SimpleNamespace:
    """Facts of scenes by number, as arrays; `things` are places in THINGS, -1 where there is none, `away` is (right, down)."""
    place, every = {thing: number for number, thing in enumerate(THINGS)}, list(scenes().values())
    token = {word: number for number, word in enumerate(WORDS, start=2)}
    things = np.array([[place[scene.first], -1 if scene.second is None else place[scene.second]] for scene in every])
    away = np.array([RELATIONS.get(scene.relation, (0, 0)) for scene in every])
    return SimpleNamespace(
        captions=tuple(scenes()),
        tokens=torch.tensor([[*map(token.get, one.caption.split()), *[NULL] * Scenes.length][: Scenes.length] for one in every]),
        held_out=np.array([scene.is_held_out for scene in every]),
        things=things,
        away=np.stack([away, -away], axis=1).astype(np.float32),
    )


_SHAPE = np.array([SHAPES.index(thing.shape) for thing in THINGS])  # of things by number, as are the others
_COLOUR = np.array([COLOURS[thing.colour] for thing in THINGS], dtype=np.float32)
_RADIUS = np.array([SIZES[thing.size] for thing in THINGS], dtype=np.float32)


_HALF_SIDE = 0.88  # of a square, in radii
_INRADIUS = 0.6  # of an equilateral triangle, in radii; its bounding box is 1.8 high and stands around the centre
_HALF = np.float32(0.5)
_SLOPE = np.float32(math.sqrt(3) / 2)


def picture_of(numbers: Int[np.ndarray, " count"], jitter: np.ndarray, picture: int) -> Float32[Tensor, "count 3 height width"]:
    """Pictures of scenes by number; `jitter` [count, 6] in [0, 1) places the things and chooses their radii.

    Two things stand a half of the picture apart along their relation, give or take 1.5 pixels of 32, and up to 5 apart across it;
    one stands up to 3 pixels beside the middle. They never overlap and none is cut by the frame.

    With s the signed distance of a pixel's centre to a thing's outline (negative inside, in pixels), the thing covers a share of
    1/2 - s of the pixel, cut off at 0 and 1. That is exact for a straight outline along the pixels, and for others up to the
    angle at which the outline crosses a pixel.
    """
    table = _table()
    scale, rows, away = picture / 32, table.things[numbers], table.away[numbers]  # [count, 2], [count, 2, (right, down)]
    jitter = jitter.reshape(-1, 2, 3)
    spread = np.where(away.any(axis=(1, 2))[:, None, None], np.where(away != 0, 0.75, 2.5), 3.0)
    centres = ((16 + 8 * away + spread * (jitter * 2 - 1)[:, :, :2]) * scale).astype(np.float32)
    low, high = np.moveaxis(_RADIUS[rows], -1, 0)
    radii = np.where(rows >= 0, (low + (high - low) * jitter[:, :, 2]) * scale, np.nan).astype(np.float32)
    covered, pixels = np.zeros((*rows.shape, picture, picture), dtype=np.float32), np.arange(picture, dtype=np.float32) + _HALF
    for place, shape in enumerate(SHAPES):
        own = np.nonzero((_SHAPE[rows] == place) & ~np.isnan(radii))
        right, down = (pixels - centres[own][:, axis, None] for axis in (0, 1))
        covered[own] = _covered(shape, right[:, None, :], down[:, :, None], radii[own][:, None, None])
    colours = _COLOUR[rows].transpose(0, 2, 1)  # [count, 3, 2]
    # No pixel is covered by both things, so a sum has one term that is not 0: exact in any order.
    pictures = torch.bmm(torch.from_numpy(np.ascontiguousarray(colours)), torch.from_numpy(covered).flatten(2))
    return pictures.unflatten(2, (picture, picture))


def _covered(shape: str, right: np.ndarray, down: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """1/2 - s between 0 and 1 for a shape around the origin; `right` has one row, `down` one column.

    The s of squares and triangles is the largest signed distance to one of their sides: exact inside, and outside but beyond a
    corner, where it is smaller than the distance.
    """
    if shape == "circle":
        return np.clip(radius + _HALF - np.sqrt(right * right + down * down), 0, 1)
    right = np.abs(right)
    if shape == "square":
        edge = radius * np.float32(_HALF_SIDE) + _HALF
        return np.minimum(np.clip(edge - right, 0, 1), np.clip(edge - np.abs(down), 0, 1))
    inradius = radius * np.float32(_INRADIUS)
    below = down - inradius / 2  # the middle of the inscribed circle stands half an inradius below that of the bounding box
    edge = inradius + _HALF
    sides = (edge + below / 2) - right * _SLOPE
    return np.maximum(np.minimum(sides, np.minimum(edge - below, 1)), 0)


CLASSIFIER = "scenes_classifier.safetensors"
_PICTURE = 32  # pixels of what the classifier reads
_HEADS = (3, *2 * (len(SHAPES), len(COLOURS), len(SIZES)))
"""Choices that the classifier makes: one thing or two beside or above each other; then shape, colour and size of the thing that
stands left or above, and of the other."""


class Classifier(nn.Module):
    """Four convolutions and two linear layers; pictures of 32 x 32 in, logits of each head's choices out."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for into, out, size, stride in ((3, 24, 5, 2), (24, 32, 3, 1), (32, 48, 3, 2), (48, 48, 3, 2)):
            layers += [nn.Conv2d(into, out, size, stride, size // 2), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.choices = nn.Sequential(nn.Linear(48 * 4 * 4, 96), nn.ReLU(), nn.Linear(96, sum(_HEADS)))

    def forward(self, pictures: Float[Tensor, "count 3 32 32"]) -> tuple[Tensor, ...]:
        return self.choices(self.features(pictures)).split(_HEADS, dim=1)


@lru_cache(maxsize=1)
def _classifier() -> Classifier:
    """The one that ships, as `experiments/train_classifier.py` trained it; weights in FP16 in the file, FP32 here."""
    model = Classifier()
    weights = load((files("numdev") / "data" / CLASSIFIER).read_bytes())
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.requires_grad_(False).eval()


def labels(scene: Scene) -> list[int]:
    """The right choice of each head; -1 for a thing that is not there."""
    shown = scene.canonical
    first, second = (
        [SHAPES.index(thing.shape), [*COLOURS].index(thing.colour), [*SIZES].index(thing.size)] if thing else [-1, -1, -1]
        for thing in (shown.first, shown.second)
    )
    return [("", "left of", "above").index(shown.relation), *first, *second]
