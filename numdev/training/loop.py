"""Trains a run, or goes on with it where it was left: the loop over steps, and the files of a run.

A run leaves snapshots of its weights, checkpoints that a killed run goes on from, and `trained.json` when it is finished. A file
of tensors is `<kind>-<step>.safetensors`; its header says how long it is, so that one that is cut off is detected.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from numdev.errors import BadInput, NumdevError, Unsupported
from numdev.results.record import Within, write_atomically
from numdev.training.attend import Trainable, attend
from numdev.training.run import Run, State, checksum, deterministic, refused
from numdev.training.rung import Restart
from numdev.training.tasks import Batch
from numdev.training.watch import Noise, Watch, Watched

CHECKPOINT, WEIGHTS = "checkpoint", "weights"  # kinds of files
FINISHED = "trained.json"
_CHECKPOINTS = 2  # that are kept
_READ_EVERY = {"cpu": 1, "cuda": 25}  # steps from one read of the losses to the next: each waits for the device
_CHECKPOINT_SECONDS = 20.0  # from one checkpoint to the next, at least
_ANOTHER = "of another configuration, version or machine"
_REFUSALS = "deterministic", "No available kernel"  # what torch says where deterministic algorithms leave none


def train(run: Run, folder: Path, device: torch.device, report: Within | None = None) -> Trained:
    """Train a run in a folder of its own, or go on with it there, or return what is finished.

    A run that was killed at any moment goes on from its last checkpoint to the same final weights, bit for bit. `report` is
    called each time that the losses are read, with the steps that are done, of how many, loss and speed. Algorithms are
    deterministic where there are such; a note says where there are none. Raises BadInput for a folder that holds another run,
    Unsupported for a model or an attention that cannot be trained as arguments, and StoreError if a file cannot be written; what
    was written stays.
    """
    key = run.key(device)
    folder.mkdir(parents=True, exist_ok=True)
    if (finished := Trained.find(folder, key)) is not None:
        return finished
    trained = Trained(folder, key, run.task.steps)
    with deterministic():
        try:
            return Training(run, device, report, replace(trained)).finish()
        except (RuntimeError, Unsupported) as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            why = f"no deterministic algorithm, so the same run again may have other bits: {str(error).splitlines()[0]}"
        torch.use_deterministic_algorithms(True, warn_only=True)
        return Training(run, device, report, replace(trained, notes=(why,))).finish()


class Training:
    """A run as this process trains it. `finish` does it; everything else is its parts.

    Losses are read after every step on a CPU; on a GPU after every 25, and before every snapshot and restart. A loss that is not
    finite, or gradients that are not although the loss is not scaled, end the run at the first such step, whenever it is read.
    """

    def __init__(self, run: Run, device: torch.device, report: Within | None, trained: Trained) -> None:
        self._run, self._device, self._report, self._trained = run, device, report, trained
        self._watch = Watch(device) if run.rung.watch else None
        self._stretches: list[float] = []  # seconds of a step, from one read to the next
        self._saved_at = time.perf_counter()

    def finish(self) -> Trained:
        """Do all steps that are left, and write what they leave; see `train`."""
        rung, watch = self._run.rung, self._watch
        attention: Trainable = rung.attention if watch is None else Watched(rung.attention, watch)
        if rung.noise is not None:
            attention = Noise(rung.attention, rung.noise)
        with attend(attention) as self._seen:
            self._begin(Restart.NONE)
            for batch in self._run.batches(self._trained.done):
                if self._trained.done == self._run.half:
                    # Every checkpoint of this step is from before the restart: a run that is resumed from it restarts too.
                    self._trained.write_checkpoint(self._state)
                    self._begin(self._run.rung.restart)
                self._advance(batch)
                if self._trained.stopped:
                    break
        trained, state = self._trained, self._state
        count = trained.done + bool(trained.stopped)
        figures = (tuple(x[:count].tolist()) for x in (state.losses, state.norms, state.watched))
        trained.losses, trained.gradient_norms, trained.watched = figures
        trained.checksum = checksum(trained.weights(max(trained.snapshots)) if trained.stopped else state.weights())
        trained.parameters = sum(x.numel() for x in state.parameters.values())
        trained.captured, trained.calls, trained.missed = state.graph is not None, state.seen.calls, state.seen.missed
        trained.write()
        trained.remove_checkpoints()
        return trained

    def _begin(self, restart: Restart) -> None:
        """A new model, in the state of the last checkpoint less what a restart loses, or in the initial one."""
        self._state, self._is_new = State(self._run, self._device, self._seen, self._watch), True
        if (saved := self._trained.resume()) is not None:
            self._state.restore(left(saved, restart))
        for torn in self._trained.folder.glob(".*.tmp"):  # of a process that was killed while it wrote
            torn.unlink(missing_ok=True)
        if self._trained.done == 0:
            self._trained.write_snapshot(self._state)
        self._clock, self._read_at = time.perf_counter(), self._trained.done

    def _advance(self, batch: Batch) -> None:
        """One step, and what is due after it."""
        trained, state = self._trained, self._state
        if self._is_new and self._device.type == "cuda" and (why := state.capture(batch)):
            trained.note(why)
        self._is_new = False
        state.step(trained.done, batch)
        if not state.seen.calls:
            hint = "it never calls torch.nn.functional.scaled_dot_product_attention; give a model with attention to exchange"
            raise BadInput("task.model", type(state.model).__name__, hint)
        trained.done = done = trained.done + 1
        if done % _READ_EVERY[self._device.type] and done not in (trained.steps, self._run.half, *trained.snapshot_steps):
            return
        self._read()
        if self._report is not None:
            rate = 1 / max(trained.seconds_per_step, 1e-9)
            self._report(trained.done, trained.steps, f"loss {float(state.losses[done - 1]):.3f}, {rate:.3g} steps/s")
        if not trained.stopped:
            trained.write_snapshot(state)
            if done < trained.steps and time.perf_counter() - self._saved_at >= _CHECKPOINT_SECONDS:
                trained.write_checkpoint(state)
                self._saved_at = time.perf_counter()
        self._clock, self._read_at = time.perf_counter(), self._trained.done

    def _read(self) -> None:
        """Wait for the device, take the time, and look at the losses since the last read."""
        trained, first, done = self._trained, self._read_at, self._trained.done
        losses, norms = self._state.losses[first:done].cpu(), self._state.norms[first:done].cpu()
        self._stretches.append((time.perf_counter() - self._clock) / (done - first))
        trained.seconds_per_step = statistics.median(self._stretches[1:] or self._stretches)  # the first compiles and captures
        good = losses.isfinite() if self._state.scale is not None else losses.isfinite() & norms.isfinite()
        if not bool(good.all()):
            place = int(good.logical_not().nonzero()[0])
            what = "gradients are" if math.isfinite(float(losses[place])) else "loss is"
            trained.done, trained.stopped = first + place, f"the {what} not finite at step {first + place}"


def left(state: dict[str, Tensor], restart: Restart) -> dict[str, Tensor]:
    """What a restart leaves of a state: weights and moments in BF16, or an optimizer that starts anew."""
    kinds = {Restart.LOSSY: ("weight/", "mean/", "square/"), Restart.WEIGHTS_ONLY: ("mean/", "square/", "updates/")}
    lost = {name: x for name, x in state.items() if name.startswith(kinds.get(restart, ()))}
    is_lossy = restart is Restart.LOSSY
    return state | {name: x.bfloat16().to(x.dtype) if is_lossy else torch.zeros_like(x) for name, x in lost.items()}


class Damaged(NumdevError):
    """A file of tensors that is not whole."""


def seal(folder: Path, kind: str, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write copies of tensors, whole or not at all; a file of the same kind and step is replaced. Raises StoreError."""
    held = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    write_atomically(folder / f"{kind}-{step:08d}.safetensors", save(held, metadata={"facts": json.dumps(dict(facts))}))


def sealed(folder: Path, kind: str) -> dict[int, Path]:
    """The files of a kind in a folder by step, the last step last."""
    return {int(path.stem.split("-")[1]): path for path in sorted(folder.glob(f"{kind}-{'[0-9]' * 8}.safetensors"))}


def unsealed(path: Path, hint: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a file; raises Damaged if it is not there, or not whole."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["facts"])  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} is damaged ({error}){hint}") from None


@dataclass
class Trained:
    """A run as far as it is trained: unfinished, finished, or ended since its loss or gradients were not finite.

    The table `run` (`numdev.training.weights.TABLES`) explains what is not explained here.
    """

    folder: Path
    key: str
    steps: int
    done: int = 0  # steps that are done, after which the weights are known to be finite; `steps` unless it stopped
    seconds_per_step: float = 0.0
    losses: tuple[float, ...] = ()  # of each step that was done, the one that stopped it last
    # Likewise, before clipping; under a scaled loss one that is not finite is a step that was skipped
    gradient_norms: tuple[float, ...] = ()
    # `numdev.training.watch.FIGURES` of each step; empty where the rung is not watched
    watched: tuple[list[float], ...] = ()
    checksum: str = ""  # over names and FP32 bytes of the weights after the last step; of the last snapshot where it stopped
    parameters: int = 0
    stopped: str = ""
    captured: bool = False  # whether the last process replayed a CUDA graph
    calls: int = 0
    missed: int = 0
    notes: tuple[str, ...] = ()
    untrained_loss: float | None = None
    held_out_loss: float | None = None  # None until it is judged, like the other figures of weights and samples
    score: float | None = None
    pictures: bool = False  # whether `samples.png` stands beside it

    @staticmethod
    def find(folder: Path, key: str) -> Trained | None:
        """The finished run of a folder that has all of its snapshots, or None; raises BadInput if the run is another."""
        try:
            facts: dict[str, Any] = json.loads((folder / FINISHED).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if facts["key"] != key:
            raise refused(folder, f"it holds a run {_ANOTHER}")
        facts |= {name: tuple(value) for name, value in facts.items() if isinstance(value, list)}
        trained = Trained(folder, **facts)
        return trained if trained.has_all_snapshots(trained.done) else None

    def write(self) -> None:
        """Write `trained.json`, which says that the run is finished; raises StoreError."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "folder"}
        write_atomically(self.folder / FINISHED, json.dumps(facts).encode())

    def note(self, text: str) -> None:
        """Tell the reader, once."""
        self.notes = tuple(dict.fromkeys((*self.notes, text)))

    @property
    def snapshot_steps(self) -> tuple[int, ...]:
        """After which steps there are snapshots: 0, 1, 2, 4, ..., and the last."""
        return (0, *(1 << n for n in range(self.steps.bit_length()) if 1 << n < self.steps), self.steps)

    @property
    def snapshots(self) -> dict[int, Path]:
        """The file of the weights after each step that has one, up to those that are done."""
        files = sealed(self.folder, WEIGHTS)
        return {step: files[step] for step in self.snapshot_steps if step <= self.done and step in files}

    def has_all_snapshots(self, done: int) -> bool:
        """Whether there is each snapshot of so many steps."""
        return sealed(self.folder, WEIGHTS).keys() >= {step for step in self.snapshot_steps if step <= done}

    def write_snapshot(self, state: State) -> None:
        """Write weights and buffers after the steps that are done, in FP32, if there is to be a snapshot; raises StoreError."""
        if self.done in self.snapshot_steps:
            buffers = dict(state.model.named_buffers())
            held = {name: x.float() if x.is_floating_point() else x for name, x in (state.weights() | buffers).items()}
            seal(self.folder, WEIGHTS, self.done, held, {"buffers": sorted(buffers)})

    def weights(self, step: int, *, buffers: bool = False) -> dict[str, Tensor]:
        """The FP32 parameters after a step that has a snapshot; with `buffers`, what `numdev.training.run.model_of` takes.

        Raises BadInput where it has none, and Damaged where its file is not whole.
        """
        paths = self.snapshots
        if step not in paths:
            raise BadInput("step", step, f"{self.folder} has snapshots of steps {', '.join(map(str, paths)) or 'none'}")
        tensors, facts = unsealed(paths[step], "; delete it, and the same command trains the run again")
        return {name: x for name, x in tensors.items() if buffers or name not in facts["buffers"]}

    def write_checkpoint(self, state: State) -> None:
        """Write a checkpoint of the steps that are done, and remove all but the last two; raises StoreError."""
        position = {"key": self.key, "done": self.done, "seconds_per_step": self.seconds_per_step}
        seal(self.folder, CHECKPOINT, self.done, state.tensors(), position)
        self.remove_checkpoints(_CHECKPOINTS)

    def remove_checkpoints(self, but: int = 0) -> None:
        """Remove all checkpoints but the last ones."""
        for _, path in sorted(sealed(self.folder, CHECKPOINT).items(), reverse=True)[but:]:
            path.unlink(missing_ok=True)

    def resume(self) -> dict[str, Tensor] | None:
        """Go back to the last whole checkpoint, whose tensors are returned, or stay where there is none; what is lost is noted.

        Raises BadInput if the checkpoint is of another configuration, of other sources or of another environment.
        """
        for path in reversed(sealed(self.folder, CHECKPOINT).values()):
            try:
                tensors, facts = unsealed(path)
            except Damaged as error:
                self.note(f"{error}; the run goes on from the one before it")
                continue
            if facts["key"] != self.key:
                raise refused(self.folder, f"it holds a checkpoint {_ANOTHER}")
            if self.has_all_snapshots(facts["done"]):
                vars(self).update(facts)
                return tensors
            self.note("snapshots before the last checkpoint are missing; the run starts from the first step")
            break
        return None
