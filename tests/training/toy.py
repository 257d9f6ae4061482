"""A task so small that a step takes a millisecond: attention and two linear maps on random data."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from numdev.arithmetic.formats import BF16, FP32, Format
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Tiling
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.training.loop import Trained, train
from numdev.training.run import Run
from numdev.training.rung import Numerics, Rung
from numdev.training.tasks import Batch, Samples, Task

CPU = torch.device("cpu")
VANILLA = VanillaBackward(FP32)
KERNEL = Tiled(Precision.kernel(BF16), Tiling(4, 4))
TILED = TiledBackward(KERNEL, BackwardPrecision.kernel(BF16), Tiling(4, 4))


class Model(nn.Module):
    """One block with attention over four tokens."""

    shift: Tensor

    def __init__(self, width: int, dropout: float, *, attends: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)
        self.register_buffer("shift", torch.full((width,), 0.5))
        self.attends = attends

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x + self.shift).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v) if self.attends else v
        out: Tensor = self.out(self.drop(seen.transpose(1, 2).flatten(-2)))
        return out


@dataclass(frozen=True)
class Toy(Task):
    """A task of random numbers; the batch of step `poison` holds Inf, and that of step `torn` cannot be read."""

    steps: int = 12
    batch: int = 8
    _: KW_ONLY
    learning_rate: float = 1e-2
    warmup: int = 1
    weight_decay: float = 0.1
    clip: float = 0.1
    width: int = 8
    poison: int = -1
    torn: int = -1
    dropout: float = 0.0
    attends: bool = True

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Model(self.width, self.dropout, attends=self.attends)

    def batch_of(self, step: int, seed: int) -> Batch:
        if step == self.torn:
            raise OSError("no such picture")
        x = torch.randn(self.batch, 4, self.width, generator=torch.Generator().manual_seed(1000 * seed + step))
        return {"x": x / 0 if step == self.poison else x}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = (model(batch["x"]).float() - batch["x"].flip(1)).square().mean()
        return loss

    def held_out(self) -> Batch:
        return self.batch_of(10**6, 0)

    def samples(self, model: nn.Module, seed: int) -> Samples:
        return Samples(0.0)


def toy(steps: int = 12, numerics: Numerics = Numerics.FP32, task: Toy | None = None, **rung: Any) -> Run:
    """A run of plain attention in the format of its numerics."""
    return Run(task or Toy(steps), Rung(VanillaBackward(Format.parse(numerics.format)), numerics, **rung))


def trained(run: Run, folder: Path) -> Trained:
    return train(run, folder, CPU)
