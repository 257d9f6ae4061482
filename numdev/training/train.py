"""Trains a run, or goes on with it where it was left."""

from __future__ import annotations

from pathlib import Path

import torch

from numdev.training.deterministic import deterministic
from numdev.training.execution import Execution, Told
from numdev.training.loop import Training
from numdev.training.run import Run
from numdev.training.trained import Trained
from numdev.training.world import World


def train(run: Run, folder: Path, device: torch.device, told: Told | None = None, execution: Execution | None = None) -> Trained:
    """Train a run in a folder of its own, or go on with it there, or return what is finished.

    A run that was killed at any moment goes on from its last checkpoint to the same final weights, bit for bit. Interrupted by
    Ctrl-C it writes a checkpoint first, unless the weights are just being changed.

    Args:
        run: what is trained.
        folder: holds its checkpoints and snapshots and nothing else; all ranks see it.
        device: where. Several ranks on CUDA take the devices from 0 on.
        told: is called with the progress, each time that the losses are read.
        execution: how; as `Execution()` unless given.

    Raises:
        BadInput: for a folder that holds another run, for a disk without room, and for ranks that there is no device for.
        Unsupported: for a model or an attention that cannot be trained as asked.
        StoreError: if a file cannot be written; what was written stays.
    """
    execution, key = execution or Execution(), run.key(device)
    folder.mkdir(parents=True, exist_ok=True)
    found = Trained.find(folder, key, execution.kept)
    if found is not None:
        return found
    if run.rung.ranks > 1:
        from numdev.training import ranks  # late: importing torch.distributed takes a second

        return ranks.train(run, folder, device, told, execution)
    with deterministic():
        return Training(run, folder, device, told, execution, World(), key).finish()
