"""What a run leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from numdev.errors import BadInput
from numdev.results.files import write_atomically
from numdev.training.snapshots import Kept, Snapshots, parameters, read, steps_of

FILE = "trained.json"


@dataclass(frozen=True)
class Trained:
    """A finished run, or one whose loss or gradients stopped being finite.

    Attributes:
        folder: of its snapshots.
        key: of the run.
        steps: of the task.
        done: steps after which the weights are known to be finite; `steps` unless it stopped.
        losses: of each step that was done, the one that stopped it last.
        gradient_norms: likewise, before clipping; under a scaled loss one that is not finite is a step that was skipped.
        watched: `numdev.training.watch.FIGURES` of each step; empty where the rung is not watched.
        checksum: SHA-256 over names and FP32 bytes of the weights after the last step; of the last snapshot where it stopped.
        seconds: spent on steps, in all processes that worked on it one after the other.
        seconds_per_step: the median over stretches of steps.
        parameters: how many weights are trained.
        stopped: why it ended before the last step; empty where it did not.
        captured: whether the last process replayed a CUDA graph.
        calls: of attention that one step makes and that the rung's attention computed.
        missed: of attention that one step makes and that another computed.
        notes: what a reader should know: damaged checkpoints, why no graph was captured.
    """

    folder: Path
    key: str
    steps: int
    done: int
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    watched: tuple[tuple[float, ...], ...]
    checksum: str
    seconds: float
    seconds_per_step: float
    parameters: int
    stopped: str
    captured: bool
    calls: int
    missed: int
    notes: tuple[str, ...]

    @property
    def snapshots(self) -> dict[int, Path]:
        """The file of the weights after each step that has one."""
        return self.files(Kept.WEIGHTS)

    def files(self, kept: Kept) -> dict[int, Path]:
        """The files of one kind that snapshots have, by step."""
        return Snapshots(self.folder, steps_of(self.steps), (kept,)).found(kept, self.done)

    def weights(self, step: int) -> dict[str, Tensor]:
        """The FP32 parameters after a step that has a snapshot.

        Raises:
            BadInput: where it has none.
            Damaged: where its file is not what was written.
        """
        return parameters(self._snapshot(step))

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Parameters and buffers, for `numdev.training.state.model_of`; raises as `weights` does."""
        return read(self._snapshot(step))

    def _snapshot(self, step: int) -> Path:
        found = self.snapshots
        if step not in found:
            raise BadInput("step", step, f"{self.folder} has snapshots of steps {', '.join(map(str, found)) or 'none'}")
        return found[step]

    def write(self) -> None:
        """Write `trained.json`, which says that the run is finished; raises StoreError."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "folder"}
        write_atomically(self.folder / FILE, json.dumps(said, indent=1).encode())

    @staticmethod
    def find(folder: Path, key: str, kept: tuple[Kept, ...]) -> Trained | None:
        """What a folder holds of a finished run with these snapshots, or None.

        Raises:
            BadInput: if the run is another.
        """
        try:
            said: Mapping[str, Any] = json.loads((folder / FILE).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if said["key"] != key:
            mend = "it holds a run of another configuration, version or machine; give another folder, or delete it"
            raise BadInput("folder", str(folder), mend)
        lists = {f.name: tuple(said[f.name]) for f in fields(Trained) if str(f.type).startswith("tuple")}
        lists["watched"] = tuple(tuple(row) for row in said["watched"])
        found = Trained(folder=folder, **(dict(said) | lists))
        return found if Snapshots(folder, steps_of(found.steps), kept).complete(found.done) else None
