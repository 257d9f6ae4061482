"""Train the classifier that scores pictures of scenes, and write the file of its weights that ships with numdev.

    python experiments/train_classifier.py [--steps 3000]

Takes about two minutes on one CPU thread. Its accuracy on rendered scenes that it was not trained on is printed.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from numdev.results.record import write_atomically
from numdev.training.data import Purpose, stream
from numdev.training.scenes import CLASSIFIER, Classifier, Scenes, labels, scenes
from numdev.training.tasks import TextToImage, seeded

_SEED = 2**31 + 1  # of the classifier's scenes; no run has it


def trained(steps: int, largest: float, warmup: int, batch: int) -> Classifier:
    """A classifier trained on the renderer from a fixed seed, in FP32 on the CPU; its learning rate is that of a task.

    It sees training scenes and held-out ones alike, with noise, so that it also reads pictures that are not clean.
    """
    model, task = seeded(Classifier, 0), TextToImage(steps=steps, learning_rate=largest, warmup=warmup)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = task.rate_at(step)
        drawn = Scenes(1.0).drawn(step, _SEED, batch, 32, held_out=step % 4 == 3)
        right = torch.tensor([labels(scenes()[caption]) for caption in drawn.captions]).unbind(1)
        pairs = zip(model(noisy(drawn.pictures, step)), right, strict=True)
        loss = sum((functional.cross_entropy(logits, right, ignore_index=-1) for logits, right in pairs), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def noisy(pictures: Tensor, step: int) -> Tensor:
    random = stream(Purpose.JUDGE, _SEED, step)
    noise = random.standard_normal(tuple(pictures.shape), dtype=np.float32)
    return pictures + torch.from_numpy(noise * random.uniform(0, 0.3, (len(pictures), 1, 1, 1)).astype(np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = trained(options.steps, 2e-3, 100, batch=64).state_dict()
    path = Path(str(files("numdev"))) / "data" / CLASSIFIER
    write_atomically(path, save({name: weight.half().contiguous() for name, weight in weights.items()}))
    held_out = Scenes().held_out(2048, 32)
    print(path, path.stat().st_size, "bytes", Scenes().score(held_out.pictures, held_out.captions))


if __name__ == "__main__":
    main()
