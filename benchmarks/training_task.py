"""How fast batches are made, and a step of the small task on two threads."""

from __future__ import annotations

import torch

from benchmarks.timing import Result, bounded, median_seconds
from numdev.training.tasks import Language, TextToImage

_THREADS = 2


def results() -> list[Result]:
    return [batches(), step(TextToImage(), "text to image, small", 0.1), step(Language(), "language", 0.1)]


def batches() -> Result:
    """128 pictures with captions, noise and times, on one core: what feeds a step of 10 ms on a GPU."""
    task, before = TextToImage.full(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = median_seconds(lambda: task.batch_of(1, 0), runs=25)
    finally:
        torch.set_num_threads(before)
    return bounded("128 captioned pictures of a batch, one core", found, 5e-3)


def step(task: TextToImage | Language, name: str, limit: float) -> Result:
    """A batch, its loss, the gradients and AdamW, in FP32."""
    model, before = task.model(0), torch.get_num_threads()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def whole() -> None:
        optimizer.zero_grad()
        task.loss(model, task.batch_of(0, 0)).backward()
        optimizer.step()

    torch.set_num_threads(_THREADS)
    try:
        found = median_seconds(whole, runs=15)
    finally:
        torch.set_num_threads(before)
    return bounded(f"step of {name}, {_THREADS} threads", found, limit)
