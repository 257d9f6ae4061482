"""What text-to-image models are trained on: the protocol, and rendered scenes as one that needs no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from numdev.errors import BadInput
from numdev.settings import setting
from numdev.training.data import scenes
from numdev.training.data.tokens import Vocabulary


@dataclass(frozen=True)
class Captioned:
    """Pictures [count, 3, height, width] in [-1, 1], FP32; the tokens [count, length] of their captions; and the captions."""

    pictures: Tensor
    tokens: Tensor
    captions: tuple[str, ...] = ()


@runtime_checkable
class Pictures(Protocol):
    """Captioned pictures, as a frozen dataclass."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    def ready(self, picture: int) -> None:
        """Reads and checks all data, so that an error is raised before training."""

    def drawn(self, step: int, seed: int, count: int, picture: int) -> Captioned:
        """Pictures of a training step, a function of the arguments; `captions` may be left empty."""

    def held_out(self, count: int, picture: int) -> Captioned:
        """Up to `count` pictures that no training step sees, the same in every call, with captions."""

    def score(self, pictures: Tensor, captions: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
        """Figures by name of pictures made for captions, the score first; empty where there is no measure."""


@dataclass(frozen=True)
class Scenes:
    """Rendered scenes without end; see `numdev.training.data.scenes`.

    Attributes:
        spread: how much places and sizes vary, as a share of the room that there is. The less, the sooner a model learns.

    Raises:
        BadInput: it is no share.
    """

    spread: float = setting(0.2, "how much places and sizes vary, from 0 to 1")

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= 1:
            raise BadInput("task.data.spread", self.spread, "use a share from 0 to 1")

    @property
    def vocabulary(self) -> Vocabulary:
        return scenes.vocabulary()

    def ready(self, picture: int) -> None:
        scenes.tokens()

    def drawn(self, step: int, seed: int, count: int, picture: int) -> Captioned:
        found = scenes.draw(seed, step, count, picture, spread=self.spread)
        return Captioned(found.pictures, scenes.tokens()[torch.from_numpy(found.numbers)])

    def held_out(self, count: int, picture: int) -> Captioned:
        found = scenes.draw(0, 0, count, picture, spread=self.spread, held_out=True)
        captions = tuple(scene.caption for scene in found.scenes)
        return Captioned(found.pictures, scenes.tokens()[torch.from_numpy(found.numbers)], captions)

    def score(self, pictures: Tensor, captions: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
        from numdev.training.score import score  # late: it loads a classifier, which nothing but samples needs

        return score(pictures, captions)
