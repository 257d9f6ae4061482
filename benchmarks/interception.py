"""Cost of interception: a training step with torch's attention exchanged for the same attention, against the step without.

What has no limit is printed in units of the step: a step that is hardly more than its calls, shadow mode, and capture.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from torch import nn

import numdev as nd
from benchmarks.timing import Result, paired
from numdev.arithmetic.formats import BF16, FP32
from numdev.attention.precision import BackwardPrecision
from numdev.attention.tiled import TiledBackward
from numdev.attention.vendor.sdpa import SdpaBackward

_LIMIT = 1.05


def results() -> list[Result]:
    return [exchanged(), fine_grained(), shadowed(), captured()]


def training_step(width: int = 128, tokens: int = 64, batch: int = 16) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A step of a small transformer: forward, backward, AdamW; it returns the loss."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 4), torch.randn(batch, tokens, width)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def exchanged() -> Result:
    """The model's own flash attention through `attend`, the context entered anew in every step."""
    _, step = training_step()
    variant = SdpaBackward(nd.Backend.FLASH, FP32)

    def ours() -> None:
        with nd.attend(variant):
            step()

    return paired("a training step under attend(SDPA)", ours, step, at_most=_LIMIT, runs=15)


def fine_grained() -> Result:
    """Times where a step is hardly more than its calls: 8 tokens of width 32."""
    _, step = training_step(width=32, tokens=8, batch=2)
    variant = SdpaBackward(nd.Backend.FLASH, FP32)

    def ours() -> None:
        with nd.attend(variant):
            for _ in range(10):
                step()

    def theirs() -> None:
        for _ in range(10):
            step()

    return paired("a training step of 8 tokens under attend(SDPA)", ours, theirs)


def shadowed() -> Result:
    model, step = training_step()
    kernel = nd.Tiled(nd.Precision.kernel(BF16), nd.Tiling(32, 32))
    tiled = TiledBackward(kernel, BackwardPrecision.kernel(BF16), nd.Tiling(32, 32))

    def ours() -> None:
        with nd.shadow({"tiled": tiled}, SdpaBackward(nd.Backend.FLASH, FP32), model=model):
            step()

    return paired("a training step in shadow mode, one tiled variant", ours, step, runs=3)


def captured() -> Result:
    model, step = training_step()

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder, nd.capture(model, folder):
            step()

    return paired("a training step that is captured, all layers, written with fsync", ours, step, runs=5)
