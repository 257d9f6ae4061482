"""Weights at log-spaced steps."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.errors import BadInput
from numdev.training.sealed import Damaged, Sealed
from numdev.training.state import State

_SPARE = 64 << 20  # bytes beside snapshots and checkpoints


class Kept(Enum):
    """What is written at each snapshot: the weights always, the others where they are asked for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    MOMENTS = "moments"


def steps_of(steps: int) -> tuple[int, ...]:
    """After which steps: 0, 1, 2, 4, ..., and the last."""
    return (0, *(1 << n for n in range(steps.bit_length()) if 1 << n < steps), steps)


@dataclass(frozen=True)
class Snapshots:
    """Snapshots of a run: `weights-<step>-<digest>.safetensors` in its folder, in FP32, and gradients and moments on request.

    The weights of step s are those after s steps; its gradients are the last that the optimizer took up, clipped and not scaled;
    step 0 has none. Buffers of the model stand beside its parameters, and the fact `buffers` names them.
    """

    folder: Path
    steps: tuple[int, ...]
    kept: tuple[Kept, ...]

    def write(self, step: int, state: State) -> None:
        """Raises StoreError where a file cannot be written."""
        for kept in self.kept:
            if step == 0 and kept is Kept.GRADIENTS:
                continue
            facts = {"buffers": sorted(state.buffers())} if kept is Kept.WEIGHTS else {}
            held = {name: _wide(x) for name, x in self._tensors(kept, state).items()}
            Sealed.write(self.folder, kept.value, step, held, facts)

    def found(self, kept: Kept, before: int | None = None) -> dict[int, Path]:
        """The files of the snapshots, by step, up to a step."""
        wanted = {step for step in self.steps if before is None or step <= before}
        return {each.step: each.path for each in Sealed.all(self.folder, kept.value) if each.step in wanted}

    def complete(self, before: int) -> bool:
        """Whether every snapshot up to a step is there."""
        wanted = {step for step in self.steps if step <= before}
        return all(wanted - ({0} if kept is Kept.GRADIENTS else set()) <= set(self.found(kept)) for kept in self.kept)

    def check_room(self, state: State, done: int) -> None:
        """Raise BadInput unless the disk has room for the snapshots after `done` and for three checkpoints."""
        sizes = {
            Kept.WEIGHTS: 4 * _count(state.weights()) + 4 * _count(state.buffers()),
            Kept.GRADIENTS: 4 * _count(state.weights()),
            Kept.MOMENTS: 4 * _count(state.moments()),
        }
        left = sum(step >= done for step in self.steps)
        checkpoint = sum(x.nbytes for x in state.tensors().values())
        needed = left * sum(sizes[kept] for kept in self.kept) + 3 * checkpoint + _SPARE
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            mend = f"{needed / 1e6:,.0f} MB are needed for snapshots and checkpoints and {free / 1e6:,.0f} MB are free; make room"
            raise BadInput("folder", str(self.folder), mend)

    @staticmethod
    def _tensors(kept: Kept, state: State) -> dict[str, Tensor]:
        if kept is Kept.WEIGHTS:
            return state.weights() | state.buffers()
        return state.gradients() if kept is Kept.GRADIENTS else state.moments()


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32) if x.is_floating_point() else x.detach()


def _count(tensors: dict[str, Tensor]) -> int:
    return sum(x.numel() for x in tensors.values())


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a snapshot, parameters and buffers.

    Raises:
        Damaged: if the file is not what was written.
    """
    return _opened(path)[0]


def parameters(path: Path) -> dict[str, Tensor]:
    """The parameters of a snapshot of weights, without buffers; raises Damaged as `read` does."""
    tensors, facts = _opened(path)
    return {name: x for name, x in tensors.items() if name not in facts.get("buffers", ())}


def _opened(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        return Sealed(path, int(path.name.split("-")[1])).read()
    except Damaged as error:
        raise Damaged(f"{error}; delete it, and the same command trains the run again") from None
