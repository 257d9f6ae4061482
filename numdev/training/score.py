"""Whether pictures show what their captions say, by a small classifier trained on the renderer."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional

from numdev.training.scenes import Colour, Relation, Scene, Shape, Size, draw, scenes
from numdev.training.task import Purpose, rate_at, seeded, stream

FILE = "scenes_classifier.safetensors"
_PICTURE = 32
_SEED = 2**31 + 1  # of the classifier's scenes; no run has it
_HEADS = (3, len(Shape), len(Colour), len(Size), len(Shape), len(Colour), len(Size))
"""Choices that the classifier makes: one thing or two beside or above each other; then shape, colour and size of the thing that
stands left or above, and of the other."""
_SHAPES, _COLOURS = [1, 4], [2, 5]  # places in `_HEADS`


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


def trained(steps: int, largest: float, warmup: int, batch: int) -> Classifier:
    """A classifier trained on the renderer from a fixed seed, in FP32 on the CPU; its learning rate is that of `rate_at`.

    It sees training scenes and held-out ones alike, with noise, so that it also reads pictures that are not clean.
    """
    model = seeded(Classifier, 0)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, largest, warmup)
        drawn = draw(_SEED, step, batch, _PICTURE, held_out=step % 4 == 3)
        pairs = zip(model(_noisy(drawn.pictures, step)), _labels()[torch.from_numpy(drawn.numbers)].unbind(1), strict=True)
        loss = sum((functional.cross_entropy(logits, right, ignore_index=-1) for logits, right in pairs), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _noisy(pictures: Tensor, step: int) -> Tensor:
    random = stream(Purpose.JUDGE, _SEED, step)
    noise = random.standard_normal(tuple(pictures.shape), dtype=np.float32)
    return pictures + torch.from_numpy(noise * random.uniform(0, 0.3, (len(pictures), 1, 1, 1)).astype(np.float32))


@lru_cache(maxsize=1)
def _classifier() -> Classifier:
    """The one that ships, as `experiments/train_classifier.py` trained it; weights in FP16 in the file, FP32 here."""
    model = Classifier()
    weights = load((files("numdev") / "data" / FILE).read_bytes())
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.requires_grad_(False).eval()


def shares(pictures: Float[Tensor, "count 3 height width"], captions: tuple[str, ...]) -> dict[str, float]:
    """Shares of pictures that show what their captions say.

    `score`: all shapes and colours that the caption names, and no others. `relation`: these, in the right order beside or above
    each other. `size`: these, and each of the right size too. `colours`: all colours, whatever the shapes.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        logits = _classifier()(functional.interpolate(pictures.float(), (_PICTURE, _PICTURE), mode="bilinear", antialias=True))
    seen = torch.stack([choices.argmax(dim=1) for choices in logits], dim=1)
    right = _labels()[[_numbers()[caption] for caption in captions]]
    seen[:, 4:] = torch.where(seen[:, :1] > 0, seen[:, 4:], -1)
    alike = seen == right
    things = _agree(seen, right, _SHAPES + _COLOURS)
    ordered = things & alike[:, [0, *_SHAPES, *_COLOURS]].all(dim=1)
    rows = {"score": things, "relation": ordered, "size": alike.all(dim=1), "colours": _agree(seen, right, _COLOURS)}
    return {name: each.double().mean().item() for name, each in rows.items()}


def _agree(seen: Tensor, right: Tensor, heads: list[int]) -> Tensor:
    """Whether these choices are right for both things, whichever stands first."""
    crossed = [(head + 2) % 6 + 1 for head in heads]
    return (seen[:, heads] == right[:, heads]).all(dim=1) | (seen[:, heads] == right[:, crossed]).all(dim=1)


@lru_cache(maxsize=1)
def _numbers() -> dict[str, int]:
    return {scene.caption: number for number, scene in enumerate(scenes())}


@lru_cache(maxsize=1)
def _labels() -> Int[Tensor, "scenes heads"]:
    """The right choices for every scene, by number; -1 for a thing that is not there."""
    return torch.tensor([_label(scene) for scene in scenes()])


def _label(scene: Scene) -> list[int]:
    shown = scene.canonical
    kind = 0 if shown.relation is None else 1 if shown.relation is Relation.LEFT_OF else 2
    things = [[list(type(part)).index(part) for part in (thing.shape, thing.colour, thing.size)] for thing in shown.things]
    return [kind, *things[0], *(things[1] if shown.second else [-1, -1, -1])]
