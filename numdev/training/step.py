"""One step of training, called operation by operation or replayed as a CUDA graph."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from numdev.errors import Unsupported
from numdev.training.interception import CallCounts
from numdev.training.run import Run
from numdev.training.rung import Numerics
from numdev.training.state import State
from numdev.training.task import Batch
from numdev.training.watch import FIGURES, Watch

_WARM_UPS = 3  # steps before a capture: allocator, cuBLAS and Triton have done then what they do once


class World:
    """The processes that share a batch, seen from one of them: one alone. `numdev.training.ranks.Ranks` is one of several."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    def average(self, gradients: list[Tensor], loss: Tensor) -> Tensor:
        """Replace gradients by their mean over the processes; returns the mean of the loss."""
        return loss

    def wait(self) -> None:
        """Return when all processes have come here."""

    def agree(self, checksum: str) -> None:
        """Raise RuntimeError unless all processes have this checksum."""


class History:
    """The loss of each step, and the norm of its gradients before clipping, on the device: nothing waits to read one.

    A norm that is not finite under a scaled loss is a step that the optimizer skipped. With a watch, its figures too.
    """

    def __init__(self, steps: int, device: torch.device, watch: Watch | None = None) -> None:
        self.losses = torch.zeros(steps, device=device)
        self.norms = torch.zeros(steps, device=device)
        self.watch = watch
        self.watched = torch.zeros(steps if watch else 0, len(FIGURES), dtype=torch.float64, device=device)

    def note(self, step: int, loss: Tensor, norm: Tensor) -> None:
        self.losses[step].copy_(loss)
        self.norms[step].copy_(norm)
        if self.watch is not None:
            self.watched[step].copy_(self.watch.row)

    def tensors(self, done: int) -> dict[str, Tensor]:
        return {"losses": self.losses[:done], "norms": self.norms[:done], "watched": self.watched[:done]}

    def restore(self, saved: dict[str, Tensor]) -> None:
        for name, x in self.tensors(len(saved["losses"])).items():
            x.copy_(saved[name])


class Step:
    """Steps of a run, one operation after the other.

    Attributes:
        calls, missed: of attention in the last step, as `CallCounts` counts them.
    """

    captured = False

    def __init__(
        self, run: Run, state: State, device: torch.device, world: World, seen: CallCounts, watch: Watch | None = None
    ) -> None:
        self._run, self._state, self._device, self._world, self._seen, self._watch = run, state, device, world, seen, watch
        self.calls = self.missed = 0

    def __call__(self, step: int, batch: Batch, history: History) -> None:
        """Do step `step` and note its loss and norm."""
        self._state.rate.fill_(self._run.task.rate_at(step))
        history.note(step, *self.update({name: x.to(self._device) for name, x in batch.items()}))

    def update(self, batch: Batch) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Loss and norm of the gradients of a step, without any wait for the device.

        Loss under the rung's numerics, gradients, their mean over the ranks, their clipping to a norm, AdamW.
        """
        state, task, scale = self._state, self._run.task, self._state.scale
        calls, missed = self._seen.calls, self._seen.missed
        if self._watch is not None:
            self._watch.begin()
        for x in state.parameters.values():
            x.grad = None
        with self._casting():
            loss = task.loss(state.model, batch).float()
        (loss if scale is None else loss * scale.scale).backward()
        self.calls, self.missed = self._seen.calls - calls, self._seen.missed - missed
        if self._watch is not None:
            self._watch.end()
        with torch.no_grad():
            gradients = list(state.gradients().values())
            if scale is not None:
                scale.unscale(gradients)
            loss = self._world.average(gradients, loss.detach())
            norm = get_total_norm([x.float() for x in gradients])
            if task.clip > 0:
                clip_grads_with_norm_(state.parameters.values(), task.clip, norm)
            state.whole = False
            if scale is not None:
                scale.update(norm)
            state.optimizer.step()
        return loss, norm

    def _casting(self) -> AbstractContextManager[object]:
        """The context in which the model is called."""
        numerics = self._run.rung.numerics
        if numerics is Numerics.FP32:
            return nullcontext()
        return torch.autocast(self._device.type, torch.float16 if numerics is Numerics.FP16 else torch.bfloat16)


class GraphStep(Step):
    """Steps as replays of one CUDA graph, whose inputs are copied into the same memory each time.

    A step of the text-to-image model of 10 million parameters on an H200 takes 16.4 ms so, and 79 ms without: it is bound by
    launches (`python -m benchmarks.training`). `batch` has the shapes of all batches; its values leave nothing behind.
    """

    captured = True

    def __init__(
        self, run: Run, state: State, device: torch.device, seen: CallCounts, batch: Batch, watch: Watch | None = None
    ) -> None:
        super().__init__(run, state, device, World(), seen, watch)
        self._inputs = {name: x.to(device) for name, x in batch.items()}
        before = {name: x.clone() for name, x in state.tensors().items()}
        side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self.update(self._inputs)
        main.wait_stream(side)
        state.restore(before)
        for x in state.parameters.values():
            x.grad = None  # the graph's own memory holds them from now on
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss, self._norm = self.update(self._inputs)

    def __call__(self, step: int, batch: Batch, history: History) -> None:
        self._state.rate.fill_(self._run.task.rate_at(step))
        for name, x in batch.items():
            self._inputs[name].copy_(x)
        self._state.whole = False
        self._graph.replay()
        history.note(step, self._loss, self._norm)


def step_of(
    run: Run, state: State, device: torch.device, world: World, seen: CallCounts, batch: Batch, watch: Watch | None, graphs: bool
) -> tuple[Step, str]:
    """A step, captured as a CUDA graph where `graphs` is true and it can be; and why it is not where a GPU has none."""
    eager = Step(run, state, device, world, seen, watch)
    if not graphs or device.type != "cuda":
        return eager, ""
    if world.size > 1:
        return eager, "a step of several ranks is not captured"
    before = {name: x.clone() for name, x in state.tensors().items()}
    try:
        return GraphStep(run, state, device, seen, batch, watch), ""
    except (RuntimeError, Unsupported) as error:
        why = f"the step cannot be captured: {str(error).strip().splitlines()[0]}"
    torch.cuda.synchronize(device)
    state.restore(before)
    return eager, why
