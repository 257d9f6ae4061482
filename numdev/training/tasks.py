"""Tasks of training: a model, its data by step and seed, its loss, and how its samples score; text to image, and language."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from numdev.errors import BadInput
from numdev.settings import setting
from numdev.training.data import NULL, Folder, Purpose, Text, normal, stream
from numdev.training.models import DiffusionTransformer, LanguageModel, flow_loss, flowed
from numdev.training.scenes import Scenes

Batch = dict[str, Tensor]
"""Named tensors on the CPU, FP32 or int64, of one length in the first dimension."""


@dataclass(frozen=True)
class Samples:
    """The work of a trained model on held-out data: maybe pictures [captions, 3, height, width] in [-1, 1].

    `score` is the share in [0, 1] that is right, as the task measures it; NaN where the data offers no measure.
    """

    score: float
    pictures: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A frozen dataclass of what is trained; `numdev.results.record.describe` makes its key of its fields."""

    learning_rate: float = setting(3e-3, "largest learning rate of AdamW")
    warmup: int = setting(30, "steps over which the learning rate rises")
    weight_decay: float = setting(0.01, "of AdamW")
    clip: float = setting(1.0, "largest norm of the gradient; 0 clips nothing")

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of training steps."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Pictures or sequences of a step, over all ranks."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The model in FP32 on the CPU; its weights are a function of the seed alone."""

    @abstractmethod
    def batch_of(self, step: int, seed: int) -> Batch:
        """Everything random of a step, the same in any order of calls."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the batch, a scalar in FP32, on the device where the batch is."""

    @abstractmethod
    def held_out(self) -> Batch:
        """One fixed batch that no training step sees."""

    @abstractmethod
    def samples(self, model: nn.Module, seed: int) -> Samples:
        """The work of the model on held-out captions, with its score."""

    def __post_init__(self) -> None:
        self.check_at_least_one("steps", "batch")
        if not 0 < self.learning_rate < math.inf:
            raise BadInput("task.learning_rate", self.learning_rate, "use a number above 0")
        if not 0 <= self.warmup <= self.steps:
            raise BadInput("task.warmup", self.warmup, f"use 0 up to task.steps, {self.steps}")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"task.{name}", getattr(self, name), "use a number of at least 0")

    def check_at_least_one(self, *names: str) -> None:
        """Raise BadInput for the first of these fields that is below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise BadInput(f"task.{name}", getattr(self, name), "use at least 1")

    def replicates(self, seeds: int | None = None) -> int:
        """One unless told otherwise: each is a whole run, and one of its reference."""
        return 1 if seeds is None else seeds

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: linear over the first `warmup` steps, then half a cosine down to a tenth at the last."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


_Model = TypeVar("_Model", bound=nn.Module)


def seeded(make: Callable[[], _Model], seed: int) -> _Model:
    """A module whose initial weights depend on the seed alone; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return make()


_HELD_OUT = 2**31
"""Seed of what a held-out batch draws; seeds of runs lie below."""
_BYTES = 256  # different tokens of a text
_WINDOWS = 32  # of held-out text


@dataclass(frozen=True)
class TextToImage(Task):
    """A small diffusion transformer that makes pictures of captions by rectified flow.

    The defaults are the small size, for a CPU: 0.95 million parameters. In 400 steps its held-out loss falls from 0.099 to 0.012,
    and 0.29 of its pictures of held-out captions have all shapes and colours right, of an untrained model's 0.02. `full` is the
    large size, for a GPU.
    """

    data: Scenes | Folder = field(default_factory=Scenes)
    steps: int = setting(350, "training steps")
    batch: int = setting(32, "pictures of a step, over all ranks")
    picture: int = setting(32, "height and width of a picture", "pixels")
    patch: int = setting(4, "height and width of what becomes one token", "pixels")
    width: int = setting(96, "of the tokens of the model")
    depth: int = setting(4, "blocks of the model")
    heads: int = setting(3, "heads of attention; width / heads is head_dim")
    qk_norm: bool = setting(True, "normalise q and k of each head by their root mean square")
    dropped: float = setting(0.1, "share of training captions left out, for guidance")
    guidance: float = setting(1.0, "weight of the caption when sampling; 1 is none")
    sampled: int = setting(64, "held-out captions that pictures are made for")
    euler_steps: int = setting(20, "steps of a sample from noise to picture")

    @classmethod
    def full(cls) -> TextToImage:
        """10.0 million parameters, 256 tokens, head_dim 64, for one GPU; scenes use all the room that there is."""
        large = cls(Scenes(1.0), steps=2000, batch=64, learning_rate=1e-3, warmup=100, patch=2, width=256, depth=7, heads=4)
        return replace(large, guidance=1.5, sampled=256, euler_steps=40)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("picture", "patch", "width", "depth", "heads", "sampled", "euler_steps")
        if self.picture % self.patch:
            raise BadInput("task.patch", self.patch, f"use a divisor of task.picture, {self.picture}")
        if self.width % self.heads or self.width % 4:
            raise BadInput("task.width", self.width, f"use a multiple of 4 and of task.heads, {self.heads}")
        if not 0 <= self.dropped < 1:
            raise BadInput("task.dropped", self.dropped, "use a share from 0 to below 1")
        if not math.isfinite(self.guidance):
            raise BadInput("task.guidance", self.guidance, "use a finite number; 1 is no guidance")
        self.data.held_out(1, self.picture)  # raises BadInput for an image that cannot be read, before anything is trained

    def model(self, seed: int) -> nn.Module:
        sizes = (self.picture, self.patch, self.width, self.depth, self.heads, self.data.tokens, self.data.length)
        return seeded(lambda: DiffusionTransformer(*sizes, qk_norm=self.qk_norm), seed)

    def batch_of(self, step: int, seed: int) -> Batch:
        """Pictures, tokens of captions (a share `dropped` of them all NULL), noise and times."""
        drawn = self.data.drawn(step, seed, self.batch, self.picture)
        dropped = stream(Purpose.DROPPED, seed, step).random(self.batch) < self.dropped
        tokens = torch.where(torch.from_numpy(dropped)[:, None], NULL, drawn.tokens)
        return self._batch(drawn.pictures, tokens, step, seed)

    def held_out(self) -> Batch:
        drawn = self.data.held_out(self.sampled, self.picture)
        return self._batch(drawn.pictures, drawn.tokens, 0, _HELD_OUT)

    def loss(self, model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        return flow_loss(lambda x, time: model(x, time, batch["tokens"]), batch["noise"], batch["pictures"], batch["time"])

    def samples(self, model: nn.Module, seed: int) -> Samples:
        """Pictures for held-out captions by Euler's method, and what the data says of them."""
        captioned = self.data.held_out(self.sampled, self.picture)
        device = next(model.parameters()).device
        noise = normal(Purpose.SAMPLES, seed, 0, captioned.pictures.shape).to(device)
        tokens = captioned.tokens.to(device)

        def predicted(x: Tensor, time: Tensor) -> Tensor:
            """With classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598), the same for f as for v, linear in f."""
            picture: Tensor = model(x, time, tokens)
            if self.guidance == 1:
                return picture
            without: Tensor = model(x, time, torch.full_like(tokens, NULL))
            return without + self.guidance * (picture - without)

        with torch.no_grad():
            made = flowed(predicted, noise, self.euler_steps).clamp(-1, 1).float().cpu()
        return Samples(self.data.score(made, captioned.captions), made)

    def _batch(self, pictures: Tensor, tokens: Tensor, step: int, seed: int) -> Batch:
        time = stream(Purpose.TIMES, seed, step).random(len(pictures), dtype="float32")
        noise = normal(Purpose.NOISE, seed, step, pictures.shape)
        return {"pictures": pictures, "tokens": tokens, "noise": noise, "time": torch.from_numpy(time)}


@dataclass(frozen=True)
class Language(Task):
    """A small causal language model of the bytes of a text."""

    data: Text = field(default_factory=Text)
    steps: int = setting(300, "training steps")
    batch: int = setting(16, "sequences of a step, over all ranks")
    length: int = setting(128, "bytes that a sequence predicts from")
    width: int = setting(128, "of the tokens of the model")
    depth: int = setting(4, "blocks of the model")
    heads: int = setting(4, "heads of attention; width / heads is head_dim")
    qk_norm: bool = setting(True, "normalise q and k of each head by their root mean square")
    experts: int = setting(
        0,
        "experts of the second block, of which each token is routed to two, beside the gated delta rule in place of attention in "
        "the first; 0 has neither",
        "count",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("length", "width", "depth", "heads")
        if self.experts and (self.experts < 3 or self.depth < 2):
            raise BadInput("task.experts", self.experts, "give at least 3 and task.depth of at least 2, or 0")
        if self.width % self.heads:
            raise BadInput("task.width", self.width, f"use a multiple of task.heads, {self.heads}")
        self.data.ready(self.length + 1)

    def model(self, seed: int) -> nn.Module:
        sizes = (_BYTES, self.length, self.width, self.depth, self.heads)
        return seeded(lambda: LanguageModel(*sizes, qk_norm=self.qk_norm, experts=self.experts), seed)

    def batch_of(self, step: int, seed: int) -> Batch:
        return {"tokens": self.data.drawn(step, seed, self.batch, self.length + 1)}

    def held_out(self) -> Batch:
        return {"tokens": self.data.held_out(_WINDOWS, self.length + 1)}

    def loss(self, model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        """Mean of -log p(token | those before it) over all tokens but the first of each sequence, in nats; FP32."""
        tokens = batch["tokens"]
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def samples(self, model: nn.Module, seed: int) -> Samples:
        """No text is kept; the score is the share of held-out bytes that are predicted."""
        tokens = self.held_out()["tokens"].to(next(model.parameters()).device)
        with torch.no_grad():
            right = model(tokens[:, :-1]).argmax(dim=-1) == tokens[:, 1:]
        return Samples(right.double().mean().item())
