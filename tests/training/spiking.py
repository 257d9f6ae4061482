"""Small models whose loss spikes at step 45 for a cause that is planted: in attention, in the learning rate, or not at all.

A model is one or two layers of attention over q, k and v that are parts of its input, mixed by a matrix that begins as the
identity. It learns what it computes at the start with exact attention, with noise added; so until a cause sets in, the loss is
that of the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import numdev as nd
from numdev.arithmetic.formats import BF16
from numdev.attention.exact import ExactBackward
from numdev.attention.precision import BackwardPrecision
from numdev.attention.tiled import TiledBackward
from numdev.training.attend import Variant

HEADS, DIM, AT, STEPS = 2, 8, 45, 55
Batch = tuple[Tensor, Tensor]
Plant = Callable[[Tensor, torch.Generator], None]
"""Changes q, k and v `[batch, tokens, 3, heads, dim]`."""


def kernel(bc: int = 4, **steps: Any) -> TiledBackward:
    """A kernel in BF16 with FP32 inside but for some steps."""
    tiling = nd.Tiling(64, bc)
    forward = nd.Tiled(nd.Precision.kernel(BF16).with_step(**steps), tiling, count=False)
    return TiledBackward(forward, BackwardPrecision.kernel(BF16), tiling, count=False)


def nothing(x: Tensor, generator: torch.Generator) -> None:
    """No cause."""


def large_logits(x: Tensor, generator: torch.Generator) -> None:
    """Logits of std 330 in head 1: in BF16 they are multiples of 4 and 8."""
    x[:, :, :2, 1] *= 18


def heavy_first_key(x: Tensor, generator: torch.Generator) -> None:
    """Attention is nearly uniform, and the first v is 1024: in BF16 tiles of 4 keys, of v below 1, change no sum any more."""
    x[:, :, :2] *= 0.2
    x[:, :, 2].uniform_(0.8, 1.0, generator=generator)
    x[:, 0, 2] = 1024


def ties(x: Tensor, generator: torch.Generator) -> None:
    """Each row of head 0 has two largest scores, far above the rest, whose v have one sign (Qiu and Yao 2025).

    P of both is exactly 1, and every other sum of two v of BF16 lies halfway between two numbers of BF16. What is left of P,
    about 10^-5, has the sign of v too: it decides the rounding, always away from zero.
    """
    for row in x:
        codes = torch.randperm(2**DIM, generator=generator)[: len(row) // 2].repeat(2)
        k = 1.0 - 2.0 * ((codes[:, None] >> torch.arange(DIM)) & 1)
        row[:, 0, 0], row[:, 1, 0] = 16 * k, k
    x[:, :, 2, 0].uniform_(-8, -4, generator=generator)


class Layer(nn.Module):
    """Attention with logits times a gain."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        mix = torch.eye(3 * HEADS * DIM)
        mix[: HEADS * DIM] *= gain
        self.mix = nn.Parameter(mix)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.mix.T).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v)


class Model(nn.Module):
    """The sum of layers; `pooled` sums over tokens and entries too, which shows a bias."""

    def __init__(self, gains: tuple[float, ...], *, pooled: bool) -> None:
        super().__init__()
        self.layers, self.pooled = nn.ModuleList(map(Layer, gains)), pooled

    def forward(self, x: Tensor) -> Tensor:
        out = torch.stack([layer(x) for layer in self.layers]).sum(0)
        return out.sum((-1, -2)) if self.pooled else out


@dataclass(frozen=True)
class Case:
    """A training run: its attention, what is planted at step `AT`, and by what the learning rate is multiplied from there on."""

    attention: Variant | None = field(default_factory=kernel)
    plant: Plant = nothing
    jump: float = 1.0
    rate: float = 1e-6
    noise: float = 0.1
    tokens: int = 16
    gains: tuple[float, ...] = (1.0,)
    pooled: bool = False

    def batches(self) -> Iterator[Batch]:
        teacher = Model(self.gains, pooled=self.pooled)
        for number in range(STEPS):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(4, self.tokens, 3 * HEADS * DIM, generator=generator)
            if number >= AT:
                self.plant(x.unflatten(-1, (3, HEADS, DIM)), generator)
            x = x.bfloat16().float()
            with torch.no_grad(), nd.attend(ExactBackward()):
                y = teacher(x)
            yield x, y + self.noise * torch.randn(y.shape, generator=generator)

    def set_up(self, folder: Path, **settings: Any) -> tuple[nd.doctor[Batch], Callable[[Batch], Tensor]]:
        """The doctor, and the step of a batch."""
        model = Model(self.gains, pooled=self.pooled)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.jump if step >= AT else 1.0)

        def step(batch: Batch) -> Tensor:
            optimizer.zero_grad()
            loss = (model(batch[0]) - batch[1]).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            return loss

        settings = {"state": [optimizer, schedule], "attention": self.attention, "steps": STEPS, "checkpoint": 5} | settings
        return nd.doctor(model, self.batches(), folder=folder, **settings), step


CASES = {
    "large logits": Case(kernel(scores=BF16), large_logits, noise=0.03, gains=(0.05, 1.0)),
    "accumulators": Case(kernel(accumulator=BF16), heavy_first_key, rate=1e-9, tokens=32),
    "ties": Case(kernel(bc=64, values=BF16), ties, rate=1e-9, noise=0.3, tokens=64, pooled=True),
    "learning rate": Case(jump=3e7),
    "none": Case(),
}
