"""Train a task by itself, without the comparison of runs, and print what it learns; pictures go to a contact sheet.

    python experiments/train_task.py [small|full|language] [field=value ...] [--threads 2] [--device cpu] [--sheet samples.png]

As in `python experiments/train_task.py small steps=200 spread=1`. Loss on held-out data and seconds per step are printed every 50
steps, and in the end the score of samples, beside that of the untrained model.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from numdev.training.scenes import Scenes
from numdev.training.tasks import Batch, Language, Task, TextToImage

TASKS = {"small": TextToImage, "full": TextToImage.full, "language": Language}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="small", choices=TASKS)
    parser.add_argument("fields", nargs="*", help="fields of the task, and spread of the scenes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sheet", help="PNG of the first 64 samples")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    task = stated(TASKS[options.task](), dict(field.split("=") for field in options.fields))
    model = task.model(0).to(options.device)
    print(task, f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", sep="\n")
    before = task.samples(model, 0)
    print("untrained: held-out loss", f"{held_out_loss(task, model, options.device):.4f}", "score", before.score)
    train(task, model, options.device)
    after = task.samples(model, 0)
    print("trained: score", after.score)
    if options.sheet and after.pictures is not None:
        sheet(after.pictures[:64]).save(options.sheet)


def stated(task: Any, fields: dict[str, str]) -> Task:
    if "spread" in fields:
        task = replace(task, data=Scenes(float(fields.pop("spread"))))
    return replace(task, **{name: type(getattr(task, name))(float(text)) for name, text in fields.items()})


def train(task: Task, model: nn.Module, device: str) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=task.weight_decay, fused=True)
    start = time.perf_counter()
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.rate_at(step)
        loss = task.loss(model, moved(task.batch_of(step, 0), device))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), task.clip or float("inf"))
        optimizer.step()
        if (step + 1) % 50 == 0:
            rate = (time.perf_counter() - start) / (step + 1)
            held_out = held_out_loss(task, model, device)
            print(
                f"step {step + 1}: loss {loss:.4f}, held out {held_out:.4f}, gradient {norm:.3f}, {rate:.4f} s a step", flush=True
            )


def held_out_loss(task: Task, model: nn.Module, device: str) -> float:
    with torch.no_grad():
        return task.loss(model, moved(task.held_out(), device)).item()


def moved(batch: Batch, device: str) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def sheet(pictures: Tensor) -> Image.Image:
    """Pictures in rows of 8, enlarged three times."""
    rows = -(-len(pictures) // 8)
    padded = torch.zeros(rows * 8, *pictures.shape[1:])
    padded[: len(pictures)] = pictures
    tiled = padded.unflatten(0, (rows, 8)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    image = Image.fromarray(((tiled + 1) * 127.5).byte().numpy())
    return image.resize((3 * image.width, 3 * image.height), Image.Resampling.NEAREST)


if __name__ == "__main__":
    main()
