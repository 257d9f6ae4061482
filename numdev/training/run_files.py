"""The files of a run: snapshots of its weights, checkpoints that a killed run goes on from, and what a finished one leaves.

A file of tensors says what it holds: step and SHA-256 stand in its name, so that a damaged one is told at once.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from numdev.errors import BadInput, NumdevError
from numdev.results.files import write_atomically
from numdev.training.state import State

CHECKPOINT, WEIGHTS = "checkpoint", "weights"  # kinds of files
FINISHED = "trained.json"
_DIGITS = 32  # of the 64 hexadecimal digits of SHA-256, which a name has room for
_SUFFIX = ".safetensors"
_SPARE = 64 << 20  # bytes beside snapshots and checkpoints
_CHECKPOINTS = 2  # that are kept
_HISTORY = "history/"


class Damaged(NumdevError):
    """A file whose content is not what was written."""


@dataclass(frozen=True)
class Sealed:
    """A file `<kind>-<step>-<digest>.safetensors`."""

    path: Path
    step: int

    @staticmethod
    def write(folder: Path, kind: str, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write copies of tensors, whole or not at all; a file of the same kind and step is replaced.

        Raises:
            StoreError: if it cannot be written.
        """
        held = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        data = save(held, metadata={"facts": json.dumps(dict(facts))})
        path = folder / f"{kind}-{step:08d}-{_digest(data)}{_SUFFIX}"
        write_atomically(path, data)
        for other in Sealed.all(folder, kind):
            if other.step == step and other.path != path:
                other.path.unlink(missing_ok=True)

    @staticmethod
    def all(folder: Path, kind: str) -> list[Sealed]:
        """The files of a kind in a folder, by step."""
        pattern = re.compile(rf"{kind}-(\d+)-[0-9a-f]{{{_DIGITS}}}{re.escape(_SUFFIX)}")
        named = ((path, pattern.fullmatch(path.name)) for path in sorted(folder.glob(f"{kind}-*{_SUFFIX}")))
        return [Sealed(path, int(match[1])) for path, match in named if match]

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors and its facts.

        Raises:
            Damaged: if it is not there, or not what was written.
        """
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise Damaged(f"{self.path} cannot be read ({error.strerror})") from None
        if _digest(data) != self.path.name.removesuffix(_SUFFIX).rpartition("-")[2]:
            raise Damaged(f"{self.path} is damaged: its content does not have the SHA-256 of its name")
        length = int.from_bytes(data[:8], "little")
        facts: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["facts"])
        return load(data), facts


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def steps_of(steps: int) -> tuple[int, ...]:
    """After which steps there are snapshots: 0, 1, 2, 4, ..., and the last."""
    return (0, *(1 << n for n in range(steps.bit_length()) if 1 << n < steps), steps)


@dataclass(frozen=True)
class Snapshots:
    """The weights of a run after its `steps_of`, in FP32: those of step s are after s steps.

    Buffers of the model stand beside its parameters, and the fact `buffers` names them.
    """

    folder: Path
    steps: tuple[int, ...]

    def write(self, step: int, state: State) -> None:
        """Raises StoreError where the file cannot be written."""
        held = {name: _wide(x) for name, x in (state.weights() | state.buffers()).items()}
        Sealed.write(self.folder, WEIGHTS, step, held, {"buffers": sorted(state.buffers())})

    def paths(self, before: int) -> dict[int, Path]:
        """The files, by step, up to a step."""
        steps = [step for step in self.steps if step <= before]
        return {file.step: file.path for file in Sealed.all(self.folder, WEIGHTS) if file.step in steps}

    def complete(self, before: int) -> bool:
        """Whether every snapshot up to a step is there."""
        return len(self.paths(before)) == sum(step <= before for step in self.steps)

    def check_room(self, state: State, done: int) -> None:
        """Raise BadInput unless the disk has room for the snapshots after `done` and for three checkpoints."""
        snapshot = 4 * sum(x.numel() for x in (state.weights() | state.buffers()).values())
        checkpoint = sum(x.nbytes for x in state.tensors().values())
        needed = sum(step >= done for step in self.steps) * snapshot + 3 * checkpoint + _SPARE
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            hint = f"{needed / 1e6:,.0f} MB are needed for snapshots and checkpoints and {free / 1e6:,.0f} MB are free; make room"
            raise BadInput("folder", str(self.folder), hint)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32) if x.is_floating_point() else x.detach()


def read_snapshot(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters of a snapshot, and the buffers.

    Raises:
        Damaged: if the file is not what was written.
    """
    try:
        tensors, facts = Sealed(path, 0).read()
    except Damaged as error:
        raise Damaged(f"{error}; delete it, and the same command trains the run again") from None
    buffers = {name: tensors.pop(name) for name in facts["buffers"]}
    return tensors, buffers


@dataclass(frozen=True)
class Position:
    """Where a run is.

    Attributes:
        done: steps that have been done.
        restarted: whether the restart after half of the steps has been done.
        seconds: spent on steps.
        seconds_per_step: the median over the stretches of the last process.
    """

    done: int = 0
    restarted: bool = False
    seconds: float = 0.0
    seconds_per_step: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A position, with the tensors of `State` and the loss and gradient norm of each step that was done."""

    key: str
    position: Position
    state: dict[str, Tensor] = field(repr=False)
    history: dict[str, Tensor] = field(repr=False)

    def write(self, folder: Path) -> None:
        """Write it, and remove all but the last two; raises StoreError if it cannot be written."""
        tensors = self.state | {_HISTORY + name: x for name, x in self.history.items()}
        Sealed.write(folder, CHECKPOINT, self.position.done, tensors, {"key": self.key} | asdict(self.position))
        for old in Sealed.all(folder, CHECKPOINT)[:-_CHECKPOINTS]:
            old.path.unlink(missing_ok=True)

    @staticmethod
    def latest(folder: Path, key: str) -> tuple[Checkpoint | None, tuple[str, ...]]:
        """The last whole checkpoint of a folder, or None, and a sentence on each damaged one that was passed over.

        Raises:
            BadInput: if it is of another configuration, of other sources or of another environment.
        """
        notes: list[str] = []
        for file in reversed(Sealed.all(folder, CHECKPOINT)):
            try:
                tensors, facts = file.read()
            except Damaged as error:
                notes.append(f"{error}; the run goes on from the one before it")
                continue
            if facts.pop("key") != key:
                raise _another(folder, "a checkpoint")
            history = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_HISTORY)}
            history = {name.removeprefix(_HISTORY): x for name, x in history.items()}
            return Checkpoint(key, Position(**facts), tensors, history), tuple(notes)
        return None, tuple(notes)

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the checkpoints of a finished run."""
        for file in Sealed.all(folder, CHECKPOINT):
            file.path.unlink(missing_ok=True)


def _another(folder: Path, what: str) -> BadInput:
    hint = f"it holds {what} of another configuration, version or machine; give another folder, or delete it"
    return BadInput("folder", str(folder), hint)


def rounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state whose weights and moments went through BF16."""
    lossy = ("weight/", "mean/", "square/")
    return {name: x.to(torch.bfloat16).to(x.dtype) if name.startswith(lossy) else x for name, x in state.items()}


def without_moments(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state whose optimizer starts anew."""
    lost = ("mean/", "square/", "updates/")
    return {name: torch.zeros_like(x) if name.startswith(lost) else x for name, x in state.items()}


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
        return Snapshots(self.folder, steps_of(self.steps)).paths(self.done)

    def weights(self, step: int) -> dict[str, Tensor]:
        """The FP32 parameters after a step that has a snapshot.

        Raises:
            BadInput: where it has none.
            Damaged: where its file is not what was written.
        """
        return self._snapshot(step)[0]

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Parameters and buffers, for `numdev.training.state.model_of`; raises as `weights` does."""
        parameters, buffers = self._snapshot(step)
        return parameters | buffers

    def _snapshot(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        paths = self.snapshots
        if step not in paths:
            raise BadInput("step", step, f"{self.folder} has snapshots of steps {', '.join(map(str, paths)) or 'none'}")
        return read_snapshot(paths[step])

    def write(self) -> None:
        """Write `trained.json`, which says that the run is finished; raises StoreError."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "folder"}
        write_atomically(self.folder / FINISHED, json.dumps(facts, indent=1).encode())

    @staticmethod
    def find(folder: Path, key: str) -> Trained | None:
        """The finished run of a folder that has all of its snapshots, or None.

        Raises:
            BadInput: if the run is another.
        """
        try:
            facts: Mapping[str, Any] = json.loads((folder / FINISHED).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if facts["key"] != key:
            raise _another(folder, "a run")
        lists = {f.name: tuple(facts[f.name]) for f in fields(Trained) if str(f.type).startswith("tuple")}
        lists["watched"] = tuple(tuple(row) for row in facts["watched"])
        trained = Trained(folder=folder, **(dict(facts) | lists))
        return trained if Snapshots(folder, steps_of(trained.steps)).complete(trained.done) else None
