"""In how many runs the loss spikes, by learning rate, warm-up and weights: how the setting of `study=spikes_rate` was found.

Plain attention alone; everything else is as in the study. Run: `OMP_NUM_THREADS=1 python experiments/spike_rates.py [seeds]`, ten
by default, one to two minutes on a CPU core for each setting.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from numdev.arithmetic.formats import BF16
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.report.studies.spikes import excursions
from numdev.training.loop import train
from numdev.training.run import Run
from numdev.training.rung import Numerics, Rung
from numdev.training.tasks import Language

PLAIN = Language(steps=400, batch=8, length=64, width=32, depth=2, heads=1, clip=0.0, qk_norm=False)
SHORT = replace(PLAIN, batch=32, length=32)
SETTINGS = [
    *((replace(PLAIN, learning_rate=rate, warmup=300), Numerics.BF16) for rate in (0.5, 0.55, 0.6, 0.7)),
    *((replace(PLAIN, learning_rate=rate, warmup=400), Numerics.BF16) for rate in (0.5, 0.7)),
    (replace(PLAIN, learning_rate=0.55, warmup=300), Numerics.BF16_WEIGHTS),
    (replace(SHORT, learning_rate=0.05, warmup=100), Numerics.BF16),
    (replace(SHORT, learning_rate=0.03, warmup=60, depth=4), Numerics.BF16),
]


def main(seeds: int) -> None:
    for task, numerics in SETTINGS:
        spiked, last = 0, 0.0
        for seed in range(seeds):
            run = Run(task, Rung(VanillaBackward(BF16), numerics, seed=seed))
            with tempfile.TemporaryDirectory() as folder:
                losses = train(run, Path(folder), torch.device("cpu")).losses
            spiked, last = spiked + bool(excursions(losses)), last + losses[-1] / seeds
        about = f"depth {task.depth}, batch {task.batch} x {task.length}, {numerics.value}"
        print(
            f"learning rate {task.learning_rate:g}, warm-up {task.warmup}, {about}: {spiked} of {seeds}, last loss {last:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
