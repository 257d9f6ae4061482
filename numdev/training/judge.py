"""How good the weights of a finished run are, by the same measure for every rung."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from numdev.results.files import write_atomically
from numdev.training.deterministic import deterministic
from numdev.training.picture import contact_sheet
from numdev.training.run import Run
from numdev.training.state import model_of
from numdev.training.trained import Trained

_FILE, SAMPLES = "judged.json", "samples.png"


@dataclass(frozen=True)
class Judged:
    """Losses and samples of the weights of a run, computed in FP32 with plain attention: what differs lies in the weights.

    Attributes:
        checksum: of the weights that were judged.
        untrained_loss: of the initial weights on the held-out batch.
        held_out_loss: of the last weights.
        score: see `numdev.training.task.Samples`.
        captions: of the samples.
        text: what a language model wrote for each.
        pictures: whether `samples.png` stands beside it.
    """

    checksum: str
    untrained_loss: float
    held_out_loss: float
    score: float
    captions: tuple[str, ...]
    text: tuple[str, ...]
    pictures: bool


def judged(run: Run, trained: Trained, device: torch.device) -> Judged:
    """Judges the weights of a run; what is found is kept beside them.

    Raises:
        StoreError: if it cannot be written.
    """
    found = _kept(trained)
    if found is not None:
        return found
    with deterministic(), torch.no_grad():
        untrained, last = (model_of(run, device, trained.tensors(step)) for step in (0, max(trained.snapshots)))
        batch = {name: x.to(device) for name, x in run.task.held_out().items()}
        before, after = (float(run.task.loss(model, batch)) for model in (untrained, last))
        samples = run.task.samples(last, run.replicate)
    if samples.pictures is not None:
        write_atomically(trained.folder / SAMPLES, contact_sheet(samples.pictures))
    drawn = samples.pictures is not None
    found = Judged(trained.checksum, before, after, samples.score, samples.captions, samples.text, drawn)
    write_atomically(trained.folder / _FILE, json.dumps(asdict(found), indent=1).encode())
    return found


def _kept(trained: Trained) -> Judged | None:
    """What was found before of the same weights."""
    try:
        said: Mapping[str, Any] = json.loads((trained.folder / _FILE).read_bytes())
        found = Judged(**{**said, "captions": tuple(said["captions"]), "text": tuple(said["text"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    lacks = found.pictures and not (trained.folder / SAMPLES).is_file()
    return None if lacks or found.checksum != trained.checksum else found
